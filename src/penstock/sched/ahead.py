"""Plans the next step while one is in flight, as if the step in flight had been committed as planned.

A step that might preempt is never planned ahead.
"""

from __future__ import annotations

from penstock.kv.manager import KVManager
from penstock.sched import progress
from penstock.sched.choosing.groups import Groups
from penstock.sched.policies.base import Policies
from penstock.sched.running import Running
from penstock.types.request import Request


class Ahead:
    """Counts the tokens of the step in flight as computed, while the next step is planned."""

    def __init__(self, kv: KVManager, policies: Policies, running: Running, groups: Groups) -> None:
        self._kv = kv
        self._order = policies.order
        self._running = running
        self._groups = groups
        self._is_possible = policies.gate.may_plan_ahead
        self._assumed: list[tuple[Request, int]] = []
        """(request with a row in flight, its number of tokens)"""

    def begin(self) -> bool:
        """Count the tokens in flight as computed. Return False, with no token counted, if the next step can't be planned ahead.

        Calls `Order.left` for requests that are certain to end with the step in flight, also if blocks are lacking. With
        running beams, or if the gate forbids planning ahead, it does nothing. O(running).
        """
        if not self._is_possible or self._groups.running:
            return False
        self._assumed, ending = progress.assume(self._running)
        num_missing_blocks = self._num_missing_blocks()
        for request in ending:
            self._kv.require_extend(request.request_id)  # so that `Extending` sees that it has nothing to compute
            if not request.background:
                self._order.left(request)  # the request gets no more rows
        if num_missing_blocks > self._kv.pool.num_available:
            self.end()
            return False
        self._kv.prefix.in_flight = {request.request_id for request, num_tokens in self._assumed if num_tokens > 1}
        return True

    def _num_missing_blocks(self) -> int:
        """Return how many blocks the next step needs. Background requests do not count: without a block they get no row."""
        num_slots, num_blocks_for = self._kv.num_slots, self._kv.num_blocks_for
        num_missing = 0
        for request in self._running:
            num_missing_tokens = request.num_tokens - num_slots[request.request_id]
            # A request with nothing left to compute ends with the step in flight.
            if num_missing_tokens > 0 and request.num_behind and not request.background:
                num_missing += num_blocks_for(num_missing_tokens)
        return num_missing

    def end(self) -> None:
        progress.unassume(self._assumed)
        self._assumed = []
        self._kv.prefix.in_flight = ()
