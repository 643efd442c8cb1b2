"""Priority classes. Called by the waiting queue, and by the scheduler when somebody who waits may pause others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.sched.policies.base import Order, OrderKey
from penstock.types.request import Request


@dataclass(frozen=True, slots=True)
class PriorityClasses(Order):
    """The lowest number first (as in vLLM), by arrival within a class.

    Each step down counts as having come `class_delay_ns` later, so a request of class p is overtaken by one of class
    q < p only if that comes less than (p - q) * `class_delay_ns` after it. Numbers beyond +-`max_class` count as
    that, which bounds the wait for all.
    """

    reads_priority: ClassVar[bool] = True
    class_delay_ns: int = 60_000_000_000
    max_class: int = 20
    is_preemptive: bool = True
    """Whoever waits pauses requests of lower classes that it may overtake, if it lacks a row or memory."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        rank = max(-self.max_class, min(request.priority, self.max_class))
        return (request.arrival_ns + rank * self.class_delay_ns,)

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """A higher class does not wait for a lower one to be resumed or computed, unless that has aged past it."""
        return request.priority < other.priority and self.key(request, now_ns) < self.key(other, now_ns)

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return self.is_preemptive and self.outranks(waiting, running, now_ns)
