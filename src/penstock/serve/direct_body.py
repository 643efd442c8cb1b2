"""Writes pieces of a response's body past ASGI, whose messages cost more than the few bytes of a token.

Made by `connection` for every request, found in the ASGI scope by whoever streams. Only for a chunked body that was begun and
will be ended by ASGI messages. Never waits: a caller that finds the client slow goes back to messages, which do.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

_EXTENSION = "penstock.direct_body"


class DirectBody:
    __slots__ = ("_cycle", "_flow")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        # It lies in the scope, which the cycle holds: by a reference proper both would wait for the garbage collector.
        self._cycle = ref(cycle)
        self._flow = cycle.flow

    @property
    def is_slow(self) -> bool:
        """So much is unsent that the client should be waited for."""
        return self._flow.write_paused

    def write(self, data: bytes) -> None:
        """Send a piece, not empty, at once. Dropped if the client has left."""
        cycle = self._cycle()
        if cycle is None or cycle.disconnected:  # maybe before the body began, in which case it never will
            return
        assert cycle.chunked_encoding, "the body has not begun, or its length was announced"
        cycle.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def offer(scope: Any, cycle: RequestResponseCycle) -> None:
    """Let the application of a request write its body directly."""
    scope.setdefault("extensions", {})[_EXTENSION] = DirectBody(cycle)


def direct_body(scope: Scope) -> DirectBody | None:
    """None under a server that is not ours (tests)."""
    found = scope.get("extensions", {}).get(_EXTENSION)
    assert found is None or isinstance(found, DirectBody)
    return found
