"""Gates: when may a batch start, or grow? Called by the scheduler at the beginning of each step."""

from __future__ import annotations

from penstock.sched.policies.base import GateDecision, GateView
from penstock.types.plan import Capacity
from penstock.types.request import Request


class Continuous:
    """Requests join whenever a row is free (Orca, OSDI 2022)."""

    def max_running(self, capacity: Capacity) -> int:
        return min(capacity.max_rows, capacity.max_step_tokens)

    def bucket_of(self, request: Request) -> int:
        del request
        return 0

    def decide(self, view: GateView) -> GateDecision:
        return GateDecision(max_admissions=view.max_rows - view.num_running)


GATES = {"continuous": "penstock.sched.policies.gates:Continuous"}
