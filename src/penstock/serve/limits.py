"""The largest request body: as announced, which the HTTP parser holds the client to, or counted while it is read.

The connection of a body that is too large is closed, but not at once: that would reset it while bytes are unread, and a client
that still sends would see the reset instead of the answer. So the answer goes out, and then what still comes is dropped for a
while.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.connection import LINGER_S
from penstock.serve.headers import headers_of
from penstock.serve.openai.errors import request_too_large


class BodyLimitLayer:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_announced_bytes = _announced_bytes(scope)
        if num_announced_bytes is not None and num_announced_bytes <= self._max_body_bytes:
            await self._app(scope, receive, send)
            return
        is_too_large = num_announced_bytes is not None
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes, is_too_large
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    is_too_large = True
                    raise request_too_large(self._max_body_bytes)
            return message

        async def send_and_linger(message: Message) -> None:
            if is_too_large and message["type"] == "http.response.body" and not message.get("more_body"):
                await send({**message, "more_body": True})  # Its length was announced, so the client has it all.
                await _drop_body(receive)
                message = {"type": "http.response.body"}
            await send(message)

        if is_too_large:
            await request_too_large(self._max_body_bytes).response()(scope, receive, send_and_linger)
            return
        await self._app(scope, counted_receive, send_and_linger)


async def _drop_body(receive: Receive) -> None:
    """Read on until the body ends, the client leaves or `LINGER_S` have passed."""
    with suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while (await receive()).get("more_body"):
                pass


def _announced_bytes(scope: Scope) -> int | None:
    """`Content-Length`, or None: the HTTP parser has refused a malformed one, and one beside chunks, already."""
    value = headers_of(scope).get(b"content-length", b"")
    # Digits beyond the twentieth only make it larger than every limit, and Python reads no number of thousands.
    return int(value.lstrip(b"0")[:20] or b"0") if value.isdigit() else None
