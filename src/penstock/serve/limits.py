"""The largest request body: counted while it is read, whatever `Content-Length` says or leaves out."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.openai.errors import request_too_large


class BodyLimitLayer:
    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced_bytes(scope) > self._max_body_bytes:
            await request_too_large(self._max_body_bytes).response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted_receive() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise request_too_large(self._max_body_bytes)
            return message

        await self._app(scope, counted_receive, send)


def _announced_bytes(scope: Scope) -> int:
    """`Content-Length`, or 0: the HTTP parser has refused a malformed one already."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and len(value) < 20:
            return int(value)
    return 0
