"""What the queue lacked and for how long: owns a running total for each reason. Filled and read by the explanations' journal;
never looks at a single request in a step.

All who wait in a step wait for what the first of them lacks, so time is added once per step and not once per request: a
request remembers the totals as it came, and the difference when it runs is what it waited for. How much of that is the doing
of the order, which let others pass, follows from counting alone:

    came       a  b  c  d       admitted   a  d  b  c
    turn of c in order of arrival: the third admission, which was b's. From there on c waited because of the order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from struct import Struct

from penstock.types.stats import WaitReason

REASONS = tuple(WaitReason)
_MARK = Struct(f"<{1 + len(REASONS)}q")
"""A mark as it is remembered."""
_INDEX = {reason: idx for idx, reason in enumerate(REASONS)}
MAX_TURNS = 8192
"""Admissions that are remembered; who is passed by more counts the rest as something else."""


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
    """So many were admitted while it waited that had come later."""
    due: WaitMark | None = None
    """When it would have been its turn, if it was passed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What `Turns` has to know of one who waits."""

    key: tuple[int, int]
    """Instant of arrival, and a number that breaks ties."""
    num_admitted: int
    """When it was queued; so are the others."""
    num_before: int
    """Who waited and had come earlier."""
    num_came_before: int
    """Who was ever queued, had come earlier and did not leave."""


class LateMarks:
    """The last `MAX_TURNS` marks. As numbers in one array: a tuple and an object each took four times as much, which a server
    had in full only after that many requests."""

    def __init__(self) -> None:
        self._numbers = bytearray()
        """Instant and totals of each mark; once there are enough, a ring."""
        self._num_marks = 0
        """That were ever appended."""

    def append(self, mark: WaitMark) -> None:
        start = self._num_marks % MAX_TURNS * _MARK.size
        self._numbers[start : start + _MARK.size] = _MARK.pack(mark.at_ns, *mark.totals_ns)
        self._num_marks += 1

    def from_last(self, count: int) -> WaitMark:
        """The `count`-th from the last, counted from 1; the oldest that is remembered if that was longer ago."""
        idx = (self._num_marks - min(count, self._num_marks, MAX_TURNS)) % MAX_TURNS
        at_ns, *totals_ns = _MARK.unpack_from(self._numbers, idx * _MARK.size)
        return WaitMark(at_ns, tuple(totals_ns))


class LateKeys:
    """Keys, ascending and each different: an instant, and a number that breaks ties. The lesser are forgotten, not how many
    they were. O(log keys), but for the shift of an array. As numbers side by side they take an eighth of what tuples would.
    """

    def __init__(self) -> None:
        self._instants_ns = array("q")
        self._numbers = array("q")
        self._num_forgotten = 0

    def add(self, key: tuple[int, int]) -> int:
        """The number of keys that are less."""
        idx = self._find(key)
        self._instants_ns.insert(idx, key[0])
        self._numbers.insert(idx, key[1])
        num_less = self._num_forgotten + idx
        if len(self._numbers) > MAX_TURNS:
            self._num_forgotten += MAX_TURNS // 2
            self._remove(0, MAX_TURNS // 2)
        return num_less

    def num_before(self, key: tuple[int, int]) -> int:
        """Keys that are less."""
        return self._num_forgotten + self._find(key)

    def discard(self, key: tuple[int, int]) -> None:
        """Remove a key; one that is not there is ignored."""
        idx = self._find(key)
        if idx < len(self._numbers) and (self._instants_ns[idx], self._numbers[idx]) == key:
            self._remove(idx, idx + 1)

    def _find(self, key: tuple[int, int]) -> int:
        instants_ns = self._instants_ns
        if not instants_ns or instants_ns[-1] < key[0]:  # the newest, as most are when they are added
            return len(instants_ns)
        idx = bisect_left(instants_ns, key[0])
        if instants_ns[idx] != key[0]:
            return idx
        return bisect_left(self._numbers, key[1], idx, bisect_right(instants_ns, key[0], idx))

    def _remove(self, start: int, stop: int) -> None:
        del self._instants_ns[start:stop]
        del self._numbers[start:stop]


class Turns:
    """Counts who was queued, who was admitted and who left, by arrival; that is not the order in which they are queued, as long
    prompts take longer to tokenise. O(log requests), but for the shift of an array.
    """

    def __init__(self) -> None:
        self._num_tickets = 0
        self._num_admitted = 0
        self._waiting: list[tuple[int, int]] = []
        """Keys, ascending."""
        self._came = LateKeys()
        """Of all who were queued and did not leave without having run."""
        self._admitted = LateMarks()

    def come(self, arrival_ns: int) -> Ticket:
        """Somebody is queued."""
        key = (arrival_ns, self._num_tickets)
        self._num_tickets += 1
        num_before = bisect_left(self._waiting, key)
        self._waiting.insert(num_before, key)
        return Ticket(key, self._num_admitted, num_before, self._came.add(key))

    def leave(self, ticket: Ticket) -> None:
        """Without having run."""
        _discard(self._waiting, ticket.key)
        self._came.discard(ticket.key)

    def admit(self, ticket: Ticket, now: WaitMark) -> Turn:
        """For the first time."""
        turn = self.turn_of(ticket)
        _discard(self._waiting, ticket.key)
        self._num_admitted += 1
        self._admitted.append(now)
        return turn

    def turn_of(self, ticket: Ticket) -> Turn:
        """Of one that waits."""
        num_earlier = ticket.num_before + self._came.num_before(ticket.key) - ticket.num_came_before
        num_earlier_admitted = num_earlier - bisect_left(self._waiting, ticket.key)
        num_passed_by = self._num_admitted - ticket.num_admitted - num_earlier_admitted
        if num_passed_by <= 0:
            return Turn()
        return Turn(num_passed_by, self._admitted.from_last(num_passed_by))


def _discard(keys: list[tuple[int, int]], key: tuple[int, int]) -> None:
    idx = bisect_left(keys, key)
    if idx < len(keys) and keys[idx] == key:
        del keys[idx]
