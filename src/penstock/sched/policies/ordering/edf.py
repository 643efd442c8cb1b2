"""Earliest deadline first. Called by the waiting queue; ends nobody, since the core does that to what is past its deadline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.sched.policies.base import Order, OrderKey, StepRecord
from penstock.types.plan import RowPlan
from penstock.types.request import Request

_SMOOTHING = 8
"""A step's duration counts one part in so many."""


class EarliestDeadlineFirst(Order):
    """By deadline. Without one, or with one further off, a request counts as due `max_slack_ns` after its arrival.

    A request is overtaken by nobody who comes `max_slack_ns` after it or later. The exception: one that will miss its
    deadline even if it runs at once, by its predicted output and the duration of recent steps, goes after all who
    can still make theirs. Without that, an overloaded server works on what is lost anyway, and misses the next
    deadline by it. It ends at its deadline at the latest, so it does not starve either.
    """

    def __init__(self, *, max_slack_ns: int = 60_000_000_000) -> None:
        self._max_slack_ns = max_slack_ns
        self._step_ns = 0
        """What a step takes, smoothed."""

    def key(self, request: Request, now_ns: int) -> OrderKey:
        due_ns, deadline_ns = request.arrival_ns + self._max_slack_ns, request.deadline_ns
        if deadline_ns is None:
            return (0, due_ns)
        is_lost = now_ns + self._step_ns * (request.predicted_new_tokens or 1) > deadline_ns
        return (int(is_lost), min(due_ns, deadline_ns))

    def served(self, rows: Sequence[RowPlan], requests: Mapping[str, Request], last_step: StepRecord | None) -> None:
        del rows, requests
        if last_step is not None:
            duration_ns = last_step.duration_ns
            self._step_ns += (duration_ns - self._step_ns) // _SMOOTHING if self._step_ns else duration_ns
