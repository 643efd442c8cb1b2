"""Dynamo's index of KV blocks, by which it and Ray Serve's `KVAwareRouter` route, against a server with `--kv-events`.

    python tests/clients/with_dynamo.py 127.0.0.1:5557 http://127.0.0.1:8000      # run.sh starts one

Runs in an environment with `ai-dynamo-runtime`, without Penstock. Prints a line for each check, and exits with 1 if one fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import urllib.request
from typing import Any

from dynamo.llm import SelectionService

from support.clients.checks import run

EVENTS, URL = sys.argv[1:]
MODEL = {"model_name": "any", "tenant_id": "any"}
BLOCK_SIZE = 16
TIMEOUT_S = 20.0
BEFORE, AFTER = ([7000 + first + step for step in range(50)] for first in (0, 100))


def complete(token_ids: list[int]) -> None:
    body = json.dumps({"prompt": token_ids, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{URL}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        answer.read()


async def blocks_of(service: Any, token_ids: list[int], expected: int) -> int:
    """The whole blocks of a prompt that the server holds, once they are as many as expected, or after a while."""
    end_s = time.monotonic() + TIMEOUT_S
    while True:
        scores = await service.overlap_scores({**MODEL, "token_ids": token_ids})
        found: int = scores["workers"][0]["device_blocks"]
        if found == expected or time.monotonic() > end_s:
            return found
        await asyncio.sleep(0.1)


async def index() -> None:
    """Dynamo asks again for messages before the first one that it gets."""
    complete(BEFORE)
    host, port = EVENTS.rsplit(":", 1)
    service = SelectionService(indexer_threads=1)
    await service.upsert_worker(
        {
            **MODEL,
            "worker_id": 1,
            "endpoint": URL,
            "block_size": BLOCK_SIZE,
            "max_num_batched_tokens": 512,
            "data_parallel_start_rank": 0,
            "data_parallel_size": 1,
            "kv_events_endpoints": {0: f"tcp://{EVENTS}"},
            "replay_endpoint": f"tcp://{host}:{int(port) + 1}",
        }
    )
    await asyncio.sleep(1)  # until it subscribes
    complete(AFTER)
    assert await blocks_of(service, AFTER, 3) == 3
    assert await blocks_of(service, BEFORE, 3) == 3
    assert await blocks_of(service, AFTER[:40], 2) == 2
    assert await blocks_of(service, BEFORE[1:], 0) == 0


def kv_events(_: None) -> None:
    asyncio.run(index())


if __name__ == "__main__":
    sys.exit(run("dynamo", [kv_events], lambda _: None))
