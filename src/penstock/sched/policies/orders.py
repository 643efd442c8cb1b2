"""Orders: which request is next in the waiting queue? Called by the waiting queue, and by the scheduler where an order ranks.

Requests of equal keys are served as they came. Every order ages, so that no request starves: each says by how much a request
that came later may overtake. docs/orders.md explains them. Fair shares between tenants and between calls have files
of their own (`fair`, `calls`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.sched.policies.base import Order, OrderKey, StepRecord
from penstock.types.plan import RowPlan
from penstock.types.request import Request

_SMOOTHING = 8
"""A step's duration counts one part in so many."""


class FirstComeFirstServed(Order):
    """By arrival: no request is overtaken."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)


def delay_ns(size_tokens: int, half_size_tokens: int, max_delay_ns: int) -> int:
    """Ageing for orders that prefer small requests: a size becomes a delay in [0, max_delay_ns), growing with the size.

    Half of the range lies below `half_size_tokens`. A larger request is treated as if it had come later, by less than
    `max_delay_ns`. All waiting requests age at the same rate, so the key needs no growth, and none is overtaken by a request
    that comes `max_delay_ns` after it.
    """
    return max_delay_ns * size_tokens // (size_tokens + half_size_tokens)


@dataclass(frozen=True, slots=True)
class ShortestJobFirst(Order):
    """Fewest predicted new tokens first; where nothing is predicted, `assumed_tokens` or the request's own limit if it is less.

    A request is overtaken by none that comes `max_delay_ns` after it or later.
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


@dataclass(frozen=True, slots=True)
class ShortestPrefillFirst(Order):
    """Fewest tokens to compute before the next token first: the prompt and, after a preemption, what was generated.

    A request is overtaken by none that comes `max_delay_ns` after it or later.
    """

    max_delay_ns: int = 60_000_000_000
    half_size_tokens: int = 1024

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns + delay_ns(request.num_tokens, self.half_size_tokens, self.max_delay_ns),)


@dataclass(frozen=True, slots=True)
class PriorityClasses(Order):
    """The lowest number first (as in vLLM), by arrival within a class.

    Each step down counts as having come `class_delay_ns` later, so a request of class p is overtaken by one of class
    q < p only if that comes less than (p - q) * `class_delay_ns` after it. Numbers beyond +-`max_class` count as
    that, which bounds the wait for all.
    """

    reads_priority: ClassVar[bool] = True
    has_ranks: ClassVar[bool] = True
    suits: ClassVar[Mapping[str, str]] = {"victim": "lowest-priority", "eviction": "priority"}
    class_delay_ns: int = 60_000_000_000
    max_class: int = 20
    is_preemptive: bool = True
    """A waiting request pauses requests of lower classes that it may overtake, if it lacks a row or memory."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        rank = max(-self.max_class, min(request.priority, self.max_class))
        return (request.arrival_ns + rank * self.class_delay_ns,)

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        """A higher class does not wait for a lower one to be resumed or computed, unless that has aged past it."""
        return request.priority < other.priority and self.key(request, now_ns) < self.key(other, now_ns)

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return self.is_preemptive and self.outranks(waiting, running, now_ns)


class EarliestDeadlineFirst(Order):
    """By deadline. Without one, or with one further off, a request counts as due `max_slack_ns` after its arrival.

    A request is overtaken by none that comes `max_slack_ns` after it or later. The exception: one that will miss its deadline
    even if it runs at once, by its prompt, its predicted output and the durations of recent steps, goes after all that can make
    theirs. Without that, an overloaded server works on requests that are lost anyway, and misses the next deadline by it.
    It ends at its deadline at the latest, so it does not starve either. Whether it will miss it is judged when it is its turn,
    and not again while it waits.
    """

    def __init__(self, *, max_slack_ns: int = 60_000_000_000) -> None:
        self._max_slack_ns = max_slack_ns
        self._step_ns = 0
        """Duration of a step, smoothed, as all below."""
        self._decode_step_ns = 0
        """Duration of a step without prompts."""
        self._prompt_ns = 0
        """Time by which steps with prompts take longer."""
        self._prompt_tokens = 0
        """Prompt tokens in such steps."""
        self._verdicts: dict[str, bool | None] = {}
        """Request id -> is its deadline lost? Waiting requests alone; None: the queue has not asked for a place yet."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        due_ns, deadline_ns = request.arrival_ns + self._max_slack_ns, request.deadline_ns
        if deadline_ns is None:
            return (0, due_ns)
        prompt_ns = self._prompt_ns * request.num_prompt_tokens // max(1, self._prompt_tokens)
        end_ns = now_ns + prompt_ns + self._step_ns * (request.predicted_new_tokens or 1)
        is_lost = self._judge(request.request_id, looks_lost=end_ns > deadline_ns)
        return (int(is_lost), min(due_ns, deadline_ns))

    def _judge(self, request_id: str, *, looks_lost: bool) -> bool:
        """Steps get faster again, but keys may not shrink: a request that was judged lost stays so. So none is when it comes,
        as it is asked again before it is served, and one slow step may be long past by then.
        """
        if request_id not in self._verdicts:
            return looks_lost  # preempted: its key is taken once
        verdict = self._verdicts[request_id]
        self._verdicts[request_id] = verdict is not None and (verdict or looks_lost)
        return bool(self._verdicts[request_id])

    def queued(self, request: Request) -> None:
        if request.deadline_ns is not None:
            self._verdicts[request.request_id] = None

    def unqueued(self, request: Request) -> None:
        self._verdicts.pop(request.request_id, None)

    def served(
        self,
        rows: Sequence[RowPlan],
        requests: Mapping[str, Request],
        last_step: StepRecord | None,
        num_decodes: int = 0,
    ) -> None:
        del rows, requests, num_decodes
        if last_step is not None:
            duration_ns = last_step.duration_ns + last_step.waited_ns
            self._step_ns = _smoothed(self._step_ns, duration_ns)
            if last_step.num_prefill_tokens:
                self._prompt_ns = _smoothed(self._prompt_ns, max(0, duration_ns - self._decode_step_ns))
                self._prompt_tokens = _smoothed(self._prompt_tokens, last_step.num_prefill_tokens)
            else:
                self._decode_step_ns = _smoothed(self._decode_step_ns, duration_ns)


def _smoothed(mean: int, value: int) -> int:
    return mean + (value - mean) // _SMOOTHING if mean else value


ORDERS = {
    "fcfs": "penstock.sched.policies.orders:FirstComeFirstServed",
    "sjf": "penstock.sched.policies.orders:ShortestJobFirst",
    "srpf": "penstock.sched.policies.orders:ShortestPrefillFirst",
    "edf": "penstock.sched.policies.orders:EarliestDeadlineFirst",
    "priority": "penstock.sched.policies.orders:PriorityClasses",
    "fair": "penstock.sched.policies.fair:FairShares",
    "calls": "penstock.sched.policies.calls:FairCalls",
}
