"""Streams byte for byte, as clients see them.

`PENSTOCK_UPDATE_GOLDEN=1 pytest tests/server/test_golden.py` writes the files anew.
"""

import asyncio
import os
import re
from pathlib import Path

import httpx
import pytest

from penstock import fast_json
from support.failing_executor import FailingExecutor
from support.server.harness import GatedExecutor, running, until

FOLDER = Path(__file__).parent / "golden"
HI = [{"role": "user", "content": "hi"}]
CASES = {
    "completion": ("/v1/completions", {"prompt": "Hello", "max_tokens": 4}),
    "completion_echo_usage": (
        "/v1/completions",
        {"prompt": ["a", "b"], "max_tokens": 2, "echo": True, "stream_options": {"include_usage": True}},
    ),
    "completion_logprobs": ("/v1/completions", {"prompt": "Hello", "max_tokens": 2, "logprobs": 1, "return_token_ids": True}),
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 4}),
    "chat_n2_usage": (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 2, "n": 2, "temperature": 1, "seed": 1, "stream_options": {"include_usage": True}},
    ),
    "chat_logprobs": ("/v1/chat/completions", {"messages": HI, "max_tokens": 2, "logprobs": True, "top_logprobs": 1}),
    "chat_choice": ("/v1/chat/completions", {"messages": HI, "structured_outputs": {"choice": ["yes"]}}),
    "chat_continuous_usage": (
        "/v1/chat/completions",
        {"messages": HI, "max_tokens": 2, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "message": ("/v1/messages", {"model": "toy", "messages": HI, "max_tokens": 4}),
}


async def transcript(server, gate, path, body, num_choices):
    """The stream's body; choices that share a prompt begin a step later. A step's events are read before the next step runs."""
    load = server.runtime.engine.load
    parts = []
    async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
        # While this one's only step is held, the choices gather in the queue.
        blocker = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}))
        await until(lambda: load().num_running == 1)
        streamed = asyncio.create_task(read_slowly(client, gate, path, body, parts))
        await until(lambda: load().num_waiting == num_choices and parts)  # its first bytes wait for no step
        gate.allow(2)
        await streamed
        assert (await blocker).status_code == 200
    return b"".join(parts)


async def read_slowly(client, gate, path, body, parts):
    async with client.stream("POST", path, json={"temperature": 0, "stream": True} | body) as response:
        assert response.status_code == 200
        async for part in response.aiter_raw():
            if parts:
                gate.allow()
            parts.append(part)


def check(name, data):
    path = FOLDER / f"{name}.sse"
    data = re.sub(rb"dur=[0-9.]+", b"dur=0.000", data)
    if os.environ.get("PENSTOCK_UPDATE_GOLDEN"):
        FOLDER.mkdir(exist_ok=True)
        path.write_bytes(data)
    assert data == path.read_bytes()


@pytest.mark.parametrize("name", CASES)
async def test_stream_is_as_recorded(name):
    gate = GatedExecutor()
    with running(gate) as server:
        path, body = CASES[name]
        num_choices = 2 if name in ("completion_echo_usage", "chat_n2_usage") else 1
        data = await transcript(server, gate, path, body, num_choices)
        gate.open()
    for event in data.decode().split("\n\n")[:-2]:
        if not event.startswith(": "):
            fast_json.loads(event.partition("data: ")[2])
    check(name, data)


@pytest.mark.parametrize(
    ("name", "path"), [("chat_engine_failed", "/v1/chat/completions"), ("message_engine_failed", "/v1/messages")]
)
async def test_stream_that_fails_is_as_recorded(name, path):
    gate = GatedExecutor()
    with running(FailingExecutor(gate, fail_at_step=3)) as server:
        data = await transcript(server, gate, path, {"model": "toy", "messages": HI, "max_tokens": 9}, 1)
        gate.open()
        await until(lambda: server.runtime.bridge.num_open_requests == 0)
    check(name, data)
