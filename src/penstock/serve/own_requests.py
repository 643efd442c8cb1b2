"""Requests that the server sends itself, while no client waits: lines of batches, and responses after a restart.

They pass through the whole app, so each gets the same answer as a client's request.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from penstock import fast_json
from penstock.serve.course import COURSE_KEY, Course
from penstock.serve.http.checks import SENDER_KEY, Sender
from penstock.types.request import Owner

MAX_WHY = 500
"""Most characters of the reason of a refusal."""
_TRY_AGAIN = r" Try again in \d+ s\.$"


class Answered(NamedTuple):
    status: int
    retry_after_s: float | None
    body: bytes

    @property
    def why(self) -> str:
        """The status and the message of an error, without the time to try again: the server does that itself."""
        try:
            message = str(fast_json.loads(self.body)["error"]["message"])
        except (fast_json.DecodeError, LookupError, TypeError):  # another server's
            message = self.body[:MAX_WHY].decode("utf-8", "replace")
        return f"Status {self.status}: {re.sub(_TRY_AGAIN, '', message)[:MAX_WHY]}"


class OwnRequests:
    app: ASGIApp
    """Set by `create_app`."""

    def __init__(self, sender: Callable[[str], Sender | None]) -> None:
        """`sender` returns the rights of the API key of this name, or None if it no longer exists."""
        self._sender = sender

    async def ask(
        self,
        owner: Owner,
        url: str,
        body: bytes,
        request_id: str,
        left: asyncio.Event,
        course: Course,
        more_headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> Answered | None:
        """Send a request and return its complete answer, or None if its owner's key no longer exists.

        Setting `left` cancels the request, which then ends with 499.
        """
        sender = self._sender(owner.key)
        if sender is None:
            return None
        headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode()), *more_headers]
        if owner.tenant != owner.key:
            headers.append((b"x-tenant", owner.tenant.encode()))
        scope = {
            "type": "http",
            "http_version": "1.1",
            "scheme": "http",
            "method": "POST",
            "path": url,
            "raw_path": url.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": headers,
            "client": None,
            "server": None,
            SENDER_KEY: sender,
            COURSE_KEY: course,
        }
        pieces: list[bytes] = []
        status, retry_after_s, is_sent = 500, None, False

        async def receive() -> Message:
            nonlocal is_sent
            if not is_sent:
                is_sent = True
                return {"type": "http.request", "body": body}
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            nonlocal status, retry_after_s
            if message["type"] == "http.response.start":
                status = message["status"]
                found = [value for name, value in message["headers"] if name.lower() == b"retry-after"]
                retry_after_s = float(found[0]) if found and found[0].isdigit() else None  # else a date, or none
            else:
                pieces.append(message.get("body", b""))

        await self.app(scope, receive, send)
        return Answered(status, retry_after_s, b"".join(pieces))
