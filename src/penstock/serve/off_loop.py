"""Where work on a request is done: on the event loop if it is small, else in a thread, so that other clients' tokens flow on.

Called by whatever handles what clients send. The work must not touch what belongs to the event loop. Its threads are its
own: what ends the server, or tells about it, never waits for them.

size        up to `INLINE_MAX_SIZE`        up to `LARGE_SIZE`     above
done by     the event loop, at once        two threads            one thread

Grammars have one more thread, whatever their size: one of few characters may take as long as the longest text.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from penstock.types.errors import Rejected, RejectReason

_Result = TypeVar("_Result")

INLINE_MAX_SIZE = 4096
"""Characters or bytes whose work (tokenising, templates, checks in Python) takes about a millisecond."""
LARGE_SIZE = 1 << 16
"""Larger work waits in a line of its own, so that many large texts do not hold up the prompts that people write."""
MAX_JOBS = 1024
MAX_GRAMMARS = 32
"""Different ones, waiting to be compiled. One may take a second, most take milliseconds."""
MAX_SIZE_IN_FLIGHT = 16 << 20
"""Characters or bytes, in each of the two lines: four of the largest bodies, a few seconds of tokenising each."""
RETRY_AFTER_S = 5.0


class OffLoop:
    """Three bounded lines of work. All belongs to the event loop, but `close`, which may be called from any thread."""

    def __init__(self, count_rejected: Callable[[RejectReason], None] = lambda _reason: None) -> None:
        self._lines = (_Line(2, "small"), _Line(1, "large"))
        self._grammars = _Line(1, "grammars")
        self._compiling: dict[Hashable, Future[None]] = {}
        """What `compile_once` began and has not ended, by key."""
        self._count_rejected = count_rejected

    async def run(self, size: int, work: Callable[[], _Result], *, limit: int = INLINE_MAX_SIZE) -> _Result:
        """The result of `work`, done in a thread if `size`, in characters or bytes, is above the limit.

        Raises `Rejected`: QUEUE_FULL if too much waits already, DRAINING once the server ends.
        """
        if size <= limit:
            return work()
        return await self._enter(self._line(size), size, work, "long texts", MAX_JOBS)

    async def compile(self, size: int, work: Callable[[], _Result]) -> _Result:
        """As `run`, for grammars: never on the event loop."""
        return await self._enter(self._grammars, size, work, "grammars", MAX_GRAMMARS)

    async def compile_once(self, key: Hashable, size: int, work: Callable[[], None]) -> None:
        """As `compile`, but that whoever asks for a key that is being worked on waits for the same work. It must not raise."""
        job = self._compiling.get(key)
        if job is None or job.done():
            self._check_room(self._grammars, size, "grammars", MAX_GRAMMARS)
            job = self._compiling[key] = self._grammars.start(size, work)
            job.add_done_callback(lambda _job: self._compiling.pop(key, None))
        await _result_of(job, is_shared=True)

    async def finish(self, size: int, work: Callable[[], _Result]) -> _Result:
        """As `run`, for the end of what was let in already: not turned away because of others, nor because the server ends."""
        if size > INLINE_MAX_SIZE:
            with contextlib.suppress(Rejected):  # the lines are closed: whoever drains wants this answer, and no others come
                return await self._line(size).do(size, work)
        return work()

    def close(self) -> None:
        """Do no more than has begun. Does not wait. Idempotent."""
        for line in (*self._lines, self._grammars):
            line.close()

    async def _enter(self, line: _Line, size: int, work: Callable[[], _Result], what: str, max_jobs: int) -> _Result:
        self._check_room(line, size, what, max_jobs)
        return await line.do(size, work)

    def _check_room(self, line: _Line, size: int, what: str, max_jobs: int) -> None:
        if line.is_full(size, max_jobs):
            self._count_rejected(RejectReason.QUEUE_FULL)
            detail = f"too many {what} are being read already"
            raise Rejected(RejectReason.QUEUE_FULL, detail, retry_after_s=RETRY_AFTER_S)

    def _line(self, size: int) -> _Line:
        return self._lines[size > LARGE_SIZE]


class _Line:
    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"penstock-{name}")
        self._lock = threading.Lock()
        """Jobs end in threads; what they held is given back there, also if nobody waits for them any more."""
        self._num_jobs = 0
        self._size = 0

    def is_full(self, size: int, max_jobs: int) -> bool:
        """Work that is larger than the bound itself comes in alone."""
        return self._num_jobs >= max_jobs or (self._num_jobs > 0 and self._size + size > MAX_SIZE_IN_FLIGHT)

    def start(self, size: int, work: Callable[[], _Result]) -> Future[_Result]:
        try:
            future = self._pool.submit(work)
        except RuntimeError as error:
            raise _shutting_down() from error
        self._add(1, size)
        future.add_done_callback(lambda _future: self._add(-1, -size))
        return future

    async def do(self, size: int, work: Callable[[], _Result]) -> _Result:
        future = self.start(size, work)
        try:
            return await _result_of(future)
        finally:
            del future  # it has what the work raised, and that has this frame

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _add(self, num_jobs: int, size: int) -> None:
        with self._lock:
            self._num_jobs += num_jobs
            self._size += size


async def _result_of(future: Future[_Result], *, is_shared: bool = False) -> _Result:
    """Who is cancelled takes work that has not begun along, unless others may wait for it."""
    try:
        waiter = asyncio.wrap_future(future)
        return await (asyncio.shield(waiter) if is_shared else waiter)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if future.cancelled() and task is not None and not task.cancelling():
            raise _shutting_down() from None
        raise
    finally:
        del future  # as above


def _shutting_down() -> Rejected:
    return Rejected(RejectReason.DRAINING, "The server is shutting down.", retry_after_s=RETRY_AFTER_S)
