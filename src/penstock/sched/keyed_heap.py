"""A heap whose items may be discarded, or get a later key. Used for the queue and for deadlines; knows nothing of either."""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from typing import Generic, TypeVar

from penstock.sched.policies.base import OrderKey

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
