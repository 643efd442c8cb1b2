"""The steps in flight: owns what the scheduler has to remember of each, from its plan to its commit. Called by the scheduler;
plans nothing.

    1. Steps are committed in the order in which they were planned.
    2. Who ends while rows of it are in flight leaves void rows behind: what they bring is ignored. They are void by step and
       not by name, since a request of the same id may come, and run, before they are committed.
    3. Its blocks are fenced (`kv/fence.py`) until the last step in flight at its end is committed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.kv.manager import KVManager
from penstock.sched.draft import StepCounts
from penstock.types.plan import RowPlan, StepPlan
from penstock.types.request import Request


@dataclass(slots=True)
class Flight:
    """One step."""

    step_id: int
    counts: StepCounts
    void: frozenset[str] = frozenset()
    """Ids of requests whose rows in it belong to ones that have ended."""
    has_fenced: bool = False
    """Blocks wait for its end."""

    def live(self, rows: tuple[RowPlan, ...]) -> tuple[RowPlan, ...]:
        """Those of its rows that are not void."""
        return tuple([row for row in rows if row.request_id not in self.void])


class Flights:
    """The oldest first."""

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def depart(self, plan: StepPlan, counts: StepCounts) -> None:
        """A step was planned."""
        self._flights.append(Flight(plan.step_id, counts))

    def leave(self, request: Request) -> None:
        """A request ends that may have rows in flight. Takes its blocks."""
        if not (self._flights and request.num_inflight_tokens):
            self._kv.free(request.request_id)
            return
        for flight in self._flights:
            flight.void |= {request.request_id}
        newest = self._flights[-1]
        newest.has_fenced = True
        self._kv.fence(request.request_id, newest.step_id)

    def arrive(self, step_id: int) -> Flight:
        """The oldest was collected. Raises ValueError if that is another step."""
        if not self._flights or self._flights[0].step_id != step_id:
            raise ValueError(f"step {step_id} is not the oldest in flight")
        flight = self._flights.popleft()
        if flight.has_fenced:
            self._kv.lift_fence(step_id)
        return flight

    def check(self, running: Iterable[Request]) -> None:
        """Verify the laws. Raises AssertionError. O(requests)."""
        assert self._flights or not self._kv.fenced, "a fence is left, and no step is in flight"
        for request in running:
            assert self._flights or not request.num_inflight_tokens, (
                f"{request.request_id!r} has tokens in flight, and no step is"
            )
            assert not request.num_pending_samples, f"{request.request_id!r} counts a token that nobody knows"

    def abandon(self) -> None:
        """No step in flight will be committed, and none will follow."""
        while self._flights:
            self.arrive(self._flights[0].step_id)
