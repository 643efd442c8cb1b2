"""The steps in flight: owns what the scheduler has to remember of each, from its plan to its commit. Called by the scheduler;
plans nothing.

    1. Steps are committed in the order in which they were planned.
    2. Who ends while rows of it are in flight leaves void rows behind: what they bring is ignored. They are void by step and
       not by name, since a request of the same id may come, and run, before they are committed.
    3. Its blocks are fenced (`kv/fence.py`) until the last step in flight at its end is committed.

Planning ahead: lets the next step be planned while one is in flight. Called by the scheduler around its own planning; plans
nothing, takes no block and preempts nobody.

The law: while a step is planned ahead, the books of those who run say what they will say when the step in flight is
committed, but for the tokens that it samples, which are counted and not known. So nothing that plans has a second rule.

                                       num_computed_tokens   num_inflight   num_tokens   num_pending_samples
    committed, one row in flight               100                 1           101                0
    while the next step is planned             101                 0           102                1
    planned                                    100                 2           101                0
    the step in flight is committed            101                 1           102                0

Who ends with the step in flight for certain, at its limit of tokens, has nothing left to compute and gets no row. Who ends for
another reason (a stop token, a stop string, an abort, a failure) has one, and it is void (`flights.py`).

Where more than the number of tokens counts, nothing is planned ahead, and the step in flight is committed first:

    memory     those who run may need more blocks than are free: somebody would be preempted, whose rows are in flight
    classes    the order pauses somebody for the first of those who wait, who lacks a row or memory (`joining.py`)
    beams      who goes on depends on the tokens
    batches    a gate other than the continuous one calls the next when the last of one has ended, and pads

So nobody is preempted in a step that is planned ahead. If it turns out while one is planned that the order would pause
somebody, since the first who waited did fit and the next does not, or a chunk would fit where the whole prompt does not, the
next is not planned before this step, too, is committed.

A tier below the pool is no reason to wait: what moves lies in blocks that are free, and so in no row in flight
(`engine/transfers.py`). A preemption that swaps is one as any other.

A request that joins ahead finds in the prefix cache what was committed. What the step in flight computes of the same prompt it
waits for, like for any prefill that is under way (`joining.py`).
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
