"""Where work on a request is done: on the event loop if it is small, else in a thread, so that other clients' tokens flow on.

Called by whatever handles what clients send. The work must not touch what belongs to the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

_Result = TypeVar("_Result")

INLINE_MAX_SIZE = 4096
"""Characters or bytes whose work (tokenising, templates, checks in Python) takes about a millisecond."""


async def off_loop_if_large(size: int, work: Callable[[], _Result], *, limit: int = INLINE_MAX_SIZE) -> _Result:
    """The result of `work`, done in a thread if `size`, in characters or bytes, is above the limit."""
    if size <= limit:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
