"""A request's direct line to its connection, past ASGI, whose messages cost more than the few bytes of a token.

Made by `connection` for every request, found in the ASGI scope by whoever streams or wants to know that the client has left.
Writes a chunked answer, 200 alone, as uvicorn does by messages, and the head together with what comes first. Never waits: a
caller that finds the client slow goes on with messages, which do; each piece may go either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from weakref import ref

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_EXTENSION = "penstock.direct_line"
_HEAD_END = b"transfer-encoding: chunked\r\n\r\n"


class DirectLine:
    __slots__ = ("_cycle", "_flow", "_on_gone")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # It lies in the scope, which the cycle holds: by a reference proper both would wait for the garbage collector.
        self._cycle = ref(cycle)
        self._flow = cycle.flow
        self._on_gone: Callable[[], object] | None = None

    @property
    def is_slow(self) -> bool:
        """So much is unsent that the client should be waited for."""
        return self._flow.write_paused

    def begin(self, headers: Iterable[tuple[bytes, bytes]], data: bytes) -> None:
        """Send the head of a 200 and the first piece, which may be empty, at once. Dropped if the client has left.

        `headers`: names in small letters, and nothing that breaks a line.
        """
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:
            return
        assert not cycle.response_started, "the answer has begun"
        cycle.response_started = cycle.chunked_encoding = True
        cycle.waiting_for_100_continue = False
        head = b"".join([b"%b: %b\r\n" % header for header in (*cycle.default_headers, *headers)])
        connection = b"" if cycle.keep_alive else b"connection: close\r\n"
        cycle.transport.write(b"".join([STATUS_LINE[200], head, connection, _HEAD_END, _chunk(data)]))

    def write(self, data: bytes) -> None:
        """Send a piece, not empty, at once. Dropped if the client has left."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:  # maybe before the body began, in which case it never will
            return
        assert cycle.chunked_encoding, "the body has not begun, or its length was announced"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end(self, data: bytes) -> None:
        """Send the last piece, which may be empty, at once. Dropped if the client has left."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:
            return
        assert cycle.chunked_encoding, "the body has not begun, or its length was announced"
        assert not cycle.response_complete, "the answer has ended"
        cycle.transport.write(_chunk(data) + b"0\r\n\r\n")
        cycle.response_complete = True
        cycle.message_event.set()
        if not cycle.keep_alive:
            cycle.transport.close()
        cycle.on_response()

    def watch(self, on_gone: Callable[[], object] | None) -> None:
        """Call this when the client leaves before the answer has ended, at once if it has; None: no longer. One at a time.

        For after the request's body was read.
        """
        self._on_gone = on_gone
        cycle = self._cycle()
        if on_gone is None or cycle is None:
            return
        # Reading stops when much of a body waits for the app, and who does not read does not notice that the client leaves.
        self._flow.resume_reading()
        if cycle.disconnected:
            on_gone()

    def tell_gone(self) -> None:
        """The connection's word that the client has left."""
        if self._on_gone is not None:
            self._on_gone()


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def offer(scope: Any, cycle: RequestResponseCycle) -> None:
    """Give the application of a request its direct line."""
    scope.setdefault("extensions", {})[_EXTENSION] = DirectLine(cycle)


def direct_line(scope: Any) -> DirectLine | None:
    """None under a server that is not ours (tests)."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    assert found is None or isinstance(found, DirectLine)
    return found
