"""The steps in flight: owns what the scheduler has to remember of each, from its plan to its commit, and plans the next one
ahead. Called by the scheduler; takes no block and preempts no request.

Laws of steps in flight (`Flights`):

1. Steps are committed in the order in which they were planned.
2. A request that ends while rows of it are in flight leaves void rows behind, whose results are ignored. Rows are void by step
   and not by name, since a request of the same id may come, and run, before they are committed.
3. The blocks of such a request are fenced (`kv/manager.py`) until the last step that was in flight at its end is committed.

Planning ahead (`Ahead`) lets the next step be planned while one is in flight. Meanwhile the progress of the running requests
says what it will say when that step is committed, except for the tokens that it samples: they are counted, and not known. So
the planning itself has no second rule.

                                       num_computed_tokens   num_inflight   num_tokens   num_pending_samples
    committed, one row in flight               100                 1           101                0
    while the next step is planned             101                 0           102                1
    planned                                    100                 2           101                0
    the step in flight is committed            101                 1           102                0

A request that reaches its limit of tokens with the step in flight has nothing left to compute and gets no row. A request that
ends for another reason (a stop token, a stop string, an abort, a failure) has one, which is void.

Where more than the number of tokens counts, no step is planned ahead, and the step in flight is committed first:

    memory        the running requests may need more blocks than are free: one would be preempted, whose row is in flight
    classes       the order pauses a request for the first that waits, which lacks a row or memory (`joining.py`)
    beams         the tokens decide which requests go on
    speculation   the tokens decide how many of them a row got
    batches       a gate that is not continuous calls the next batch when the last request of one has ended, and pads

So no request is preempted in a step that is planned ahead. It may turn out while a step is planned that the order would pause a
request: the first that waited did fit and the next does not, or a chunk would fit where the whole prompt does not. Then the
next step is not planned ahead.

A tier below the pool is no reason to wait: its transfers use free blocks, which no row in flight has (`engine/transfers.py`).

A request that joins ahead finds in the prefix cache what was committed. For the part of its prompt that the step in flight
computes it waits, as for any prefill that is under way (`joining.py`).
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


class Ahead:
    """The assumption that the step in flight will be committed as it was planned."""

    def __init__(
        self, kv: KVManager, policies: Policies, running: Running, groups: Groups, *, is_possible: bool = True
    ) -> None:
        self._kv = kv
        self._order = policies.order
        self._running = running
        self._groups = groups
        self._is_possible = is_possible and policies.gate.may_plan_ahead
        self._assumed: list[tuple[Request, int]] = []
        """Requests with a row in flight, and the number of its tokens."""

    def begin(self) -> bool:
        """Assume it. False, and nothing is assumed, if the next step can't be planned ahead. O(running)."""
        if not self._is_possible or self._groups.by_id:
            return False
        self._assumed, ending = progress.assume(self._running)
        num_missing_blocks = self._num_missing_blocks()
        for request in ending:
            self._kv.look_again(request.request_id)  # so that `Extending` sees that it has nothing to compute
            self._order.left(request)  # no row of it will be served
        if num_missing_blocks > self._kv.pool.num_available:
            self.end()
            return False
        self._kv.prefix.in_flight = {request.request_id for request, num_tokens in self._assumed if num_tokens > 1}
        return True

    def _num_missing_blocks(self) -> int:
        """Blocks that the next rows of all running requests may take at most."""
        num_slots, num_blocks_for = self._kv.num_slots, self._kv.num_blocks_for
        num_missing = 0
        for request in self._running:
            num_missing_tokens = request.num_tokens - num_slots[request.request_id]
            if num_missing_tokens > 0 and request.num_behind:  # else it ends with the step in flight
                num_missing += num_blocks_for(num_missing_tokens)
        return num_missing

    def end(self) -> None:
        """The step was planned: the books say again what is committed, and what is in flight."""
        progress.unassume(self._assumed)
        self._assumed = []
        self._kv.prefix.in_flight = ()
