"""Time as a value: integer nanoseconds from a clock that is passed in, never read from a global."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Monotonic time in nanoseconds; only differences mean anything."""
        ...

    def busy_ns(self) -> int:
        """CPU time of the calling thread in nanoseconds, which stands still while it waits; only differences mean anything."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def busy_ns(self) -> int:
        return time.thread_time_ns()


class VirtualClock:
    """A clock that stands still until it is told to move."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def busy_ns(self) -> int:
        """The same: nobody waits."""
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        """Move forward by `delta_ns` >= 0."""
        if delta_ns < 0:
            raise ValueError(f"time can't go back by {-delta_ns} ns")
        self._now_ns += delta_ns

    def advance_to(self, at_ns: int) -> None:
        """Move forward to `at_ns`, which must not lie in the past."""
        self.advance(at_ns - self._now_ns)
