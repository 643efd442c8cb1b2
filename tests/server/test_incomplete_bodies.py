"""Bodies that many clients send slowly have a limit in sum, which small ones do not feel."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.http.checks import RequestChecks, takes_json

ROOM = 1000
HEAD = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """Sends a body piece by piece, as it is told to."""

    def __init__(self, checks: RequestChecks) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.num_held_bytes = 0
        self._task = asyncio.create_task(checks(dict(HEAD), self._pieces.get, self._send))

    async def _send(self, message: Any) -> None:
        self.sent.append(message)

    async def sends(self, num_bytes: int, *, is_last: bool = False) -> None:
        self.num_held_bytes += num_bytes
        self._pieces.put_nowait({"type": "http.request", "body": b"x" * num_bytes, "more_body": not is_last})
        for _ in range(5):
            await asyncio.sleep(0)
        if self.sent:
            self.num_held_bytes = 0

    async def leaves(self) -> None:
        self._pieces.put_nowait({"type": "http.disconnect"})
        await self._task

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> RequestChecks:
    async def answer(data: bytes, _http: HttpRequest) -> Response:
        return Response(str(len(data)))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await takes_json(answer)(HttpRequest(scope, receive)))(scope, receive, send)

    monkeypatch.setattr("penstock.serve.http.checks._BODIES_BYTES", ROOM)
    return RequestChecks(app, new_request_id=lambda: "a", keys=None, max_body_bytes=400)


async def test_slow_large_bodies_are_refused_and_small_ones_are_not(checks: RequestChecks) -> None:
    large = [Client(checks) for _ in range(20)]
    for _ in range(4):
        for client in large:
            if client.status is None:
                await client.sends(99)
        assert sum(client.num_held_bytes for client in large) <= 2 * ROOM
    refused = [client for client in large if client.status is not None]
    assert refused
    assert {client.status for client in refused} == {503}
    assert b"retry-after" in dict(refused[0].sent[0]["headers"])
    small = Client(checks)
    await small.sends(20)
    await small.sends(20, is_last=True)
    assert (small.status, small.sent[1]["body"]) == (200, b"40")


async def test_bodies_that_end_or_are_left_give_their_room_back(checks: RequestChecks) -> None:
    for _ in range(10):
        first, second = Client(checks), Client(checks)
        for client in (first, second):
            for _ in range(3):
                await client.sends(100)
        await first.sends(100, is_last=True)
        await second.leaves()
        assert (first.status, second.status) == (200, 400)
