"""Steps in flight: what the scheduler remembers of each from plan to commit, and planning the next step ahead.

A request that ends leaves void rows, whose results are ignored. To plan ahead, `Ahead` counts the step in flight as committed
meanwhile. A step that might preempt is never planned ahead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.groups import Groups
from penstock.sched.policies.base import Policies
from penstock.sched.running import Running
from penstock.types.plan import RowPlan, StepPlan
from penstock.types.request import Request
from penstock.types.stats import StepCounts


@dataclass(slots=True)
class Flight:
    step_id: int
    counts: StepCounts
    void: frozenset[str] = frozenset()
    """Ids of ended requests. By step, since a new request may have the same id by then."""
    has_fenced: bool = False

    def live(self, rows: tuple[RowPlan, ...]) -> tuple[RowPlan, ...]:
        return tuple([row for row in rows if row.request_id not in self.void])


class Flights:
    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._flights: deque[Flight] = deque()

    def __len__(self) -> int:
        return len(self._flights)

    def depart(self, plan: StepPlan, counts: StepCounts) -> None:
        self._flights.append(Flight(plan.step_id, counts))

    def leave(self, request: Request) -> None:
        """Free the blocks of a request that ends, once no step in flight uses them."""
        if not (self._flights and request.num_inflight_tokens):
            self._kv.free(request.request_id)
            return
        for flight in self._flights:
            flight.void |= {request.request_id}
        newest = self._flights[-1]
        newest.has_fenced = True
        self._kv.fence(request.request_id, newest.step_id)

    def arrive(self, step_id: int) -> Flight:
        """Remove the oldest step. Raises ValueError if `step_id` is another."""
        if not self._flights or self._flights[0].step_id != step_id:
            raise ValueError(f"step {step_id} is not the oldest in flight")
        flight = self._flights.popleft()
        if flight.has_fenced:
            self._kv.lift_fence(step_id)
        return flight

    def check(self, running: Iterable[Request]) -> None:
        assert self._flights or not self._kv.fenced, "a fence is left, and no step is in flight"
        for request in running:
            assert self._flights or not request.num_inflight_tokens, (
                f"{request.request_id!r} has tokens in flight, and no step is"
            )
            assert not request.num_pending_samples, f"{request.request_id!r} counts a token that nobody knows"

    def abandon(self) -> None:
        while self._flights:
            self.arrive(self._flights[0].step_id)


class Ahead:
    """Assumes that the step in flight will be committed as planned."""

    def __init__(self, kv: KVManager, policies: Policies, running: Running, groups: Groups) -> None:
        self._kv = kv
        self._order = policies.order
        self._running = running
        self._groups = groups
        self._is_possible = policies.gate.may_plan_ahead
        self._assumed: list[tuple[Request, int]] = []
        """(request with a row in flight, its number of tokens)"""

    def begin(self) -> bool:
        """Make the assumption. Return False, changing nothing, if the next step can't be planned ahead. O(running)."""
        if not self._is_possible or self._groups.by_id:
            return False
        self._assumed, ending = progress.assume(self._running)
        num_missing_blocks = self._num_missing_blocks()
        for request in ending:
            self._kv.look_again(request.request_id)  # so that `Extending` sees that it has nothing to compute
            self._order.left(request)  # the request gets no more rows
        if num_missing_blocks > self._kv.pool.num_available:
            self.end()
            return False
        self._kv.prefix.in_flight = {request.request_id for request, num_tokens in self._assumed if num_tokens > 1}
        return True

    def _num_missing_blocks(self) -> int:
        num_slots, num_blocks_for = self._kv.num_slots, self._kv.num_blocks_for
        num_missing = 0
        for request in self._running:
            num_missing_tokens = request.num_tokens - num_slots[request.request_id]
            if num_missing_tokens > 0 and request.num_behind:  # otherwise the request ends with the step in flight
                num_missing += num_blocks_for(num_missing_tokens)
        return num_missing

    def end(self) -> None:
        progress.unassume(self._assumed)
        self._assumed = []
        self._kv.prefix.in_flight = ()
