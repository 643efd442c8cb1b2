"""A queue of a simulation's events in time order, except the steps of servers."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

NEVER_NS = 1 << 62
"""An instant later than any simulation."""


class Agenda:
    def __init__(self) -> None:
        self.due_ns = NEVER_NS
        self._entries: list[tuple[int, int, Callable[[], None]]] = []
        self._num_noted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, at_ns: int, action: Callable[[], None]) -> None:
        heappush(self._entries, (at_ns, self._num_noted, action))
        self._num_noted += 1
        self.due_ns = self._entries[0][0]

    def act(self) -> None:
        _, _, action = heappop(self._entries)
        self.due_ns = self._entries[0][0] if self._entries else NEVER_NS
        action()
