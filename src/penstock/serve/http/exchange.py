"""One request and its answer as ASGI's `receive` and `send`, and functions that notice when a client leaves."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope

from penstock.serve.errors import ApiError, cancelled
from penstock.serve.http.cors import Headers

_log = logging.getLogger(__name__)

_MAX_BUFFERED_BODY_BYTES = 1 << 16
"""Most bytes of a body that wait for the app. With more, reading from the connection stops."""
CLIENT_LEFT = "the client closed the connection"
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_Result = TypeVar("_Result")


class Connection(Protocol):
    """The methods of a connection that exchanges and the acceptor call."""

    is_taken: asyncio.Event
    """Set while the operating system has taken all written bytes."""

    def write(self, data: bytes) -> None: ...

    def resume_reading(self) -> None:
        """Continue to read, unless too many requests wait already."""

    def on_answered(self, exchange: Exchange) -> None:
        """Go on to the next request after a complete answer."""

    def leave(self, error: ApiError) -> None:
        """Close after all due answers. An incomplete request is answered with the error."""

    def close(self) -> None:
        """Close after the written bytes were sent, or after `write_timeout_s` without progress."""

    def cut_off(self) -> None:
        """Close at once, and drop unsent bytes."""


class Exchange:
    """One request and its answer, as ASGI's `receive` and `send`."""

    def __init__(self, connection: Connection, scope: Scope, *, keeps_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.keeps_alive = keeps_alive
        """Whether the connection stays open after the answer."""
        self.is_whole = False
        """Whether the whole request has been received."""
        self.has_begun = False
        """Whether the app has begun the answer."""
        self.is_answered = False
        self.has_left = False
        """Whether the client has left, so that nothing can be sent."""
        self._connection = connection
        self._expects_continue = expects_continue
        self._body = bytearray()
        self._news = asyncio.Event()
        self._head = b""
        """The head of the answer, to be written together with the first piece of the body."""
        self._has_body = self._is_chunked = False

    async def run(self, app: ASGIApp) -> None:
        """Run the app, which answers the request."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            _log.exception("an answer ended in the middle")
        finally:
            if not (self.is_answered or self.has_left):
                self._connection.close()

    def add_body(self, data: bytes) -> bool:
        """Add a piece of the request's body. Return False if reading should stop until the app has taken it."""
        if self.is_answered:
            return True
        self._body += data
        self._news.set()
        return len(self._body) <= _MAX_BUFFERED_BODY_BYTES

    def end_body(self) -> None:
        self.is_whole = True
        self._news.set()

    def leave(self) -> None:
        """Tell the app that the client has left."""
        self.has_left = True
        self._news.set()

    async def receive(self) -> Message:
        if not (self.has_left or self.is_answered):
            if self._expects_continue and not self.has_begun:
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
            self._connection.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.has_left or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        connection = self._connection
        if not connection.is_taken.is_set():
            await connection.is_taken.wait()
        if self.has_left or self.is_answered:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        data, has_more = message.get("body", b""), message.get("more_body", False)
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if not has_more:
                data += b"0\r\n\r\n"
        elif not self._has_body:
            data = b""
        if self._head:
            data, self._head = self._head + data, b""
        connection.write(data)
        if not has_more:
            self.is_answered = True
            self._news.set()
            connection.on_answered(self)

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        given = dict(headers)
        self._has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        # An answer without a length ends with the connection in HTTP/1.0.
        self._is_chunked = self._has_body and b"content-length" not in given and self.scope["http_version"] != "1.0"
        more: Headers = [date_header()]
        if self._expects_continue and not self.is_whole:
            # Whether the client sends the body now is not known (RFC 9110, 10.1.1), nor what its next bytes belong to.
            self.keeps_alive = False
        if given.get(b"connection", b"").lower() == b"close":
            self.keeps_alive = False
        elif not self.keeps_alive:
            more.append((b"connection", b"close"))
        if self._is_chunked:
            more.append((b"transfer-encoding", b"chunked"))
        self._head = answer_head(status, [*more, *headers])
        self.has_begun = True


def date_header() -> tuple[bytes, bytes]:
    return b"date", formatdate(time.time(), usegmt=True).encode()


def answer_head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))]
    for name, value in headers:
        if _CONTROL.search(value):
            raise ValueError(f"A header has a control character: {value!r}")
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])


@contextmanager
def client_watch(http: HttpRequest, on_gone: Callable[[], object]) -> Iterator[None]:
    """Call `on_gone` if the client leaves before the block ends. Nothing else may call `receive` in the block."""
    task = asyncio.create_task(_wait_for_end(http.receive, on_gone))
    try:
        yield
    finally:
        task.cancel()


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, _Result]) -> _Result:
    """Return the result of `work`. If the client leaves, cancel `work` and raise 499."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def give_up() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    try:
        with client_watch(http, give_up):
            return await work
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise cancelled(CLIENT_LEFT) from None
        raise


async def _wait_for_end(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
