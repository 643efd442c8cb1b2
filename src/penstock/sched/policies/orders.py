"""Orders: which waiting request is next. Equal keys are served in order of arrival. See docs/orders.md.

Every order ages, so no request starves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.sched.policies.base import Order, OrderKey, StepRecord
from penstock.types.plan import RowPlan
from penstock.types.request import Request

_SMOOTHING = 8
"""A step counts for one part in this many in the running means."""


class FirstComeFirstServed(Order):
    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns,)


def delay_ns(size_tokens: int, half_size_tokens: int, max_delay_ns: int) -> int:
    """Return a delay in [0, max_delay_ns) that grows with the size; `half_size_tokens` gives half of `max_delay_ns`.

    A large request counts as if it had come later by this much, so keys need not grow.
    """
    return max_delay_ns * size_tokens // (size_tokens + half_size_tokens)


@dataclass(frozen=True, slots=True)
class ShortestJobFirst(Order):
    """Fewest predicted output tokens first. A request that comes `max_delay_ns` later does not overtake."""

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
    """Fewest tokens (prompt and any output) first. A request that comes `max_delay_ns` later does not overtake."""

    max_delay_ns: int = 60_000_000_000
    half_size_tokens: int = 1024

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        return (request.arrival_ns + delay_ns(request.num_tokens, self.half_size_tokens, self.max_delay_ns),)


@dataclass(frozen=True, slots=True)
class PriorityClasses(Order):
    """The lowest priority number first (as in vLLM), by arrival within a class.

    A request of class q < p overtakes one of class p only if it comes less than (p - q) * `class_delay_ns` after it. Classes
    beyond +-`max_class` are clipped.
    """

    reads_priority: ClassVar[bool] = True
    has_ranks: ClassVar[bool] = True
    suits: ClassVar[Mapping[str, str]] = {"victim": "lowest-priority", "eviction": "priority"}
    class_delay_ns: int = 60_000_000_000
    max_class: int = 20
    is_preemptive: bool = True

    def key(self, request: Request, now_ns: int) -> OrderKey:
        del now_ns
        rank = max(-self.max_class, min(request.priority, self.max_class))
        return (request.arrival_ns + rank * self.class_delay_ns,)

    def outranks(self, request: Request, other: Request, now_ns: int) -> bool:
        return request.priority < other.priority and self.key(request, now_ns) < self.key(other, now_ns)

    def pauses(self, waiting: Request, running: Request, now_ns: int) -> bool:
        return self.outranks(waiting, running, now_ns)


class EarliestDeadlineFirst(Order):
    """The earliest deadline first. A request without a deadline, or with a later one, counts as due `max_slack_ns` after its
    arrival.

    A request that would miss its deadline even if it ran at once goes after all that can meet theirs. This is judged whenever
    it is the next one. A deadline that is lost stays lost.
    """

    def __init__(self, *, max_slack_ns: int = 60_000_000_000) -> None:
        self._max_slack_ns = max_slack_ns
        self._step_ns = 0
        self._decode_step_ns = 0
        self._num_rows = 0
        """Rows of the last step, prompts included; 0 without decodes."""
        self._num_gained = 0
        """Tokens beyond one per row in the last step."""
        self._milli_tokens = 1000
        """Mean tokens that a row gets in a step, in thousandths; more than 1000 with guesses and forced tokens."""
        self._prompt_ns = 0
        """Mean extra time of a step with prompts."""
        self._prompt_tokens = 0
        self._verdicts: dict[str, bool | None] = {}
        """Waiting request -> whether its deadline is lost; None: not judged yet."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        due_ns, deadline_ns = request.arrival_ns + self._max_slack_ns, request.deadline_ns
        if deadline_ns is None:
            return (0, due_ns)
        prompt_ns = self._prompt_ns * request.num_prompt_tokens // max(1, self._prompt_tokens)
        answer_ns = 1000 * self._step_ns * (request.predicted_new_tokens or 1) // self._milli_tokens
        end_ns = now_ns + prompt_ns + answer_ns
        is_lost = self._judge(request.request_id, looks_lost=end_ns > deadline_ns)
        return (int(is_lost), min(due_ns, deadline_ns))

    def _judge(self, request_id: str, *, looks_lost: bool) -> bool:
        """Return whether the request's deadline is lost. It then stays lost, since keys may not shrink. The first call does not
        judge."""
        if request_id not in self._verdicts:
            return looks_lost  # preempted: its key is read only once
        verdict = self._verdicts[request_id]
        self._verdicts[request_id] = verdict is not None and (verdict or looks_lost)
        return bool(self._verdicts[request_id])

    def queued(self, request: Request) -> None:
        if request.deadline_ns is not None:
            self._verdicts[request.request_id] = None

    def unqueued(self, request: Request) -> None:
        self._verdicts.pop(request.request_id, None)

    def served(
        self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None, num_decodes: int = 0
    ) -> None:
        del requests
        if self._num_rows:
            value = 1000 + 1000 * self._num_gained // self._num_rows
            self._milli_tokens = _smoothed(self._milli_tokens, value)
        self._num_rows, self._num_gained = len(rows) if num_decodes else 0, 0
        if last_step is not None:
            duration_ns = last_step.duration_ns + last_step.waited_ns
            self._step_ns = _smoothed(self._step_ns, duration_ns)
            if last_step.num_prefill_tokens:
                self._prompt_ns = _smoothed(self._prompt_ns, max(0, duration_ns - self._decode_step_ns))
                self._prompt_tokens = _smoothed(self._prompt_tokens, last_step.num_prefill_tokens)
            else:
                self._decode_step_ns = _smoothed(self._decode_step_ns, duration_ns)

    def gained(self, request: Request, num_tokens: int) -> None:
        del request
        self._num_gained += num_tokens


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
