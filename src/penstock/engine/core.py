"""The engine core: owns every request from its `Add` command to its finish event. Called by the stepper; never loops or waits.

Every added request ends in exactly one event with a `finish_reason`. Its blocks are freed then, or once no step in flight
computes it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial

from penstock.clock import Clock, StoppedClock
from penstock.engine.matchers import Matchers
from penstock.engine.ports import NullObserver, Observer, OutputChunk, RequestJournal
from penstock.sched import progress
from penstock.sched.progress import StepOutcome
from penstock.sched.queue import KeyedHeap
from penstock.sched.scheduler import Scheduler
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import Abort, Add, Command, Drain, Stop, TokenEvent
from penstock.types.plan import StepPlan
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.result import StepResult
from penstock.types.stats import EngineLoad, RequestStats, StepStats, WaitReason

_logger = logging.getLogger(__name__)

DEADLINE_EXCEEDED = "deadline exceeded"
LATE_DETAILS = {
    RejectReason.DEADLINE: DEADLINE_EXCEEDED,
    RejectReason.QUEUE_TIMEOUT: "it waited too long for its turn",
    RejectReason.FIRST_TOKEN_TIMEOUT: "its first token took too long",
}
_STOPPED = StoppedClock()

Read = Callable[[TokenEvent], OutputChunk | None]


class EngineCore:
    def __init__(
        self, scheduler: Scheduler, *, observer: Observer | None = None, journal: RequestJournal | None = None
    ) -> None:
        self.scheduler = scheduler
        self._observer = observer or NullObserver()
        self._journal: RequestJournal = journal or NullObserver()
        if journal is None:
            scheduler.skip_prefix_stops()
        self._requests: dict[str, Request] = {}
        """Requests that have not ended, by id."""
        self.matchers = Matchers()
        self._deadlines: KeyedHeap[Request] = KeyedHeap()
        """Requests with deadlines, by the earliest time at which one may have passed."""
        self._deadline_numbers: dict[str, int] = {}
        self._closed: Rejected | None = None
        """Why new requests are rejected, or None."""
        self._reported_wait = WaitReason.NOTHING
        self._last_finish_ns = 0
        self._last_step_ns = 0
        self._last_num_rows = 1
        self._served_ns = EngineLoad().served_ns
        self.grammar_ns = 0
        """Time that grammars took in the last `finish`."""
        self.snapshot = self._take_snapshot()
        """Replaced in every turn. All that other threads may read without the core lock."""

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    @property
    def num_running(self) -> int:
        return self.scheduler.num_running

    @property
    def num_waiting(self) -> int:
        return self.scheduler.num_waiting

    def apply(self, commands: Iterable[Command], now_ns: int) -> list[TokenEvent]:
        """Apply commands, then end requests with a failed grammar, a missed deadline or an adapter that can't be loaded.

        Returns the finish events. Raises ValueError for an `Add` whose request id belongs to a request that has not ended.
        """
        events: list[TokenEvent] = []
        for command in commands:
            match command:
                case Add(request):
                    events += self._add(request, now_ns)
                case Abort(request_id, detail):
                    events += self._end(request_id, FinishReason.ABORT, now_ns, detail=detail)
                case Stop(request_id, stop_reason, finish_reason):
                    events += self._end(request_id, finish_reason, now_ns, stop_reason=stop_reason)
                case Drain():
                    detail = "The model is being unloaded, or the server is shutting down."
                    self._closed = Rejected(RejectReason.DRAINING, detail)
        for request_id, detail, because in self.matchers.take_failed():
            events += self._end(request_id, FinishReason.ERROR, now_ns, detail=detail, reject_reason=because)
        if self._deadline_numbers:
            events += self._end_overdue(now_ns)
        for request, rejected in self.scheduler.refused(now_ns):
            reason = FinishReason.REJECTED if request.first_token_ns is None else FinishReason.ERROR
            because = str(rejected.reason)
            events += self._end(request.request_id, reason, now_ns, detail=rejected.detail, reject_reason=because)
        if commands or events:
            self.snapshot = self._take_snapshot()
        return events

    def begin(self, now_ns: int) -> StepPlan | None:
        """Return the plan of the next step. Return None if there is nothing to compute, or a step in flight must be finished
        first."""
        turns = self.matchers.turns
        plan = self.scheduler.schedule(now_ns, (turns.sitting_out, turns.sitting_out_alone, ()))
        news = self.scheduler.news
        if news.admissions or news.preemptions or news.set_aside or news.waits_for is not self._reported_wait:
            self._reported_wait = news.waits_for
            self._journal.on_news(news)
        if (failure := self.scheduler.take_guesser_failure()) is not None:
            _logger.error("answers go on without guesses, since the guesser failed", exc_info=failure)
        self.snapshot = self._take_snapshot()
        return plan

    def finish(
        self, plan: StepPlan, result: StepResult, now_ns: int, clock: Clock = _STOPPED, read: Read | None = None
    ) -> list[TokenEvent]:
        """Take over the result of a step. Return one event for each row that sampled or failed, in the order of the plan.

        `clock` measures how long grammars take. `read` makes the text of events that end an answer or have several tokens, so
        that tokens after a stop string do not count.
        """
        if result.step_id != plan.step_id:
            raise ValueError(f"the result of step {result.step_id} is not that of step {plan.step_id}")
        if self.snapshot.num_running:
            self._served_ns = now_ns
        outcome = self.scheduler.commit(plan, result, now_ns)
        self.grammar_ns = self._follow(outcome, clock) if self.matchers else 0
        if read is not None and (outcome.ended or outcome.counts.guesses or outcome.counts.forced):
            self._read(outcome, read)
        if outcome.ended:  # otherwise the next `begin` updates it soon enough
            self.snapshot = self._take_snapshot()
        stats = self._step_stats(plan, result, outcome, now_ns)
        self._last_finish_ns = now_ns
        self._last_step_ns = now_ns - stats.started_ns - stats.waited_ns
        self._last_num_rows = len(plan.rows)
        self._journal.on_step(stats)
        for request in outcome.ended:
            self._forget(request, now_ns)
        self._observer.on_step(stats)
        return outcome.events

    def _read(self, outcome: StepOutcome, read: Read) -> None:
        """Read the text of events that end an answer or have several tokens. If it ends the request, end that here, before
        tokens are counted."""
        for idx, event in enumerate(outcome.events):
            if len(event.token_ids) < (2 if event.finish_reason is None else 1):  # nearly all events
                continue
            chunk = read(event)
            if chunk is None or chunk.finish_reason is None:
                continue
            request, reason, stop_reason = self._requests[event.request_id], chunk.finish_reason, chunk.stop_reason
            num_cut = min(len(event.token_ids), len(request.output_token_ids) - chunk.num_generated_tokens)
            self.scheduler.end_by_text(request, reason, stop_reason, num_cut, outcome)
            outcome.events[idx] = replace(event, finish_reason=reason, stop_reason=stop_reason)

    def _follow(self, outcome: StepOutcome, clock: Clock) -> int:
        """Give sampled tokens to the grammars, and append tokens that they force. Return the nanoseconds it took."""
        scheduler, matchers = self.scheduler, self.matchers
        began_ns = clock.now_ns()
        matchers.follow(outcome.events, scheduler.max_forced, partial(scheduler.force, outcome=outcome), clock)
        return clock.now_ns() - began_ns

    def settle_grammars(self, *, is_beside: bool) -> None:
        """Choose requests with slow grammar masks to sit out the next step. Call this after each `finish`. `is_beside`: a step
        is in flight."""
        now_ns, running = self._last_finish_ns, self.scheduler.running
        self.matchers.turns.settle(now_ns, self._last_step_ns, self._last_num_rows, running, is_beside=is_beside)

    def next_wakeup_ns(self, now_ns: int) -> int | None:
        """Return when to call `apply` and `begin` again if nothing else happens, or None."""
        deadline = self._deadlines.peek()
        times = [] if deadline is None else [deadline[0][0]]
        if (wakeup_ns := self.scheduler.wakeup_ns(now_ns)) is not None:
            times.append(wakeup_ns)
        tier = self.scheduler.kv.tier
        if tier is not None and (timeout_ns := tier.next_timeout_ns(now_ns)) is not None:
            times.append(timeout_ns)
        return min(times, default=None)

    def fail_all(self, detail: str, now_ns: int) -> list[TokenEvent]:
        """End every request with ERROR and accept no more: the executor failed, and its KV can't be trusted."""
        self._closed = Rejected(RejectReason.UNAVAILABLE, "The engine has failed.")
        with suppress(Exception):  # as below
            self.scheduler.abandon_flights()
        events: list[TokenEvent] = []
        for request in list(self._requests.values()):
            with suppress(Exception):  # the scheduler's state may be broken, but every request must get its event
                if request.status is not RequestStatus.FINISHED:  # in a commit that was not completed
                    self.scheduler.end(request, FinishReason.ERROR)
            progress.end(request, FinishReason.ERROR)
            self._forget(request, now_ns)
            events.append(_last_event(request, now_ns, detail))
        with suppress(Exception):
            self.snapshot = self._take_snapshot()
        return events

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. Call it between steps. O(blocks + requests)."""
        self.scheduler.check()
        assert not self.scheduler.kv.pending_copies, "a copy of a block was not made in its step"
        assert not self.scheduler.kv.adapters.has_placements, "an adapter was not placed in its step"
        num_queued = self.scheduler.num_running + self.scheduler.num_waiting
        assert num_queued == len(self._requests), f"{len(self._requests)} requests live, {num_queued} are queued"
        num_background = sum(request.background for request in self._requests.values())
        assert sum(self.scheduler.num_background) == num_background, "background requests are counted wrongly"
        assert self.scheduler.kv.tables.keys() <= self._requests.keys(), "a table outlived its request"

    def _add(self, request: Request, now_ns: int) -> list[TokenEvent]:
        if request.request_id in self._requests:
            raise ValueError(f"request {request.request_id!r} was added already and has not ended")
        rejected = self._closed or self.scheduler.add(request, now_ns)
        if rejected is not None:
            events = [self._reject(request, rejected, now_ns)]
            for other in self.scheduler.groups.waiting_for(request.parent_id):  # its beam search is broken
                because = str(rejected.reason)
                events += self._end(
                    other.request_id, FinishReason.REJECTED, now_ns, detail=rejected.detail, reject_reason=because
                )
            return events
        self._requests[request.request_id] = request
        self.matchers.add(request)
        self._journal.on_queued(request, now_ns)
        limit = next_limit(request)
        if limit is not None:
            self._deadline_numbers[request.request_id] = self._deadlines.push((limit[0],), request)
        return []

    def _reject(self, request: Request, rejected: Rejected, now_ns: int) -> TokenEvent:
        progress.end(request, FinishReason.REJECTED)
        self._report_end(request, now_ns, str(rejected.reason))
        return _last_event(request, now_ns, rejected.detail, str(rejected.reason))

    def _end(
        self,
        request_id: str,
        reason: FinishReason,
        now_ns: int,
        *,
        stop_reason: str | None = None,
        detail: str = "",
        reject_reason: str = "",
    ) -> list[TokenEvent]:
        request = self._requests.get(request_id)
        events: list[TokenEvent] = []
        for member in () if request is None else self.scheduler.groups.members(request):
            self.scheduler.end(member, reason, stop_reason)
            self._forget(member, now_ns, reject_reason)
            events.append(_last_event(member, now_ns, detail, reject_reason))
        return events

    def _end_overdue(self, now_ns: int) -> list[TokenEvent]:
        events: list[TokenEvent] = []
        while (first := self._deadlines.peek()) is not None and first[0][0] <= now_ns:
            request = first[2]
            limit = next_limit(request)
            if limit is None:  # every deadline was met
                self._deadlines.discard(self._deadline_numbers.pop(request.request_id))
            elif limit[0] > now_ns:
                self._deadlines.rekey_first((limit[0],))
            else:
                reason = limit[1]
                events += self._end(
                    request.request_id, FinishReason.ABORT, now_ns, detail=LATE_DETAILS[reason], reject_reason=str(reason)
                )
        return events

    def _forget(self, request: Request, now_ns: int, reject_reason: str = "") -> None:
        del self._requests[request.request_id]
        self.matchers.remove(request)
        number = self._deadline_numbers.pop(request.request_id, None)
        if number is not None:
            self._deadlines.discard(number)
        self._report_end(request, now_ns, reject_reason)

    def _report_end(self, request: Request, now_ns: int, reject_reason: str) -> None:
        stats = request_stats(request, now_ns, reject_reason)
        self._journal.on_finish(stats)
        self._observer.on_finish(stats)

    def _take_snapshot(self) -> EngineLoad:
        scheduler, pool = self.scheduler, self.scheduler.kv.pool
        num_cached, (num_beside, num_behind) = pool.num_cached, scheduler.num_background
        num_running = scheduler.num_running - num_beside
        return EngineLoad(
            num_running=num_running,
            num_waiting=scheduler.num_waiting - num_behind,
            waits_for=scheduler.news.waits_for,
            num_blocks_total=scheduler.kv.num_total_blocks,
            num_blocks_free=pool.num_available - num_cached,
            num_blocks_cached=num_cached,
            num_blocks_shared=pool.num_shared,
            num_rows_free=scheduler.max_rows - num_running,
            adapters=scheduler.kv.adapters.counts,
            num_background=num_beside + num_behind,
            num_blocks_background=scheduler.num_background_blocks,
            served_ns=self._served_ns,
        )

    def _step_stats(self, plan: StepPlan, result: StepResult, outcome: StepOutcome, now_ns: int) -> StepStats:
        scheduler, kv = self.scheduler, self.scheduler.kv
        num_cached, execute_ns = kv.pool.num_cached, result.timing.end_ns - result.timing.start_ns
        num_beside, num_behind = scheduler.num_background
        return StepStats(
            step_id=plan.step_id,
            started_ns=max(plan.now_ns, self._last_finish_ns),
            ended_ns=now_ns,
            num_running=scheduler.num_running - num_beside,
            num_waiting=scheduler.num_waiting - num_behind,
            num_blocks_total=kv.num_total_blocks,
            num_blocks_free=kv.pool.num_available - num_cached,
            num_blocks_cached=num_cached,
            counts=outcome.counts,
            parts_ns={"execute": execute_ns, **result.timing.parts},
            void=outcome.void,
            planned_ns=plan.now_ns,
            rows=plan.rows,
            waited_ns=result.timing.waited_ns,
            num_blocks_background=scheduler.num_background_blocks,
        )


def _last_event(request: Request, now_ns: int, detail: str = "", reject_reason: str = "") -> TokenEvent:
    cached, reason, stop_reason = request.num_cached_tokens, request.finish_reason, request.stop_reason
    return TokenEvent(request.request_id, (), now_ns, (), reason, stop_reason, cached, detail, reject_reason)


def next_limit(request: Request) -> tuple[int, RejectReason] | None:
    """Return the request's next deadline and the reject reason if it is missed, or None. The deadline only moves later."""
    if request.deadline_ns is request.queue_deadline_ns is request.first_token_deadline_ns is None:  # like nearly all
        return None
    call = request.call or (request,)
    limits = [(request.deadline_ns, RejectReason.DEADLINE)]
    if all(one.first_scheduled_ns is None for one in call):
        limits.append((request.queue_deadline_ns, RejectReason.QUEUE_TIMEOUT))
    if all(one.first_token_ns is None for one in call):
        limits.append((request.first_token_deadline_ns, RejectReason.FIRST_TOKEN_TIMEOUT))
    return min(((at_ns, reason) for at_ns, reason in limits if at_ns is not None), default=None)


def request_stats(request: Request, now_ns: int, reject_reason: str) -> RequestStats:
    assert request.finish_reason is not None, "reported only at its end"
    return RequestStats(
        request_id=request.request_id,
        tenant=request.tenant,
        arrival_ns=request.arrival_ns,
        first_scheduled_ns=request.first_scheduled_ns,
        first_token_ns=request.first_token_ns,
        ended_ns=now_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_generated_tokens=len(request.output_token_ids),
        num_preemptions=request.num_preemptions,
        finish_reason=request.finish_reason,
        reject_reason=reject_reason,
        waits=request.waits,
        background=request.background,
        is_beam=request.sampling.beams is not None,
        shares_prompt=request.shares_prompt,
        key=request.key,
    )
