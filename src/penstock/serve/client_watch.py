"""Watches one client while its answer is being made; when it goes, what is done for it is given up at once.

Made by the endpoints after the body was read. The connection tells; under a server that is not ours (tests) a task asks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from penstock.serve.direct_line import direct_line
from penstock.serve.openai.errors import cancelled

_Result = TypeVar("_Result")

CLIENT_LEFT = "the client closed the connection"


class ClientWatch:
    """`stop` it when the answer is complete."""

    def __init__(self, http: HttpRequest, on_gone: Callable[[], object]) -> None:
        self._line = direct_line(http.scope)
        self._task: asyncio.Task[None] | None = None
        if self._line is not None:
            self._line.watch(on_gone)
        else:
            self._task = asyncio.create_task(_wait_for_end(http.receive, on_gone))

    def stop(self) -> None:
        """Idempotent."""
        if self._line is not None:
            self._line.watch(None)
        # Let go of, since a task that was cancelled remembers where, and so this object.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. Raises 499, and gives the work up, if the client leaves before."""
    task = asyncio.create_task(work)
    try:
        with ClientWatch(http, task.cancel):
            return await task
    except asyncio.CancelledError:
        caller = asyncio.current_task()
        if caller is not None and not caller.cancelling():
            raise cancelled(CLIENT_LEFT) from None
        raise
    finally:
        del task  # it has what the work raised, and that has this frame


async def _wait_for_end(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()
