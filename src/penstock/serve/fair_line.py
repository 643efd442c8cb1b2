"""Work that a few threads do, one tenant's in turn with another's: each has a queue of its own, so none holds up the others.

Called by `off_loop` on the event loop, and by its own threads when they have done a job. Never asks what the work is.

A tenant has one thread at most, and goes to the end of the order of turns when its job has ended. So a tenant who comes anew
waits for nothing if fewer other tenants than threads have work, and for one job of each at worst.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any


class Job:
    """Work that one or more requests wait for, maybe of several tenants."""

    __slots__ = ("done", "key", "size", "waiting", "work")

    def __init__(self, key: Hashable, size: int, work: Callable[[], Any]) -> None:
        self.key = key
        self.size = size
        self.work = work
        self.done: Future[Any] = Future()
        """Cancelled if nobody will get the result: the work was given up before it began, or the line was closed."""
        self.waiting: Counter[str] = Counter()
        """How many requests wait for it to begin, by tenant; empty once it has."""


class _Queue:
    """One tenant's."""

    __slots__ = ("at_work", "jobs")

    def __init__(self) -> None:
        self.jobs: dict[Job, None] = {}
        """Those that have not begun, the oldest first."""
        self.at_work: Job | None = None
        """The one that a thread does."""


class FairLine:
    """Thread-safe."""

    def __init__(self, num_threads: int, name: str, *, max_jobs: int, max_size: int) -> None:
        """The bounds are of what waits, for each tenant."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=f"penstock-{name}")
        self._num_idle = num_threads
        self._max_jobs = max_jobs
        self._max_size = max_size
        self._lock = threading.Lock()
        self._queues: dict[str, _Queue] = {}
        """Of tenants who wait or are at work, in the order of their turns."""
        self._shared: dict[Hashable, Job] = {}
        """Those with a key that have not ended."""
        self._is_closed = False

    def join(self, tenant: str, size: int, work: Callable[[], Any], key: Hashable = None) -> Job | None:
        """Wait in the tenant's queue: for the job with this key if there is one, whoever's it is. None if the queue is full.

        A job that is larger than the bound itself comes in alone.
        """
        with self._lock:
            shared = self._shared.get(key)
            if shared is not None and not shared.waiting:
                return shared
            job = shared or Job(key, size, work)
            if self._is_closed:
                job.done.cancel()
                return job
            queue = self._queues.get(tenant) or _Queue()
            if job not in queue.jobs:
                if self._is_full(queue, size):
                    return None
                queue.jobs[job] = None
                self._queues[tenant] = queue
            job.waiting[tenant] += 1
            if key is not None:
                self._shared[key] = job
            self._begin()
            return job

    def leave(self, tenant: str, job: Job) -> None:
        """One of the tenant's requests does not wait any more. A job that nobody waits for is not done, unless it has begun."""
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
        """Cancel what waits and what has begun, whose result nobody gets any more. Does not wait. Idempotent."""
        with self._lock:
            self._is_closed = True
            jobs = {job for queue in self._queues.values() for job in queue.jobs}
            for queue in self._queues.values():
                queue.jobs.clear()
            for job in jobs:
                job.waiting.clear()
            for job in jobs.union(queue.at_work for queue in self._queues.values() if queue.at_work):
                job.done.cancel()
        self._pool.shutdown(wait=False)

    def _is_full(self, queue: _Queue, size: int) -> bool:
        jobs = queue.jobs
        return bool(jobs) and (len(jobs) >= self._max_jobs or sum(job.size for job in jobs) + size > self._max_size)

    def _begin(self) -> None:
        """As much as there are threads for. With the lock."""
        while self._num_idle:
            turns = ((tenant, queue) for tenant, queue in self._queues.items() if queue.jobs and queue.at_work is None)
            tenant, queue = next(turns, ("", None))
            if queue is None:
                return
            job = next(iter(queue.jobs))
            queue.at_work = job
            for other in list(job.waiting):
                self._take_out(other, job)
            self._num_idle -= 1
            self._pool.submit(self._do, tenant, job)

    def _take_out(self, tenant: str, job: Job) -> None:
        """Of what waits. With the lock."""
        del job.waiting[tenant]
        queue = self._queues[tenant]
        del queue.jobs[job]
        if not queue.jobs and queue.at_work is None:
            del self._queues[tenant]

    def _do(self, tenant: str, job: Job) -> None:
        """On a thread of the pool."""
        try:
            result, error = job.work(), None
        except BaseException as raised:
            result, error = None, raised
        with self._lock:
            self._shared.pop(job.key, None)
            queue = self._queues.pop(tenant)
            queue.at_work = None
            if queue.jobs:
                self._queues[tenant] = queue  # behind those who wait already
            self._num_idle += 1
            self._begin()
        with contextlib.suppress(InvalidStateError):  # cancelled: the line was closed meanwhile
            if error is None:
                job.done.set_result(result)
            else:
                job.done.set_exception(error)
        del job, error, result  # what was raised has this frame, which must not have it
