"""Grammars of running requests: masks for the executor, and the tokens that it sampled. Used by the core and the stepper."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.clock import Clock
from penstock.engine.mask_turns import MaskTurns
from penstock.types.errors import GrammarFailure, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.plan import StepPlan
from penstock.types.request import Request
from penstock.types.sampling import Matcher

_logger = logging.getLogger(__name__)

BROKEN = "the server could not compute which tokens the grammar allows; its log has the cause"
BEHIND = " in the background"
"""Appended to the tenant of background requests: the time for their masks is not charged to its other requests."""


class Matchers:
    """The grammar matchers of requests: they make masks of allowed tokens, and follow the sampled ones."""

    def __init__(self) -> None:
        self._matchers: dict[str, Matcher] = {}
        self._new: dict[str, str] = {}
        """Request id -> tenant, for requests that have not sampled yet."""
        self._put_off: dict[str, Sequence[int]] = {}
        """Request id -> tokens that its matcher gets once the request no longer sits out."""
        self._failed: dict[str, tuple[str, str]] = {}
        self.turns = MaskTurns()

    def __bool__(self) -> bool:
        """True while requests follow a grammar, or the time for the last step's masks is not charged to tenants."""
        return bool(self._matchers or self.turns.made)

    def add(self, request: Request) -> None:
        assert (request.matcher is not None) == request.sampling.follows_grammar, "what a grammar allows has to be known"
        if request.matcher is not None:
            self._matchers[request.request_id] = request.matcher
            self._new[request.request_id] = request.tenant + BEHIND * request.background

    def remove(self, request: Request) -> None:
        if self._matchers.pop(request.request_id, None) is not None:
            self._new.pop(request.request_id, None)
            self._put_off.pop(request.request_id, None)
            self._failed.pop(request.request_id, None)
            self.turns.leave(request.request_id)

    def is_in(self, plan: StepPlan) -> bool:
        return bool(self._matchers) and any(row.samples and row.request_id in self._matchers for row in plan.rows)

    def masks(self, plan: StepPlan, clock: Clock) -> dict[str, bytes]:
        """Return request id -> mask of allowed tokens, for sampling requests with a grammar. All steps before must be
        finished."""
        masks = dict[str, bytes]()
        self.turns.forgive([row.request_id for row in plan.rows])
        began_ns = clock.busy_ns()
        for row in plan.rows:
            name = row.request_id
            if row.samples and name in self._matchers and name not in self._failed:
                if name in self._put_off:
                    self._accept(name, self._put_off.pop(name), lambda _: 0)
                self._make_mask(name, plan.guesses.get(name, ()), masks)
                ended_ns = clock.busy_ns()
                if name in self._new:
                    self.turns.join(name, self._new.pop(name))
                else:
                    self.turns.note(name, ended_ns - began_ns, is_mask=True)
                began_ns = ended_ns
        return masks

    def follow(
        self,
        events: list[TokenEvent],
        max_forced: Callable[[str], int],
        force: Callable[[TokenEvent, Sequence[int]], TokenEvent],
        clock: Clock,
    ) -> None:
        """Give sampled tokens to the matchers. A new request that sits out the next step gets its tokens later.

        `force` appends tokens that the grammar forces. It returns the event that replaces the sampled one.
        """
        began_ns = clock.busy_ns()
        for idx, event in enumerate(events):
            request_id = event.request_id
            if event.finish_reason is not None or request_id not in self._matchers:
                continue
            if self.turns.is_put_off(request_id):
                self._put_off[request_id] = event.token_ids
                continue
            if forced := self._accept(request_id, event.token_ids, max_forced):
                events[idx] = force(event, forced)
            ended_ns = clock.busy_ns()
            self.turns.note(request_id, ended_ns - began_ns, is_mask=False)
            began_ns = ended_ns

    def take_failed(self) -> list[tuple[str, str, str]]:
        """Return, once each, the failed matchers: (request id, cause in words, cause as a `RejectReason` or "")."""
        failed = [(request_id, *causes) for request_id, causes in self._failed.items()]
        self._failed.clear()
        return failed

    def _accept(self, request_id: str, token_ids: Sequence[int], max_forced: Callable[[str], int]) -> list[int]:
        """Give tokens to a request's matcher. Return the forced tokens that follow, which the matcher has accepted too."""
        matcher, forced = self._matchers[request_id], list[int]()
        try:
            matcher.accept(token_ids)
            if next_ids := matcher.forced():
                most = max_forced(request_id)
                while next_ids and len(forced) < most:
                    for token_id in next_ids[: most - len(forced)]:
                        forced.append(token_id)
                        matcher.accept((token_id,))
                    next_ids = matcher.forced()
        except BaseException as error:
            self._fail(request_id, error)
        return forced

    def _make_mask(self, request_id: str, guesses: Sequence[int], masks: dict[str, bytes]) -> None:
        try:
            if request_id not in self._failed and (mask := _mask_of(self._matchers[request_id], guesses)) is not None:
                masks[request_id] = mask
        except BaseException as error:
            self._fail(request_id, error)

    def _fail(self, request_id: str, error: BaseException) -> None:
        """Record a matcher's failure, which ends its request. A panic in Rust is not an `Exception`."""
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        if isinstance(error, GrammarFailure):
            self._failed[request_id] = str(error), RejectReason.INVALID.value
        else:
            _logger.error("request %s: %s", request_id, BROKEN, exc_info=error)
            self._failed[request_id] = BROKEN, ""


def _mask_of(matcher: Matcher, guesses: Sequence[int]) -> bytes | None:
    """Return the mask of a matcher, followed by those after each guess. None: any token is allowed everywhere."""
    masks = [matcher.mask()]
    if guesses:
        trying = matcher.copy()
        with suppress(GrammarFailure):  # the guesses after the failure do not count
            for token_id in guesses:
                mask = masks[-1]
                if mask is not None and not mask[token_id // 8] >> token_id % 8 & 1:
                    break  # it can't be sampled; the matcher would take it for a failure of the grammar
                trying.accept((token_id,))
                masks.append(trying.mask())
        masks += masks[-1:] * (len(guesses) + 1 - len(masks))
        size = max([0 if mask is None else len(mask) for mask in masks])
        if size:
            return b"".join([b"\xff" * size if mask is None else mask for mask in masks])
    return masks[0]
