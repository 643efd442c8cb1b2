"""First come, first served. Called by the waiting queue; looks at nothing but the arrival."""

from __future__ import annotations

from penstock.sched.policies.base import Order, OrderKey
from penstock.types.request import Request


class FirstComeFirstServed(Order):
    """By arrival: nobody is overtaken."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)
