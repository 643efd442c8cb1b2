"""Hundreds of requests over HTTP, some cancelled, some hopeless, some whose client leaves: nothing is left behind."""

import asyncio
import random
import time
from collections import Counter

import httpx
import pytest

from penstock import fast_json
from penstock.admission.door import AdmissionLimits
from penstock.testing import HashExecutor
from support.server.harness import CAPACITY, PRINTABLE_MODEL, running, until

FEW, MANY = 120, 500
"""Requests that are enough to have every kind of end among them, and those of a long run."""
CONCURRENCY = 40


class SlowExecutor(HashExecutor):
    """A step takes some time, as on any device: else answers end before their clients have read how they begin."""

    def collect(self, ticket):
        time.sleep(0.002)
        return super().collect(ticket)


async def one(client: httpx.AsyncClient, idx: int, kind: str, rng: random.Random) -> str:
    """The end that the request came to."""
    body = {
        "prompt": f"{idx} " + "p" * rng.randint(1, 200),
        "max_tokens": 1500 if kind == "cancelled" else rng.randint(20, 80),
        "ignore_eos": True,
        "stream": True,
    }
    headers = {"X-Request-Id": f"soak-{idx}"} | ({"X-Deadline-Ms": "1"} if kind == "hopeless" else {})
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        if response.status_code != 200:
            await response.aread()
            return str(response.json()["error"]["code"])
        num_events = 0
        async for line in response.aiter_lines():
            if not line.startswith("data: "):
                continue
            num_events += 1
            if line == "data: [DONE]":
                return "done"
            if "error" in fast_json.loads(line[6:]):
                return str(fast_json.loads(line[6:])["error"]["code"])
            if kind == "leaves":
                return "left"
            if kind == "cancelled" and num_events == 1:
                await client.delete(f"/v1/requests/soak-{idx}")
    return "broke off"


@pytest.mark.parametrize(
    ("num_requests", "depth"), [(FEW, 1), (FEW, 2), *[pytest.param(MANY, depth, marks=pytest.mark.slow) for depth in (1, 2)]]
)
async def test_nothing_is_left_behind_by_hundreds_of_requests(num_requests, depth):
    rng = random.Random(5)
    kinds = rng.choices(["served", "cancelled", "hopeless", "leaves"], [0.90, 0.06, 0.02, 0.02], k=num_requests)
    assert set(kinds) == {"served", "cancelled", "hopeless", "leaves"}
    executor = SlowExecutor(CAPACITY, model=PRINTABLE_MODEL, depth=depth)
    with running(executor, limits=AdmissionLimits(max_queue=num_requests, kv_headroom=0)) as server:
        slots = asyncio.Semaphore(CONCURRENCY)
        limits = httpx.Limits(max_connections=CONCURRENCY + 8)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:

            async def limited(idx: int) -> tuple[str, str]:
                async with slots:
                    return kinds[idx], await one(client, idx, kinds[idx], rng)

            fates = Counter(await asyncio.gather(*map(limited, range(num_requests))))
            engine = server.runtime.engine
            await until(lambda: engine.load().num_running + engine.load().num_waiting == 0)
            await until(lambda: engine.load().num_blocks_held == 0)  # a step in flight may still have a row of who ended last
            assert server.runtime.bridge.num_open_requests == 0
            assert (await client.get("/health")).status_code == 200
    assert fates["served", "done"] == kinds.count("served")
    assert fates["hopeless", "deadline_exceeded"] == kinds.count("hopeless")
    assert fates["leaves", "left"] == kinds.count("leaves")
    # A cancel may come after the last token.
    assert fates["cancelled", "request_cancelled"] + fates["cancelled", "done"] == kinds.count("cancelled")
    assert fates["cancelled", "request_cancelled"] > 0
