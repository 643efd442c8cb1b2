"""Orders: who is next among the waiting? Called by the waiting queue. Requests of equal keys are served as they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.sched.policies.base import OrderKey
from penstock.types.plan import RowPlan
from penstock.types.request import Request


class FirstComeFirstServed:
    """By arrival."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)

    def served(self, rows: Sequence[RowPlan], requests: Mapping[str, Request]) -> None:
        del rows, requests


ORDERS = {"fcfs": "penstock.sched.policies.orders:FirstComeFirstServed"}
