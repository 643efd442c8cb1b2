"""What the queue lacked and for how long: owns a running total for each reason. Filled and read by the explanations' journal;
never looks at a single request in a step.

All who wait in a step wait for what the first of them lacks, so time is added once per step and not once per request: a
request remembers the totals as it came, and the difference when it runs is what it waited for. How much of that is the doing
of the order, which let others pass, follows from counting alone:

    came       a  b  c  d       admitted   a  d  b  c
    turn of c in order of arrival: the third admission, which was b's. From there on c waited because of the order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types.stats import WaitReason

REASONS = tuple(WaitReason)
_INDEX = {reason: idx for idx, reason in enumerate(REASONS)}
MAX_TURNS = 8192
"""Admissions that are remembered; who is passed by more counts the rest as something else."""
MAX_GONE = 1024
"""Requests that left the queue without having run, of which it is remembered when they came."""


@dataclass(frozen=True, slots=True)
class WaitMark:
    """The totals at an instant."""

    at_ns: int
    totals_ns: tuple[int, ...]
    """By reason, in the order of `REASONS`."""

    def since(self, earlier: WaitMark) -> tuple[int, ...]:
        """What was lacked for how long between two instants; none of them is negative."""
        return tuple([max(0, late - early) for late, early in zip(self.totals_ns, earlier.totals_ns, strict=True)])


class WaitClock:
    """Time by what the queue lacked."""

    def __init__(self) -> None:
        self._at_ns = 0
        self._current = _INDEX[WaitReason.NOTHING]
        self._totals_ns = [0] * len(REASONS)

    @property
    def reason(self) -> WaitReason:
        """What is lacked now."""
        return REASONS[self._current]

    def lack(self, reason: WaitReason, now_ns: int) -> None:
        """From now on the queue lacks this, until it is told otherwise."""
        if now_ns > self._at_ns:
            self._totals_ns[self._current] += now_ns - self._at_ns
            self._at_ns = now_ns
        self._current = _INDEX[reason]

    def mark(self, now_ns: int) -> WaitMark:
        totals_ns = list(self._totals_ns)
        totals_ns[self._current] += max(0, now_ns - self._at_ns)
        return WaitMark(now_ns, tuple(totals_ns))


@dataclass(frozen=True, slots=True)
class Turn:
    """How a request's turn compares with the order of arrival."""

    num_passed_by: int = 0
    """So many more were admitted before it than came before it."""
    due: WaitMark | None = None
    """When it would have been its turn, if it was passed."""


class Turns:
    """Counts who came, who was admitted and who left the queue."""

    def __init__(self) -> None:
        self._num_came = 0
        self._num_admitted = 0
        self._num_gone = 0
        self._gone: list[int] = []
        """Numbers of those who left, ascending; the oldest are only counted."""
        self._admitted: deque[WaitMark] = deque(maxlen=MAX_TURNS)

    @property
    def num_waiting(self) -> int:
        """Who came, and neither ran nor left."""
        return self._num_came - self._num_admitted - self._num_gone

    def come(self) -> int:
        """The number of whoever comes now."""
        self._num_came += 1
        return self._num_came - 1

    def leave(self, number: int) -> None:
        """Without having run."""
        self._num_gone += 1
        insort(self._gone, number)
        if len(self._gone) > MAX_GONE:
            del self._gone[: MAX_GONE // 2]

    def admit(self, number: int, now: WaitMark) -> Turn:
        """For the first time."""
        turn = self.turn_of(number)
        self._num_admitted += 1
        self._admitted.append(now)
        return turn

    def turn_of(self, number: int) -> Turn:
        """Of one that has not been admitted."""
        num_counted = self._num_gone - len(self._gone)
        place = number - num_counted - bisect_left(self._gone, number)
        num_passed_by = self._num_admitted - place
        if num_passed_by <= 0:
            return Turn()
        return Turn(num_passed_by, self._admitted[max(0, len(self._admitted) - num_passed_by)])


def total_ns(by_reason_ns: Sequence[int]) -> int:
    return sum(by_reason_ns)
