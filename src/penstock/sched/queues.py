"""The waiting queue: owns the requests that are not running, in the order of service. Called by the scheduler; never looks at
memory.

Preempted requests come before all others, by arrival, whatever the order policy: they were served before.
Every operation is O(log n) or better, amortised; there is no work per waiting request and step.
"""

from __future__ import annotations

from bisect import insort_left
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from penstock.sched.policies.base import Order, OrderKey
from penstock.types.request import Request

T = TypeVar("T")

MIN_DEAD_TO_SWEEP = 64
"""Below this many discarded entries a sweep isn't worth its loop."""


class KeyedHeap(Generic[T]):
    """A heap of items by key, equals in the order of arrival; items (compared by identity) may be discarded in O(1)."""

    def __init__(self) -> None:
        self._entries: list[tuple[OrderKey, int, T]] = []
        self._numbers = count()
        self._dead: set[int] = set()
        """Numbers of entries that were discarded and not yet removed."""

    def __len__(self) -> int:
        return len(self._entries) - len(self._dead)

    def push(self, key: OrderKey, item: T) -> int:
        """Returns a number by which the item can be discarded."""
        number = next(self._numbers)
        heappush(self._entries, (key, number, item))
        return number

    def peek(self) -> tuple[OrderKey, int, T] | None:
        """(key, number, item) of the smallest; None if empty."""
        while self._entries and self._entries[0][1] in self._dead:
            self._dead.remove(heappop(self._entries)[1])
        return self._entries[0] if self._entries else None

    def rekey_first(self, key: OrderKey) -> None:
        """Give the item that `peek` returned another key."""
        _, number, item = self._entries[0]
        heapreplace(self._entries, (key, number, item))

    def discard(self, number: int) -> None:
        """Drop an item that is still in the heap."""
        self._dead.add(number)
        if len(self._dead) > max(MIN_DEAD_TO_SWEEP, len(self._entries) // 2):
            self._entries = [entry for entry in self._entries if entry[1] not in self._dead]
            heapify(self._entries)
            self._dead.clear()


class WaitingQueue:
    """Requests that wait for their first admission, or for the next after a preemption."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._fresh: KeyedHeap[Request] = KeyedHeap()
        self._numbers: dict[str, int] = {}
        """request_id -> number in the heap."""
        self._preempted: list[Request] = []

    def __len__(self) -> int:
        return len(self._fresh) + len(self._preempted)

    def push(self, request: Request, now_ns: int) -> None:
        """A request that never ran."""
        self._numbers[request.request_id] = self._fresh.push(self._order.key(request, now_ns), request)

    def push_preempted(self, request: Request) -> None:
        """A request that ran. Of equal arrivals the last pushed goes first, since the last admitted is preempted first."""
        insort_left(self._preempted, request, key=_arrival)

    def peek(self, now_ns: int) -> Request | None:
        """Who is next; None if nobody waits."""
        if self._preempted:
            return self._preempted[0]
        while (first := self._fresh.peek()) is not None:
            known_key, _, request = first
            key = self._order.key(request, now_ns)
            if key <= known_key:
                return request
            self._fresh.rekey_first(key)
        return None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        number = self._numbers.pop(request.request_id, None)
        if number is None:
            self._preempted.remove(request)
        else:
            self._fresh.discard(number)


def _arrival(request: Request) -> int:
    return request.arrival_ns
