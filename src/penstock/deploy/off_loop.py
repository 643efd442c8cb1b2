"""Moves long work out of the event loop into threads, so that other clients' tokens flow on. Work on short texts stays there.

    size        up to `INLINE_MAX_SIZE`    up to `LARGE_SIZE`    above
    done by     the event loop             two threads           one thread

Compiling grammars has two more threads, rendering chat templates one, and the last work of long answers two. Tenants take turns
(`FairLine`), except at answers. A tenant's batches count as another tenant (`lane_of`). Their work is never refused: the runner
of batches limits how many lines are under way. A replica uses such lanes for all requests, which its front has admitted. Work
in threads must not touch objects of the event loop. The server ends without waiting for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import Owner

_Result = TypeVar("_Result")

INLINE_MAX_SIZE = 4096
"""Characters or bytes that take about a millisecond (tokenising, templates, checks in Python)."""
INLINE_MAX_BODY = 1 << 15
"""Bytes of a body that are parsed within a few milliseconds."""
LARGE_SIZE = 1 << 16
"""Larger work has its own queue, so that it does not delay prompts that people type."""
MAX_JOBS = 1024
MAX_GRAMMARS = 32
"""Most waiting grammars of one tenant. Admission limits all tenants together."""
MAX_SIZE_IN_FLIGHT = 16 << 20
"""Most characters or bytes of one tenant's waiting jobs in a queue: four of the largest bodies."""
MAX_FULL_QUEUES = 4
"""A `FairLine` is full at this many times `MAX_SIZE_IN_FLIGHT`. Without API keys a client can invent tenants, so the limit per
tenant is not enough."""
MAX_RENDER_S = 10.0
"""Time limit for making a prompt of a conversation, including the wait for earlier ones. Lines of batches have none."""
RETRY_AFTER_S = 5.0
_BATCH = "\0batch"  # no tenant's name contains a zero byte


def lane_of(owner: Owner, *, is_background: bool) -> Owner:
    """Return the owner, with another tenant for lines of batches: they do not hold up the tenant's other requests."""
    return owner._replace(tenant=owner.tenant + _BATCH) if is_background else owner


def _is_background(tenant: str) -> bool:
    return tenant.endswith(_BATCH)


def give_way() -> None:
    """Let other threads run Python. Call this at least every millisecond of long work in a thread.

    Otherwise the thread keeps the interpreter for up to 5 ms at a time. On the event loop, where work is short, return at
    once: `sleep(0)` takes 60 to 170 us while the engine runs.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        time.sleep(0)


async def in_daemon(work: Callable[[], _Result]) -> _Result:
    """Do `work`, which may wait for a hanging disk, in a daemon thread of its own. Callers limit how many.

    The process can end before `work` has, unlike with `asyncio.to_thread`, and no pool loses a thread.
    """
    done: Future[_Result] = Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            done.set_result(work())
        except BaseException as error:  # the caller raises it
            done.set_exception(error)

    threading.Thread(target=run, name="penstock-disk", daemon=True).start()
    return await asyncio.wrap_future(done)


class OffLoop:
    """Threads and bounded queues for a model's work that is too long for the event loop. Any thread may call `close`."""

    def __init__(self, count_rejected: Callable[[RejectReason, str], None] = lambda _reason, _key: None) -> None:
        self._answers = ThreadPoolExecutor(2, thread_name_prefix="penstock-answers")
        self._small = FairLine(2, "small", max_jobs=MAX_JOBS, keeps_results=True)
        self._large = FairLine(1, "large", max_jobs=MAX_JOBS, keeps_results=True)
        self._templates = FairLine(1, "templates", max_jobs=MAX_JOBS)
        self._grammars = FairLine(2, "grammars", max_jobs=MAX_GRAMMARS)
        self._count_rejected = count_rejected

    async def run(self, size: int, work: Callable[[], _Result], lane: Owner) -> _Result:
        """Do `work` and return its result. If `size`, in characters or bytes, is above `INLINE_MAX_SIZE`, do it in a thread.

        Raises `Rejected`: QUEUE_FULL if too much waits and `lane` is not a batch's, DRAINING when the server ends.
        """
        if size <= INLINE_MAX_SIZE:
            return work()
        return await self._in_turn(self._small if size <= LARGE_SIZE else self._large, "long texts", lane, size, work)

    async def parse(self, num_bytes: int, work: Callable[[], _Result], lane: Owner) -> _Result:
        """Parse a body: like `run`, but on the event loop if it has at most `INLINE_MAX_BODY` bytes."""
        return work() if num_bytes <= INLINE_MAX_BODY else await self.run(num_bytes, work, lane)

    async def render(self, lane: Owner, size: int, work: Callable[[], _Result]) -> _Result:
        """Render a chat template in a thread, within `MAX_RENDER_S` unless for a batch. Raises as `run`."""
        try:
            async with asyncio.timeout(None if _is_background(lane.tenant) else MAX_RENDER_S):
                return await self._in_turn(self._templates, "conversations", lane, size, work)
        except TimeoutError:
            raise self._full("conversations", lane) from None

    async def compile(self, lane: Owner, size: int, work: Callable[[], _Result], *, key: Hashable = None) -> _Result:
        """Compile a grammar in a thread. Raises as `run`.

        Calls with the same key share the work, which must not raise.
        """
        return await self._in_turn(self._grammars, "grammars", lane, size, work, key)

    async def finish(self, size: int, work: Callable[[], _Result]) -> _Result:
        """Do the last work of an answer, in a thread if it is long. Never refuse it."""
        if size <= INLINE_MAX_SIZE:
            return work()
        try:
            done = self._answers.submit(work)
        except RuntimeError:  # closed, but a draining server has time for this answer
            return work()
        try:
            return await asyncio.wrap_future(done)
        finally:
            del done  # breaks a reference cycle: it has the error, whose traceback has this frame

    def close(self) -> None:
        """Begin no more work, except for answers. Return at once. Idempotent.

        Callers that wait for a grammar or a template get an error at once, even if the work has begun.
        """
        self._answers.shutdown(wait=False)
        for line in (self._small, self._large, self._templates, self._grammars):
            line.close()

    async def _in_turn(
        self, line: FairLine, what: str, lane: Owner, size: int, work: Callable[[], _Result], key: Hashable = None
    ) -> _Result:
        job = line.join(lane.tenant, size, work, key)
        if job is None:
            raise self._full(what, lane)
        try:
            result: _Result = await asyncio.shield(asyncio.wrap_future(job.done))
            return result
        except asyncio.CancelledError:
            line.leave(lane.tenant, job)
            task = asyncio.current_task()
            if job.done.cancelled() and task is not None and not task.cancelling():
                detail = "The model is being unloaded, or the server is shutting down."
                raise Rejected(RejectReason.DRAINING, detail, retry_after_s=RETRY_AFTER_S) from None
            raise
        finally:
            del job  # breaks a reference cycle, as in `finish`

    def _full(self, what: str, lane: Owner) -> Rejected:
        self._count_rejected(RejectReason.QUEUE_FULL, lane.key)
        return Rejected(RejectReason.QUEUE_FULL, f"too many {what} are being read already", retry_after_s=RETRY_AFTER_S)


@dataclass(slots=True, eq=False)
class Job:
    """A piece of work, such as compiling a grammar, and the requests that wait for its result."""

    key: Hashable
    size: int
    work: Callable[[], Any]
    done: Future[Any] = field(default_factory=Future)
    """Cancelled if no request waits for the result, or by `close`."""
    waiting: Counter[str] = field(default_factory=Counter)
    """Number of waiting requests by tenant. Empty once the work has begun."""


class FairLine:
    """A queue of jobs for a few threads, which tenants take turns to use. Thread-safe.

    Each tenant has its own queue and at most one thread. After a job, its tenant goes to the end of the line, so a new tenant
    waits for at most one job of each other tenant.
    """

    def __init__(self, num_threads: int, name: str, *, max_jobs: int, keeps_results: bool = False) -> None:
        """`max_jobs` limits each tenant's waiting jobs. `keeps_results`: `close` lets running jobs end."""
        self._pool: ThreadPoolExecutor | None = None
        """Has all its threads. None until the first job."""
        self._num_threads, self._name = num_threads, name
        self._max_jobs = max_jobs
        self._keeps_results = keeps_results
        self._size = 0
        """The sizes of all waiting jobs together, without those of batches."""
        self._lock = threading.Lock()
        self._queues: dict[str, dict[Job, None]] = {}
        """Waiting jobs by tenant, oldest first. Tenants are in the order of their turns."""
        self._at_work: dict[str, Job] = {}
        self._shared: dict[Hashable, Job] = {}
        """Unfinished jobs that have a key, by key."""
        self._is_closed = False

    def join(self, tenant: str, size: int, work: Callable[[], Any], key: Hashable = None) -> Job | None:
        """Queue a job for the tenant, or share an unfinished job with this key. Return None if the queue or the line is full.

        An empty queue takes a job of any size that the line has room for, and an empty line any. A batch's queue is never full.
        Raises RuntimeError if the system refuses the line's threads, for which the first job asks. The next job asks again.
        """
        with self._lock:
            shared = self._shared.get(key)
            if shared is not None and not shared.waiting:
                return shared
            job = shared or Job(key, size, work)
            if self._is_closed:
                job.done.cancel()
                return job
            if self._pool is None:
                self._pool = _pool_with_threads(self._num_threads, self._name)
            jobs = self._queues.get(tenant, {})
            if job not in jobs:
                if not _is_background(tenant):
                    if self._is_full(jobs, size):
                        return None
                    self._size += job.size
                jobs[job] = None
                self._queues[tenant] = jobs
            job.waiting[tenant] += 1
            if key is not None:
                self._shared[key] = job
            self._begin()
            return job

    def leave(self, tenant: str, job: Job) -> None:
        """Note that a tenant's request no longer waits for the job. Drop the job if it has not begun and no request waits."""
        with self._lock:
            if tenant not in job.waiting:
                return
            job.waiting[tenant] -= 1
            if not job.waiting[tenant]:
                self._take_out(tenant, job)
            if not job.waiting:
                job.done.cancel()
                self._shared.pop(job.key, None)

    def close(self) -> None:
        """Cancel waiting jobs, and unless `keeps_results` the results of running ones. Return at once. Idempotent."""
        with self._lock:
            self._is_closed = True
            jobs = {job for queue in self._queues.values() for job in queue}
            self._queues.clear()
            if not self._keeps_results:
                jobs.update(self._at_work.values())
            for job in jobs:
                job.waiting.clear()
                job.done.cancel()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _is_full(self, jobs: Collection[Job], size: int) -> bool:
        if self._size and self._size + size > MAX_FULL_QUEUES * MAX_SIZE_IN_FLIGHT:
            return True
        return bool(jobs) and (len(jobs) >= self._max_jobs or sum(job.size for job in jobs) + size > MAX_SIZE_IN_FLIGHT)

    def _begin(self) -> None:
        """Start waiting jobs on idle threads. The caller holds the lock."""
        assert self._pool is not None, "made for the first job"
        while len(self._at_work) < self._num_threads:
            tenant = next((tenant for tenant in self._queues if tenant not in self._at_work), None)
            if tenant is None:
                return
            job = self._at_work[tenant] = next(iter(self._queues[tenant]))
            for other in list(job.waiting):
                self._take_out(other, job)
            self._pool.submit(self._do, tenant, job)

    def _take_out(self, tenant: str, job: Job) -> None:
        del job.waiting[tenant]
        del self._queues[tenant][job]
        if not _is_background(tenant):
            self._size -= job.size
        if not self._queues[tenant]:
            del self._queues[tenant]

    def _do(self, tenant: str, job: Job) -> None:
        try:
            result, error = job.work(), None
        except BaseException as raised:
            result, error = None, raised
        with self._lock:
            self._shared.pop(job.key, None)
            del self._at_work[tenant]
            if jobs := self._queues.pop(tenant, None):
                self._queues[tenant] = jobs  # behind the other tenants
            self._begin()
        with contextlib.suppress(InvalidStateError):  # the line was closed meanwhile
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)
        del job, error, result  # breaks a reference cycle


def _pool_with_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """Return a pool whose threads all run. Raises RuntimeError if one is refused, which later would leave its job undone."""
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"penstock-{name}")
    all_run = threading.Barrier(num_threads)  # until then none is idle, so the pool starts another
    try:
        for _ in range(num_threads):
            pool.submit(all_run.wait)
    except RuntimeError:
        all_run.abort()
        pool.shutdown(wait=False)
        raise
    return pool
