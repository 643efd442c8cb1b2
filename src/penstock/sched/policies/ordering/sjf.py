"""Shortest job first, by predicted output. Called by the waiting queue; never sees the true length."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.sched.policies.base import Order, OrderKey
from penstock.sched.policies.ordering.ageing import delay_ns
from penstock.types.request import Request


@dataclass(frozen=True, slots=True)
class ShortestJobFirst(Order):
    """Fewest predicted new tokens first; where nothing is predicted, `assumed_tokens` or the request's own limit if it is less.

    A request is overtaken by nobody who comes `max_delay_ns` after it or later.
    """

    max_delay_ns: int = 300_000_000_000
    half_size_tokens: int = 256
    assumed_tokens: int = 256

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        num_tokens = request.predicted_new_tokens
        if num_tokens is None:
            num_tokens = min(self.assumed_tokens, request.sampling.max_tokens)
        return (request.arrival_ns + delay_ns(num_tokens, self.half_size_tokens, self.max_delay_ns),)
