"""Clocks that are passed in, never read from a global. Times are integer nanoseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_ns(self) -> int:
        """Return monotonic time in nanoseconds. Only differences mean anything."""
        ...

    def busy_ns(self) -> int:
        """Return the CPU time of the calling thread in nanoseconds."""
        ...


class WallClock:
    """The real clock: the machine's monotonic time."""

    now_ns = staticmethod(time.monotonic_ns)
    busy_ns = staticmethod(time.thread_time_ns)


class StoppedClock:
    """A clock that stands still, for callers that measure nothing."""

    def now_ns(self) -> int:
        return 0

    def busy_ns(self) -> int:
        return 0


class VirtualClock:
    """A clock for simulations and tests. It moves only by `advance`."""

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
