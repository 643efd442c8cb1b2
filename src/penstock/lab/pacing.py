"""Which job of a workload is sent next, and when. Called by the loop that sends (`driving`) and by the simulation.

Instants and the ends of requests go into a `Pacer`, jobs that are due come out. It has no clock and sends nothing.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from dataclasses import dataclass
from heapq import heappop, heappush

from penstock.lab.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """An open loop, in which jobs come when they come; or a closed one, in which users wait for their answers."""

    concurrency: int | None = None
    """Users of a closed loop. Each takes the next conversation as soon as the one before is over; arrivals do not count, think
    times do. A job without other turns is a conversation. None: an open loop."""
    max_concurrency: int | None = None
    """Requests of an open loop that are under way at most; others wait, and their latencies count that. None: any number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """The begin of a run that is sent and left out of the records."""

    num_jobs: int = 0
    """The first so many of the workload."""
    seconds: float = 0.0
    """Jobs that were due before."""

    def covers(self, index: int, intended_ns: int) -> bool:
        """Whether the job of this index, which was due at that instant, is part of it."""
        return index < self.num_jobs or intended_ns < self.seconds * 1e9


class Pacer:
    """The jobs that are not sent yet, and those under way. All instants are nanoseconds from the begin of the run."""

    def __init__(self, workload: Workload, pace: Pace) -> None:
        jobs = workload.jobs
        self._jobs = jobs
        self._pace = pace
        self._turns_after: defaultdict[int, list[int]] = defaultdict(list)
        """Job -> the jobs that continue it."""
        self._conversation: dict[int, int] = {}
        """Job of a conversation with several turns -> the conversation's first job."""
        self._num_left: dict[int, int] = {}
        """First job of a conversation with several turns -> turns that have not ended."""
        for index, job in enumerate(jobs):
            if job.after is not None:
                self._turns_after[job.after].append(index)
                first = self._conversation.setdefault(job.after, job.after)
                self._conversation[index] = first
                self._num_left[first] = self._num_left.get(first, 1) + 1
        firsts = [index for index, job in enumerate(jobs) if job.after is None]
        if pace.concurrency is None:
            firsts.sort(key=lambda index: jobs[index].arrival_ns)
        self._firsts = array("q", firsts)
        self._num_begun = 0
        """Conversations of `_firsts` that were taken."""
        self._turns: list[tuple[int, int]] = []
        """A heap of (instant, job): turns whose user thinks, or waits for `max_concurrency`."""
        self._free_since: deque[int] = deque([0] * min(pace.concurrency or 0, len(firsts)))
        """An instant for each user of a closed loop that has nothing to do: since when."""
        self._num_running = 0

    @property
    def is_over(self) -> bool:
        return not (self._num_running or self._turns or self._num_begun < len(self._firsts))

    @property
    def num_running(self) -> int:
        return self._num_running

    def next_ns(self) -> int | None:
        """The instant at which a job is due, maybe in the past; None: not before one that is under way has ended."""
        if self._is_full:
            return None
        turn_ns = self._turns[0][0] if self._turns else None
        first_ns = self._first_ns()
        if turn_ns is None or first_ns is None:
            return turn_ns if first_ns is None else first_ns
        return min(turn_ns, first_ns)

    def take(self, now_ns: int) -> tuple[int, int] | None:
        """(job, the instant at which it was due) of a job to be sent now; None: there is none yet."""
        due_ns = self.next_ns()
        if due_ns is None or due_ns > now_ns:
            return None
        self._num_running += 1
        if self._turns and self._turns[0][0] == due_ns:
            return heappop(self._turns)[1], due_ns
        if self._free_since:
            self._free_since.popleft()
        self._num_begun += 1
        return self._firsts[self._num_begun - 1], due_ns

    def end(self, index: int, now_ns: int) -> int:
        """A job has ended with an answer. Returns the number of turns after it, which are due once their users have thought."""
        turns = self._turns_after.pop(index, ())
        for turn in turns:
            heappush(self._turns, (now_ns + self._jobs[turn].arrival_ns, turn))
        self._num_running -= 1
        self._leave(index, now_ns)
        return len(turns)

    def fail(self, index: int, now_ns: int) -> list[int]:
        """A job has ended without an answer. Returns the turns that can't be sent for that reason, in their order."""
        lost = list(self._turns_after.pop(index, ()))
        for turn in lost:
            lost += self._turns_after.pop(turn, ())
        self._num_running -= 1
        for each in (index, *lost):
            self._leave(each, now_ns)
        return lost

    def continues(self, index: int) -> bool:
        """Whether a turn follows this job, which needs its answer."""
        return index in self._turns_after

    @property
    def _is_full(self) -> bool:
        limit = self._pace.max_concurrency if self._pace.concurrency is None else None
        return limit is not None and self._num_running >= limit

    def _first_ns(self) -> int | None:
        """When the next conversation begins."""
        if self._num_begun == len(self._firsts):
            return None
        if self._pace.concurrency is not None:
            return self._free_since[0] if self._free_since else None
        return self._jobs[self._firsts[self._num_begun]].arrival_ns

    def _leave(self, index: int, now_ns: int) -> None:
        """A turn is over; if it was the last one, the user of a closed loop is free."""
        first = self._conversation.pop(index, index)
        num_left = self._num_left.pop(first, 1) - 1
        if num_left:
            self._num_left[first] = num_left
        elif self._pace.concurrency is not None:
            self._free_since.append(now_ns)
