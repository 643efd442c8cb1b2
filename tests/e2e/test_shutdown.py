"""Signals while streams run: the first one drains, and clients are told when the time is up."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import httpx
import pytest

from support.e2e.process import CHAT, COMPLETIONS, GOOD, TIMEOUT_S, Answer, RealServer, serving, stream_async, until

pytestmark = pytest.mark.model

ENDLESS = {**GOOD, "max_tokens": 8000}


@pytest.fixture
def mortal(weights: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """A server of its own for a test that ends it."""
    with serving(tmp_path_factory.mktemp("mortal"), "--shutdown-timeout", "60s") as running:
        yield running


async def started_streams(client: httpx.AsyncClient, number: int, body: dict[str, object]) -> list[asyncio.Task[Answer]]:
    """Streams whose first event has come."""
    events = [asyncio.Event() for _ in range(number)]
    tasks = [asyncio.create_task(stream_async(client, COMPLETIONS, body, started=event)) for event in events]
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(event.wait() for event in events))
    return tasks


async def test_sigterm_lets_streams_finish_and_refuses_new_ones(mortal: RealServer, good: Answer) -> None:
    # Longer than what is asked meanwhile takes, however fast the machine.
    long = {**GOOD, "max_tokens": 300}
    async with httpx.AsyncClient(base_url=mortal.url, timeout=TIMEOUT_S) as client:
        tasks = await started_streams(client, 4, long)
        mortal.process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(until, lambda: not mortal.is_ready())
        assert (await client.get("/health")).status_code == 200
        for path, body in ((COMPLETIONS, GOOD), (CHAT, {"messages": [{"role": "user", "content": "Hi"}]})):
            refused = await client.post(path, json=body)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            assert int(refused.headers["Retry-After"]) >= 1
        assert not any(task.done() for task in tasks)
        answers = await asyncio.gather(*tasks)
    assert all(answer.is_done and answer.finish_reason == "length" for answer in answers)
    assert {len(answer.token_ids) for answer in answers} == {300}
    assert {answer.text for answer in answers} == {answers[0].text}
    assert answers[0].text.startswith(good.text)
    assert await asyncio.to_thread(mortal.process.wait, TIMEOUT_S) == 0
    assert "Traceback" not in mortal.log.read_text()


async def test_streams_that_outlast_the_timeout_are_told(weights: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("hasty"), "--shutdown-timeout", "200ms", "--log-format", "json") as hasty:
        async with httpx.AsyncClient(base_url=hasty.url, timeout=TIMEOUT_S) as client:
            tasks = await started_streams(client, 2, ENDLESS)
            hasty.process.send_signal(signal.SIGINT)
            answers = await asyncio.gather(*tasks)
        assert all(answer.error is not None and answer.error["code"] == "unavailable" for answer in answers)
        assert not any(answer.is_done for answer in answers)
        assert await asyncio.to_thread(hasty.process.wait, TIMEOUT_S) == 1
        assert all(json.loads(line)["message"] for line in hasty.log.read_text().splitlines())
