"""Watches one connection while its answer is being made; when the client goes, its requests are aborted at once.

Started by the endpoints after the body was read. Reads nothing else from the connection.
"""

from __future__ import annotations

import asyncio
from typing import Self

from starlette.types import Receive

from penstock.serve.bridge import Stream

CLIENT_LEFT = "the client closed the connection"


class ClientWatch:
    """A task that waits for the disconnect; `stop` it when the answer is complete."""

    def __init__(self, receive: Receive, stream: Stream) -> None:
        self._receive = receive
        self._stream = stream
        self._task: asyncio.Task[None] | None = asyncio.create_task(self._watch())

    def stop(self) -> None:
        """Idempotent."""
        # Let go of, since a task that was cancelled remembers where, and so this object.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._stream.cancel(CLIENT_LEFT)
