"""One connection between the front and a replica: frames of a length and a message."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec

from penstock.cluster.messages import Greeting, encode

_log = logging.getLogger(__name__)

MAX_BYTES = 1 << 27
"""Longest message: a request of a million tokens has 5 MB, the first report of a million blocks 9 MB."""
MAX_STRANGER_BYTES = 1 << 20
"""Longest message while the other end has not proven that it knows the secret."""
_LENGTH = struct.Struct("<I")


class Link(asyncio.Protocol):
    def __init__(
        self, on_message: Callable[[Link, bytes], None], on_lost: Callable[[Link, str], None], greeting: Greeting | None = None
    ) -> None:
        """`on_lost` is called once, with the cause. An error in `on_message` closes the link. `greeting`: sent first."""
        self._on_message, self._on_lost, self._greeting = on_message, on_lost, greeting
        self._transport: asyncio.Transport | None = None
        self._read = bytearray()
        self._cause = "the connection was closed"
        self.is_closing = False
        """`close` was called."""
        self._is_finished = False
        self.max_bytes = MAX_STRANGER_BYTES
        self.peer = self.host = self.own_host = ""
        """The other end's address with its port, and the addresses of both ends."""

    def send(self, message: Any) -> None:
        if self._transport is not None and not (self._is_finished or self._transport.is_closing()):
            data = encode(message)
            self._transport.writelines((_LENGTH.pack(len(data)), data))

    def finish(self, cause: str) -> None:
        """Send no further messages. The other end reads the earlier ones, then closes the connection. Idempotent."""
        if self._transport is not None and not (self._is_finished or self.is_closing):
            self._is_finished, self._cause = True, cause
            with suppress(OSError):  # the connection was just lost
                self._transport.write_eof()

    def close(self, cause: str) -> None:
        """Close the connection at once, even if sent messages have not left. `on_lost` follows, with this cause. Idempotent."""
        if self.is_closing:
            return
        self.is_closing, self._cause = True, cause
        if self._transport is not None:  # otherwise `connection_made` closes it
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.host, port = transport.get_extra_info("peername")[:2]
        self.own_host = transport.get_extra_info("sockname")[0]
        self.peer = f"{self.host}:{port}"
        if self.is_closing:
            self._transport.abort()
        elif self._greeting is not None:
            self.send(self._greeting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._on_lost(self, self._cause if exc is None else f"{self._cause} ({exc})")

    def data_received(self, data: bytes) -> None:
        read = self._read
        read += data
        start = 0
        while len(read) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(read, start)
            if length > self.max_bytes:
                self.close(f"a message of {length} bytes is too large")
                return
            end = start + _LENGTH.size + length
            if len(read) < end:
                break
            message, start = bytes(read[start + _LENGTH.size : end]), end
            try:
                self._on_message(self, message)
            except Exception as error:
                if not isinstance(error, msgspec.MsgspecError):
                    _log.exception("a message of %s could not be handled", self.peer)
                self.close(f"a message could not be handled: {type(error).__name__}: {error}")
            if self._transport is None or self._transport.is_closing():
                return
        del read[:start]
