"""Gates: when may a batch start, or grow? Called by the scheduler at the beginning of each step."""

from __future__ import annotations

from penstock.sched.policies.base import GateDecision, GateView


class Continuous:
    """Requests join whenever a row is free (Orca, OSDI 2022)."""

    def decide(self, view: GateView) -> GateDecision:
        return GateDecision(max_admissions=view.max_rows - view.num_running)


GATES = {"continuous": "penstock.sched.policies.gates:Continuous"}
