"""Time as a value: integer nanoseconds from a clock that is passed in, never read from a global."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Return monotonic time in nanoseconds; only differences mean anything."""
        ...

    def busy_ns(self) -> int:
        """Return the CPU time of the calling thread in nanoseconds."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    now_ns = staticmethod(time.monotonic_ns)
    busy_ns = staticmethod(time.thread_time_ns)


class VirtualClock:
    """A clock that moves only when it is told to."""

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def busy_ns(self) -> int:
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        if delta_ns < 0:
            raise ValueError(f"time can't go back by {-delta_ns} ns")
        self._now_ns += delta_ns

    def advance_to(self, at_ns: int) -> None:
        self.advance(at_ns - self._now_ns)
