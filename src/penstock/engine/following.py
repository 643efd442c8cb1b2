"""The answers that follow a grammar: owns the matcher of each request that has one and has not ended. Called by the core; never
ends a request itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from penstock.types.errors import GrammarFailure, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.matcher import Matcher
from penstock.types.plan import StepPlan
from penstock.types.request import Request

_logger = logging.getLogger(__name__)

BROKEN = "what the grammar of this answer allows could not be found out; the server's log says why"


class Following:
    """Matchers by request id."""

    def __init__(self) -> None:
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

    def go_on(self, events: Iterable[TokenEvent]) -> list[tuple[str, str, str]]:
        """With what was sampled, to the next mask. Returns the requests whose grammar can't be followed any further, with the
        cause in words, and as a `RejectReason` value if the grammar itself is it.
        """
        failed: list[tuple[str, str, str]] = []
        for event in events:
            matcher = self._matchers.get(event.request_id)
            if matcher is None:
                continue
            try:
                matcher.accept(event.token_ids)
                matcher.mask()
            except GrammarFailure as failure:
                failed.append((event.request_id, str(failure), RejectReason.INVALID.value))
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException:  # a matcher is of one request alone; a panic of a library in Rust is no Exception
                _logger.exception("request %s: %s", event.request_id, BROKEN)
                failed.append((event.request_id, BROKEN, ""))
        return failed
