"""The word that a client has left, and what becomes of work on its behalf."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest

from penstock.serve.errors import ApiError
from penstock.serve.http.checks import RequestChecks, client_watch, unless_gone


class Client:
    """A client whose request's body was read."""

    def __init__(self) -> None:
        self.has_left = asyncio.Event()
        self.http = HttpRequest({"type": "http"}, self._receive)

    async def _receive(self) -> dict[str, Any]:
        await self.has_left.wait()
        return {"type": "http.disconnect"}


async def forever(ended: list[str]) -> None:
    try:
        await asyncio.Event().wait()
    finally:
        ended.append("work")


async def test_a_watch_tells_once_that_the_client_has_left() -> None:
    client, told = Client(), asyncio.Queue[str]()
    with client_watch(client.http, lambda: told.put_nowait("gone")):
        client.has_left.set()
        assert await asyncio.wait_for(told.get(), 20) == "gone"
    assert told.empty()


async def test_a_watch_ends_with_the_client_also_after_a_body_that_is_too_large() -> None:
    """On a route that reads no body."""
    messages = [{"type": "http.request", "body": b"x" * 100}] * 2 + [{"type": "http.disconnect"}]
    has_left, sent = asyncio.Event(), list[Any]()

    async def receive() -> dict[str, Any]:
        return messages.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer(scope: Any, receive: Any, _send: Any) -> None:
        with client_watch(HttpRequest(scope, receive), has_left.set):
            await asyncio.wait_for(has_left.wait(), 1)

    checks = RequestChecks(answer, new_request_id=lambda: "a", keys=None, max_body_bytes=50)
    await checks({"type": "http", "method": "GET", "path": "/debug/trace", "headers": []}, receive, send)
    assert has_left.is_set()
    assert not sent


async def test_a_watch_that_was_stopped_tells_nothing() -> None:
    client, told = Client(), asyncio.Queue[str]()
    with client_watch(client.http, lambda: told.put_nowait("gone")):
        await asyncio.sleep(0)  # it waits now
        client.has_left.set()  # in the moment in which the answer is complete
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
    assert told.empty()


async def test_work_for_a_client_that_stays_is_done() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert await unless_gone(Client().http, work()) == 7


@pytest.mark.parametrize("is_early", [True, False], ids=["before it began", "later"])
async def test_work_for_a_client_that_leaves_is_given_up(is_early: bool) -> None:
    client, ended = Client(), list[str]()
    if is_early:
        client.has_left.set()
    else:
        asyncio.get_running_loop().call_soon(client.has_left.set)
    with pytest.raises(ApiError, match="closed the connection") as raised:
        await unless_gone(client.http, forever(ended))
    assert raised.value.status_code == 499
    assert ended == ["work"]
    task = asyncio.current_task()
    assert task is not None
    assert not task.cancelling()


async def test_a_task_that_is_cancelled_itself_is_not_told_of_a_client() -> None:
    ended: list[str] = []
    task = asyncio.create_task(unless_gone(Client().http, forever(ended)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["work"]
