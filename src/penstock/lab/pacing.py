"""Decides which job of a workload is sent next, and when. Used by the sending loop (`driving`) and the simulation.

The caller tells a `Pacer` the time and which requests have ended, and takes due jobs from it.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.lab.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    concurrency: int | None = None
    """Number of users of a closed loop, or None for an open loop. Each user begins the next conversation when its last one has
    ended. Arrivals are ignored; think times are kept."""
    max_concurrency: int | None = None
    """Most requests of an open loop in flight. Others wait, which counts in their latencies."""
    background: int = 0
    """Most background jobs in flight while other jobs are left. Their arrivals are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The start of a run, sent but not recorded: the first `num_jobs`, and all jobs due in the first `seconds`."""

    num_jobs: int = 0
    seconds: float = 0.0

    def covers(self, index: int, intended_ns: int) -> bool:
        return index < self.num_jobs or intended_ns < self.seconds * 1e9


class Pacer:
    """The schedule of a workload's jobs during a run. Instants are nanoseconds from the start of the run."""

    def __init__(self, workload: Workload, pace: Pace) -> None:
        jobs = workload.jobs
        self._jobs = jobs
        self._pace = pace
        self._turns_after: defaultdict[int, list[int]] = defaultdict(list)
        self._conversation: dict[int, int] = {}
        """Index of a job in a conversation of several turns -> the first job of the conversation."""
        self._num_left: dict[int, int] = {}
        for index, job in enumerate(jobs):
            if job.after is not None:
                self._turns_after[job.after].append(index)
                first = self._conversation.setdefault(job.after, job.after)
                self._conversation[index] = first
                self._num_left[first] = self._num_left.get(first, 1) + 1
        self._background_jobs = deque([index for index, job in enumerate(jobs) if job.background])
        """Background jobs that have not begun."""
        self._num_background_running = 0
        self._background_due_ns = 0
        firsts = [index for index, job in enumerate(jobs) if job.after is None and not job.background]
        if pace.concurrency is None:
            firsts.sort(key=lambda index: jobs[index].arrival_ns)
        self._firsts = array("q", firsts)
        self._num_begun = 0
        self._turns: list[tuple[int, int]] = []
        self._free_since: deque[int] = deque([0] * min(pace.concurrency or 0, len(firsts)))
        """For each idle user of a closed loop, the instant since which it is idle."""
        self._num_running = 0

    @property
    def is_over(self) -> bool:
        return not (self._num_running or self._turns or self._num_begun < len(self._firsts))

    def next_ns(self) -> int | None:
        """Return when the next job is due, maybe in the past, or None if no job is due before a request ends."""
        return earliest(self._next_background_ns(), self._next_other_ns())

    def _next_background_ns(self) -> int | None:
        has_others = self._num_begun < len(self._firsts) or self._turns or self._num_running > self._num_background_running
        is_due = self._background_jobs and self._num_background_running < self._pace.background and has_others
        return self._background_due_ns if is_due else None

    def _next_other_ns(self) -> int | None:
        if self._is_full:
            return None
        return earliest(self._turns[0][0] if self._turns else None, self._first_ns())

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """Return (index, due instant) of a job to send now, or None if no job is due."""
        due_ns = self.next_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        self._num_running += 1
        if due_ns == self._next_background_ns():
            self._num_background_running += 1
            return self._background_jobs.popleft(), due_ns
        if self._turns and self._turns[0][0] == due_ns:
            return heappop(self._turns)[1], due_ns
        if self._free_since:
            self._free_since.popleft()
        self._num_begun += 1
        return self._firsts[self._num_begun - 1], due_ns

    def end(self, index: int, now_ns: int) -> int:
        """Note that a job was answered. Schedule the turns that follow it, after their think times, and return their number."""
        turns = self._turns_after.pop(index, ())
        for turn in turns:
            heappush(self._turns, (now_ns + self._jobs[turn].arrival_ns, turn))
        self._num_running -= 1
        self._release(index, now_ns)
        return len(turns)

    def fail(self, index: int, now_ns: int) -> list[int]:
        """Note that a job failed. Return the later turns of its conversation, which will not be sent."""
        lost = list(self._turns_after.pop(index, ()))
        for turn in lost:
            lost += self._turns_after.pop(turn, ())
        self._num_running -= 1
        for each in (index, *lost):
            self._release(each, now_ns)
        return lost

    def continues(self, index: int) -> bool:
        """Return whether a later turn of the conversation, which includes this job's answer, will be sent."""
        return index in self._turns_after

    @property
    def _is_full(self) -> bool:
        limit = self._pace.max_concurrency if self._pace.concurrency is None else None
        return limit is not None and self._num_running >= limit

    def _first_ns(self) -> int | None:
        if self._num_begun == len(self._firsts):
            return None
        if self._pace.concurrency is not None:
            return self._free_since[0] if self._free_since else None
        return self._jobs[self._firsts[self._num_begun]].arrival_ns

    def _release(self, index: int, now_ns: int) -> None:
        if self._jobs[index].background:
            self._num_background_running -= 1
            self._background_due_ns = now_ns
            return
        first = self._conversation.pop(index, index)
        num_left = self._num_left.pop(first, 1) - 1
        if num_left:
            self._num_left[first] = num_left
        elif self._pace.concurrency is not None:
            self._free_since.append(now_ns)


def earliest(*instants_ns: int | None) -> int | None:
    return min((at_ns for at_ns in instants_ns if at_ns is not None), default=None)
