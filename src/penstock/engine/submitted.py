"""What the executor was given: owns the steps in flight, and knows since when the engine waits for it. Called by `thread`, and
by `transfers` as a `BlockMover`, on the engine thread; asked, and given up, by any thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
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
    awaits_masks: bool = False
    """It has rows that follow a grammar, and has not been told what they may sample."""
    ticket: Ticket | None = None
    """None while it is submitted."""


class _Inside:
    """Entered by the engine thread for as long as it is inside the executor.

    One object and no generator: this is run twice a step, between two steps of the kernels.
    """

    __slots__ = ("_clock", "_is_abandoned", "_lock", "_since_ns")

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._since_ns: int | None = None
        """Set by the engine thread; cleared with the lock held."""
        self._is_abandoned = False

    def __enter__(self) -> int:
        """Since when."""
        began_ns = self._since_ns = self._clock.now_ns()
        return began_ns

    def __exit__(self, *_: object) -> None:
        """Raises `Abandoned` instead of whatever happened, if it was given up meanwhile."""
        with self._lock:
            self._since_ns = None
            if self._is_abandoned:
                raise Abandoned

    # For any thread.

    def waiting_ns(self) -> int:
        since_ns = self._since_ns
        return 0 if since_ns is None else self._clock.now_ns() - since_ns

    def abandon(self) -> bool:
        with self._lock:
            self._is_abandoned = self._since_ns is not None
        return self._is_abandoned


class Submitted:
    """Steps in flight, the oldest first. Implements `engine.ports.BlockMover` for the executor's blocks."""

    def __init__(self, executor: Executor, clock: Clock) -> None:
        """Raises ValueError for an executor whose depth is neither 1 nor 2."""
        if executor.depth not in (1, 2):
            raise ValueError(f"one or two steps can be in flight, not {executor.depth}")
        self._executor = executor
        self._depth = executor.depth
        self._flights: deque[Flight] = deque()
        self._is_collected = False
        """The oldest, and not forgotten yet."""
        self._inside = _Inside(clock)

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def is_full(self) -> bool:
        """No step can be submitted before one was collected."""
        return len(self._flights) == self._depth

    # For the engine thread. All raise `Abandoned` instead of whatever happened, if the executor was given up meanwhile.

    def submit(self, plan: StepPlan, copies: Sequence[tuple[int, int]], begun_ns: int, *, awaits_masks: bool = False) -> None:
        """Copy blocks, then begin a step that was planned since `begun_ns`."""
        with self._inside as now_ns:
            flight = Flight(plan, now_ns - begun_ns, awaits_masks)
            self._flights.append(flight)
            if copies:
                self._executor.copy_blocks(copies)
            flight.ticket = self._executor.submit(plan)

    @property
    def to_restrict(self) -> Flight | None:
        """The step that waits for masks, if all before it were collected."""
        if len(self._flights) - self._is_collected != 1 or not self._flights[-1].awaits_masks:
            return None
        return self._flights[-1]

    def restrict(self, flight: Flight, masks: Mapping[str, bytes]) -> None:
        """Tell `to_restrict` what its rows may sample."""
        assert flight.ticket is not None, "it was submitted"
        with self._inside:
            self._executor.restrict(flight.ticket, masks)
        flight.awaits_masks = False

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks although no step follows."""
        with self._inside:
            self._executor.copy_blocks(copies)

    def collect(self) -> tuple[Flight, StepResult]:
        """Wait for the oldest step. It counts as in flight until `forget`."""
        flight = self._flights[0]
        assert flight.ticket is not None, "it was submitted"
        with self._inside:
            result = self._executor.collect(flight.ticket)
        self._is_collected = True
        return flight, result

    def forget(self) -> None:
        """The oldest was told to all whom it concerns."""
        self._flights.popleft()
        self._is_collected = False

    @property
    def block_bytes(self) -> int:
        return self._executor.block_bytes

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        """A device that hangs in a step may not come back from this either."""
        with self._inside:
            return self._executor.read_blocks(block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        with self._inside:
            self._executor.write_blocks(block_ids, contents)

    # For any thread.

    def waiting_ns(self) -> int:
        """For how long the engine thread has been inside the executor; 0 if it is not."""
        return self._inside.waiting_ns()

    def abandon(self) -> bool:
        """Wait no longer: from now on the engine thread touches nothing when the executor comes back. False if it just did."""
        return self._inside.abandon()

    @property
    def step_ids(self) -> str:
        """For the log."""
        return ", ".join(str(flight.plan.step_id) for flight in tuple(self._flights)) or "none"

    @property
    def plans(self) -> str:
        """For the log."""
        return "; ".join(repr(flight.plan)[:MAX_PLAN_CHARS] for flight in tuple(self._flights)) or "none"
