"""The answers that follow a grammar: owns the matcher of each request that has one and has not ended. Called by the core; never
ends a request, and makes no mask itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.types.errors import GrammarFailure
from penstock.types.events import TokenEvent
from penstock.types.matcher import Follow, Matcher
from penstock.types.plan import StepPlan
from penstock.types.request import Request


class Following:
    """Matchers by request id."""

    def __init__(self, follow: Follow | None) -> None:
        """`follow` lets many go on at once; None: one after the other."""
        self._follow: Follow = follow or _follow_each
        self._matchers: dict[str, Matcher] = {}

    def __bool__(self) -> bool:
        return bool(self._matchers)

    def add(self, request: Request) -> None:
        assert (request.matcher is not None) == request.sampling.follows_grammar, "what a grammar allows has to be known"
        if request.matcher is not None:
            self._matchers[request.request_id] = request.matcher

    def remove(self, request: Request) -> None:
        """It has ended."""
        self._matchers.pop(request.request_id, None)

    def is_in(self, plan: StepPlan) -> bool:
        """Whether one of them samples in a step."""
        return bool(self._matchers) and any(row.samples and row.request_id in self._matchers for row in plan.rows)

    def masks(self, plan: StepPlan) -> dict[str, bytes]:
        """Of those that sample in a step and have not ended."""
        matchers = self._matchers
        names = [row.request_id for row in plan.rows if row.samples and row.request_id in matchers]
        return {name: matchers[name].mask() for name in names}

    def go_on(self, events: Iterable[TokenEvent]) -> list[tuple[str, GrammarFailure]]:
        """With what was sampled. Returns the requests whose grammar can't be followed any further."""
        going = [event for event in events if event.request_id in self._matchers]
        if not going:
            return []
        failures = self._follow([(self._matchers[event.request_id], event.token_ids) for event in going])
        found = zip(going, failures, strict=True)
        return [(event.request_id, failure) for event, failure in found if failure is not None]


def _follow_each(moves: Sequence[tuple[Matcher, Sequence[int]]]) -> list[GrammarFailure | None]:
    return [_failure_of(matcher, token_ids) for matcher, token_ids in moves]


def _failure_of(matcher: Matcher, token_ids: Sequence[int]) -> GrammarFailure | None:
    try:
        matcher.accept(token_ids)
        matcher.mask()
    except GrammarFailure as failure:
        return failure
    return None
