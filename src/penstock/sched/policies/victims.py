"""Victims: whom to preempt when a running request needs a block and none is free? Called by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.sched.policies.base import Eviction, PreemptMethod
from penstock.types.request import Request


class LatestArrived:
    """The one that came last; among equals the one admitted last. So the oldest request always gets ahead."""

    def choose(self, running: Sequence[Request]) -> Eviction:
        latest = max(enumerate(running), key=lambda entry: (entry[1].arrival_ns, entry[0]))[1]
        return Eviction(latest, PreemptMethod.RECOMPUTE)


VICTIMS = {"latest": "penstock.sched.policies.victims:LatestArrived"}
