"""What the executor was given: owns the steps in flight, and knows since when the engine waits for it. Called by `loop`, and by
`transfers` as a `BlockMover`, on the engine thread; asked, and given up, by any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.engine.ports import Executor, Ready
from penstock.types.plan import StepPlan, Ticket
from penstock.types.result import StepResult

MAX_PLAN_CHARS = 4000
"""How much of a plan is logged."""


class Abandoned(Exception):
    """The executor came back after its requests had been ended."""


@dataclass(slots=True)
class Flight:
    """One step."""

    plan: StepPlan
    schedule_ns: int
    """What it took to plan."""
    ticket: Ticket | None = None
    """None while it is submitted."""


class Submitted:
    """Steps in flight, the oldest first. Implements `engine.ports.BlockMover` for the executor's blocks."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        """Raises ValueError for an executor whose depth is neither 1 nor 2."""
        if executor.depth not in (1, 2):
            raise ValueError(f"one or two steps can be in flight, not {executor.depth}")
        self._executor = executor
        self._clock = clock
        self._depth = executor.depth
        self._flights: deque[Flight] = deque()
        self._lock = threading.Lock()
        self._since_ns: int | None = None
        """Set by the engine thread while it is inside the executor; cleared with the lock held."""
        self._is_abandoned = False

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """No step can be submitted before one was collected."""
        return len(self._flights) == self._depth

    # For the engine thread. All raise `Abandoned` instead of whatever happened, if the executor was given up meanwhile.

    def submit(self, plan: StepPlan, copies: Sequence[tuple[int, int]], begun_ns: int) -> None:
        """Copy blocks, then begin a step that was planned since `begun_ns`."""
        with self._inside() as now_ns:
            flight = Flight(plan, now_ns - begun_ns)
            self._flights.append(flight)
            if copies:
                self._executor.copy_blocks(copies)
            flight.ticket = self._executor.submit(plan)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks although no step follows."""
        with self._inside():
            self._executor.copy_blocks(copies)

    def collect(self) -> tuple[Flight, StepResult]:
        """Wait for the oldest step. It counts as in flight until `forget`."""
        flight = self._flights[0]
        assert flight.ticket is not None, "it was submitted"
        with self._inside():
            return flight, self._executor.collect(flight.ticket)

    def forget(self) -> None:
        """The oldest was told to all whom it concerns."""
        self._flights.popleft()

    @property
    def block_bytes(self) -> int:
        return self._executor.block_bytes

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        """A device that hangs in a step may not come back from this either."""
        with self._inside():
            return self._executor.read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        with self._inside():
            self._executor.write_blocks(block_ids, contents)

    @contextmanager
    def _inside(self) -> Iterator[int]:
        """The engine thread is inside the executor, since the time that this gives."""
        began_ns = self._since_ns = self._clock.now_ns()
        try:
            yield began_ns
        finally:
            with self._lock:
                self._since_ns = None
                if self._is_abandoned:
                    raise Abandoned

    # For any thread.

    def waiting_ns(self) -> int:
        """For how long the engine thread has been inside the executor; 0 if it is not."""
        since_ns = self._since_ns
        return 0 if since_ns is None else self._clock.now_ns() - since_ns

    def abandon(self) -> bool:
        """Wait no longer: from now on the engine thread touches nothing when the executor comes back. False if it just did."""
        with self._lock:
            self._is_abandoned = self._since_ns is not None
        return self._is_abandoned

    @property
    def step_ids(self) -> str:
        """For the log."""
        return ", ".join(str(flight.plan.step_id) for flight in tuple(self._flights)) or "none"

    @property
    def plans(self) -> str:
        """For the log."""
        return "; ".join(repr(flight.plan)[:MAX_PLAN_CHARS] for flight in tuple(self._flights)) or "none"
