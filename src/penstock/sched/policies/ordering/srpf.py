"""Shortest remaining prefill first. Called by the waiting queue; does not ask the prefix cache, whose content changes."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sched.policies.base import Order, OrderKey
from penstock.sched.policies.ordering.ageing import delay_ns
from penstock.types.request import Request


@dataclass(frozen=True, slots=True)
class ShortestPrefillFirst(Order):
    """Fewest tokens to compute before the next token first: the prompt and, after a preemption, what was generated.

    A request is overtaken by nobody who comes `max_delay_ns` after it or later.
    """

    max_delay_ns: int = 60_000_000_000
    half_size_tokens: int = 1024

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns + delay_ns(request.num_tokens, self.half_size_tokens, self.max_delay_ns),)
