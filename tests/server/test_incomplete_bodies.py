"""Bodies that many clients send slowly have a limit in sum, which small ones do not feel."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.http.checks import UPLOAD_PATH, RequestChecks, takes_json

ROOM = 1000
HEAD: dict[str, Any] = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


class Client:
    """Sends a body in pieces, one for each call."""

    def __init__(self, checks: RequestChecks, path: str = HEAD["path"]) -> None:
        self._pieces: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.num_held_bytes = 0
        self._task = asyncio.create_task(checks(HEAD | {"path": path}, self._pieces.get, self._send))

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


async def answer(data: bytes, _http: HttpRequest) -> Response:
    return Response(str(len(data)))


@pytest.fixture
def checks_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], RequestChecks]:
    """Return checks for a maximal length of one body."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (await takes_json(answer)(HttpRequest(scope, receive)))(scope, receive, send)

    monkeypatch.setattr("penstock.serve.http.checks._BODIES_BYTES", ROOM)
    return lambda max_bytes: RequestChecks(
        app, new_request_id=lambda: "a", keys=None, max_body_bytes=max_bytes, max_upload_bytes=10 * ROOM
    )


@pytest.fixture
def checks(checks_of: Callable[[int], RequestChecks]) -> RequestChecks:
    return checks_of(400)


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


async def test_small_bodies_are_read_while_the_sum_is_over_its_limit(checks: RequestChecks) -> None:
    large = [Client(checks) for _ in range(10)]
    for client in large:
        await client.sends(99)
    small = Client(checks)
    await small.sends(50)
    assert checks._bodies._sum_bytes > ROOM
    await small.sends(20)
    assert small.status is None
    await large[0].sends(1)
    assert large[0].status == 503
    await small.sends(20, is_last=True)
    assert (small.status, small.sent[1]["body"]) == (200, b"90")


async def test_one_body_of_the_allowed_length_is_read(checks_of: Callable[[int], RequestChecks]) -> None:
    alone = Client(checks_of(2 * ROOM))
    await alone.sends(2 * ROOM - 1)
    await alone.sends(1, is_last=True)
    assert alone.status == 200


async def test_uploads_do_not_count(checks: RequestChecks) -> None:
    upload = Client(checks, UPLOAD_PATH)
    await upload.sends(5 * ROOM)
    assert (upload.status, checks._bodies._sum_bytes) == (None, 0)
    await upload.sends(1, is_last=True)
    assert upload.status == 200


async def test_tiny_pieces_take_no_more_memory_than_their_bytes() -> None:
    num_pieces, sizes = 20_000, []
    numbers = iter(range(num_pieces))

    async def receive() -> dict[str, Any]:
        number = next(numbers)
        if number in (0, num_pieces - 1):
            sizes.append(tracemalloc.get_traced_memory()[0])
        return {"type": "http.request", "body": number.to_bytes(2, "big"), "more_body": number < num_pieces - 1}

    tracemalloc.start()
    try:
        response = await takes_json(answer)(HttpRequest(dict(HEAD), receive))
    finally:
        tracemalloc.stop()
    assert response.body == b"40000"
    assert sizes[1] - sizes[0] < 2 * 2 * num_pieces


async def test_bodies_that_end_or_are_left_give_their_room_back(checks: RequestChecks) -> None:
    for _ in range(10):
        first, second = Client(checks), Client(checks)
        for client in (first, second):
            for _ in range(3):
                await client.sends(100)
        await first.sends(100, is_last=True)
        await second.leaves()
        assert (first.status, second.status) == (200, 400)
    assert checks._bodies._sum_bytes == 0
