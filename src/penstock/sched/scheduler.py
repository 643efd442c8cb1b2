"""The scheduler: owns which requests run and how far they have come. Called by `EngineCore` alone; never waits, computes
tokens or reads a clock.

There are no phases. A request has `num_tokens` (prompt + generated) and `num_computed_tokens` (KV present),
and every step lets it catch up within the step's budget of tokens. Long prompts in chunks, prefix hits and
resuming after a preemption are the same rule; a decode is a request that is one token behind.

Side effects have an order:

    schedule   1. gate: how many may join, or who is called to a batch
               2. extend the running: decodes, then prefills; preempt where memory is short (`extending.py`)
               3. per waiting request, while row, tokens and memory last: look up its prefix, admit (`joining.py`);
                  before a prefill of 2 if the order says so, or the budget lets others pass long ones
               4. build the plan
    commit     1. advance num_computed_tokens
               2. append the sampled token
               3. finish checks: stop token, max_tokens, max_model_len
               4. publish blocks that became full
               5. release the blocks of what finished
               6. emit

A step may be planned while the one before it is in flight; what that changes is in `flights.py` (the books while it is planned,
and who ends meanwhile), and nowhere else.

A step in which those who run lack memory preempts and admits nobody. Another may pause some of those who run for one of a
higher class, if the order says so, and admit that one. A request that the pool could not hold alone is refused beforehand
(`fit.py`), and the most senior of those who run (the oldest of the highest class) is never preempted for another that runs, so
it always finishes. Whoever was preempted is not admitted again before there is room for all its tokens and for everybody to
grow, so work is not lost over and over.

A batch that a gate calls is padded as if it were a rectangle (`padding.py`): before each prompt that is admitted, and behind
all other rows of the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.kv.invariants import check as check_kv
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Tier
from penstock.sched.choosing.beams import BeamGroup
from penstock.sched.draft import StepCounts, StepDraft, StepOutcome
from penstock.sched.extending import Extending
from penstock.sched.fit import max_total_tokens, refusal
from penstock.sched.flights import Ahead, Flights
from penstock.sched.joining import Joining
from penstock.sched.padding import Padding
from penstock.sched.policies.base import BudgetView, GateDecision, Policies, StepLimits, StepRecord
from penstock.sched.queue import WaitingQueue
from penstock.sched.running import Running
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.result import StepResult
from penstock.types.stats import PlanNews, WaitReason

TELLING_SHARE = 4
"""One in so many of the tokens that a step may have must be prefills for it to say what one of them takes, unless nothing is
known or it says less: of a smaller one, as after a prefix hit, most is what every step takes."""


class Scheduler:
    """Batches over paged KV, one step at a time."""

    def __init__(
        self, capacity: Capacity, policies: Policies, *, enable_prefix_caching: bool = True, tier: Tier | None = None
    ) -> None:
        self.capacity = capacity
        self.kv = KVManager(
            capacity.num_blocks,
            capacity.block_size,
            enable_prefix_caching=enable_prefix_caching,
            eviction=policies.eviction,
            tier=tier,
        )
        self.counts = StepCounts()
        """Of the last step that was scheduled."""
        self.news = PlanNews(0, WaitReason.NOTHING, (), ())
        """Of the last time that a step was looked for."""
        self._policies = policies
        self._waiting = WaitingQueue(policies.order, policies.gate.bucket_of)
        self._running = Running(self.kv, policies, self._waiting, policies.gate.max_running(capacity))
        self._padding = Padding(capacity, self._running.releases.append)
        self._joining = Joining(
            self.kv, policies, self._waiting, self._running, self._padding, max_step_tokens=capacity.max_step_tokens
        )
        self._flights = Flights(self.kv)
        self._extending = Extending(self.kv, self._running)
        self._ahead = Ahead(self.kv, policies, self._running)
        self._takes_beams = policies.gate.is_continuous
        self._puts_off_pause = False
        """The last plan, which was made ahead, found somebody to pause: the next one is not."""
        self._num_steps = 0
        self._last_step: StepRecord | None = None
        self._last_commit_ns = 0

    @property
    def max_rows(self) -> int:
        """How many may run at once."""
        return self._running.max_rows

    @property
    def wakeup_ns(self) -> int | None:
        """When the gate wants to be asked again."""
        return self._joining.wakeup_ns

    def tell_no_stops(self) -> None:
        """Nobody wants to know why prefix hits stopped: that need not be looked for."""
        self._joining.tells_stops = False

    @property
    def num_running(self) -> int:
        return len(self._running.requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + self._running.beams.num_unqueued

    def members(self, request: Request) -> Sequence[Request]:
        """Who can only end together with a request: itself, or all beams of its search."""
        return self._running.beams.members(request)

    def waiting_for(self, parent_id: str) -> Sequence[Request]:
        """The requests of a beam search that has not got all of them yet."""
        return self._running.beams.waiting_for(parent_id)

    @property
    def running(self) -> Mapping[str, Request]:
        """In the order of admission."""
        return self._running.requests

    def add(self, request: Request, now_ns: int) -> Rejected | None:
        """Queue a request, or say why it can never be served."""
        rejected = refusal(request, self.capacity) or self._refuse_beams(request)
        if rejected is None:
            request.max_total_tokens = max_total_tokens(request, self.capacity)
            self._predict(request)
            first = request if request.sampling.beams is None else self._running.beams.add(request)
            if first is not None:
                self._waiting.push(first, now_ns)
        return rejected

    def _refuse_beams(self, request: Request) -> Rejected | None:
        beams = request.sampling.beams
        if beams is None:
            return None
        if not self._takes_beams:
            detail = "A static or dynamic batch takes no beam search, whose rows come and go: that needs --batching continuous."
            return Rejected(RejectReason.INVALID, detail, param="use_beam_search")
        if beams.width > self.max_rows:
            detail = (
                f"A beam search of width {beams.width} needs as many rows, and {self.max_rows} may run at once: "
                f"ask for an 'n' of at most {self.max_rows}, or raise --max-num-seqs."
            )
            return Rejected(RejectReason.INVALID, detail, param="n")
        if self._running.beams.is_broken(request):
            return Rejected(RejectReason.INVALID, "Another request of this beam search has ended before this one came.")
        return None

    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Take a waiting or running request out and its blocks back, whatever it was doing."""
        beams = self._running.beams
        if request.status is RequestStatus.RUNNING:
            # Not of a failed row, whose KV may be no numbers, nor of a beam, which has got the tokens of its hypothesis.
            if reason is not FinishReason.ERROR and request.sampling.beams is None:
                self.kv.publish_tail(request)
            self._running.leave(request)
        elif beams.is_queued(request):
            self._waiting.remove(request)
        beams.forget(request)
        if self._padding.is_active:
            self._padding.end(request)
        self._flights.leave(request)
        request.status = RequestStatus.FINISHED
        request.num_inflight_tokens = 0
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._policies.predictor.ended(request)

    def _predict(self, request: Request) -> None:
        """Unless whoever made the request knows better."""
        if request.predicted_new_tokens is None:
            prediction = self._policies.predictor.predict(request)
            request.predicted_new_tokens = None if prediction is None else prediction.num_tokens

    # schedule

    def schedule(self, now_ns: int) -> StepPlan | None:
        """The next step; None if there is nothing to compute, or if the step in flight has to be committed first."""
        if not self._flights:
            return self._plan(now_ns)
        assert len(self._flights) == 1, "two steps are in flight"
        if not self._puts_off_pause and self._ahead.begin():
            try:
                if not self._joining.must_pause(now_ns):
                    return self._plan(now_ns)
            finally:
                self._ahead.end()
        self.news = PlanNews(now_ns, self.news.waits_for, (), ())
        return None

    def _plan(self, now_ns: int) -> StepPlan | None:
        if self._padding.is_active and not self._running and not self._waiting.num_joining:
            self._padding.stop()
        self.kv.prefix.now_ns = now_ns
        decision = self._joining.ask_gate(now_ns)
        draft = StepDraft(StepLimits(self.capacity.max_step_tokens), is_ahead=bool(self._flights))
        if self._padding.is_active:
            draft.add_padding(self._padding.begin())
        prefills = self._extending.decodes(draft)
        if len(prefills) > 1:
            prefills = self._joining.rank(prefills, now_ns)
        draft.limits = self._ask_budget(draft, prefills)
        if prefills or len(self._waiting):  # else there is nothing to share out, as in most steps
            self._share_out(draft, prefills, decision, now_ns)
        self._puts_off_pause = draft.puts_off_pause
        self.news = PlanNews(now_ns, draft.waits_for, draft.admissions, draft.preemptions, draft.set_aside)
        return self._build(draft, now_ns) if draft.rows or draft.padding_rows else None

    def _ask_budget(self, draft: StepDraft, prefills: Sequence[Request]) -> StepLimits:
        view = BudgetView(
            max_step_tokens=self.capacity.max_step_tokens,
            num_decodes=draft.num_decodes,
            prefill_context_len=prefills[0].num_computed_tokens if prefills else 0,
            last_step=self._last_step,
        )
        limits = self._policies.budget.limits(view)
        if not self._running.requests and draft.num_tokens >= limits.max_tokens:
            # Padding is in the way, and lasts as long as the batch.
            limits = replace(limits, max_tokens=self.capacity.max_step_tokens)
        return limits

    def _share_out(self, draft: StepDraft, prefills: list[Request], decision: GateDecision, now_ns: int) -> None:
        """What the decodes left: for those whose prompts are being computed and for those who join, each in turn.

        Who joins leaves the others the blocks for all the tokens that they have, so that a step does not admit and preempt.
        """
        has_waiting = len(self._waiting) > 0
        if has_waiting:
            self._joining.call_back(draft)
        if prefills:
            self._extending.note_long(draft, prefills)
            draft.num_promised_blocks += sum(map(self._running.room.missing_blocks, prefills))
            for request in self._joining.rank(prefills, now_ns, tuple(draft.late)):
                if has_waiting:
                    self._joining.admit(draft, decision, now_ns, before=request)
                self._joining.keep_tokens(draft, request, now_ns)
                self._extending.prefill(draft, request)
                if request in draft.late:
                    draft.late.remove(request)
            draft.num_kept_tokens = 0
        if has_waiting:
            self._joining.admit(draft, decision, now_ns)
        if len(self._waiting):  # those preempted just now, perhaps
            draft.waits_for = self._joining.waits_for(draft)

    def _build(self, draft: StepDraft, now_ns: int) -> StepPlan:
        rows = tuple(draft.rows)
        self._policies.order.served(rows, self._running.requests, self._last_step, draft.num_decode_rows)
        if self._padding.is_active:
            self._padding.add_tails(draft)
            rows += tuple(draft.padding_rows)
        plan = StepPlan(self._num_steps, now_ns, tuple(draft.admits.values()), rows, tuple(self._running.releases))
        self._num_steps += 1
        self._running.releases.clear()
        self._running.untold.difference_update(draft.admits)
        self.counts = draft.counts()
        self._flights.depart(plan, self.counts)
        return plan

    # commit

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Take over what a step computed: an event per row that sampled or failed. Rows of requests that ended are void.

        One loop without calls, as it runs for every row of every step. Raises KeyError or ValueError if a row that
        samples has not got its one token, ValueError if the step is not the oldest in flight.
        """
        flight = self._flights.arrive(plan.step_id)
        self._record(plan, flight.counts, now_ns)
        block_size, running = self.capacity.block_size, self._running.requests
        tokens, logprobs, failures = result.token_ids, result.logprobs, result.failures
        is_last = not self._flights
        outcome = StepOutcome(flight.counts, flight.void)
        add_event = outcome.events.append
        num_failed = 0
        ready: list[BeamGroup] = []
        for row in flight.live(plan.rows) if flight.void else plan.rows:
            request_id, query_len = row.request_id, row.query_len
            request = running.get(request_id)
            if request is None:
                continue
            num_computed = request.num_computed_tokens = row.context_len + query_len
            if is_last:  # cheaper than a subtraction, and the usual case
                request.num_inflight_tokens = 0
            else:
                request.num_inflight_tokens -= query_len
            reason, stop_reason = None, None
            if row.samples:
                if failures and request_id in failures:
                    for member in self._running.beams.members(request):
                        self.end(member, FinishReason.ERROR)
                        outcome.ended.append(member)
                        detail = failures[request_id]
                        add_event(TokenEvent(member.request_id, (), now_ns, finish_reason=FinishReason.ERROR, detail=detail))
                        num_failed += 1
                    continue
                if logprobs and request.sampling.beams is not None:
                    self.kv.publish(request)
                    group = self._running.beams.report(request, logprobs[request_id][0])
                    if group is not None:
                        ready.append(group)
                    continue
                sampling, token_ids = request.sampling, tokens[request_id]
                (token_id,) = token_ids
                request.output_token_ids.append(token_id)
                num_tokens = request.num_tokens = num_computed + 1
                if request.first_token_ns is None:
                    request.first_token_ns = now_ns
                if token_id in sampling.stop_token_ids and (
                    len(request.output_token_ids) > sampling.min_tokens or sampling.follows_grammar  # it left nothing else
                ):
                    reason, stop_reason = FinishReason.STOP, token_id
                elif num_tokens >= request.max_total_tokens:
                    reason = FinishReason.LENGTH
                entries = logprobs.get(request_id, ()) if logprobs else ()
                add_event(TokenEvent(request_id, token_ids, now_ns, entries, reason, stop_reason, request.num_cached_tokens))
            is_prefill = query_len > 1 or not row.samples
            if is_prefill or not num_computed % block_size:  # a block became full, or others wait for a prefill
                self.kv.publish(request)
                if is_prefill and request.num_tokens - num_computed == 1:  # its prompt is computed: others may begin alike
                    self.kv.publish_tail(request)
            if reason is not None:
                self.end(request, reason, stop_reason)
                outcome.ended.append(request)
        if failures and self._padding.is_active:
            self._padding.fail(failures)
        outcome.num_sampled_tokens = len(outcome.events) - num_failed  # each has one
        for group in ready:
            for member in group.members:
                if member.first_token_ns is None:
                    member.first_token_ns = now_ns
            if group.members and not self._running.beams.advance(group):  # else another of its rows has failed
                self._tell_hypotheses(group, outcome, now_ns)
        return outcome

    def _tell_hypotheses(self, group: BeamGroup, outcome: StepOutcome, now_ns: int) -> None:
        """A search has ended: each of its requests gets a hypothesis, the first the best."""
        for request, found in zip(tuple(group.members), group.search.finished, strict=True):
            request.output_token_ids = list(found.token_ids)
            request.num_tokens = request.num_prompt_tokens + len(found.token_ids)
            reason = FinishReason.STOP if found.is_stopped else FinishReason.LENGTH
            stop_reason = found.token_ids[-1] if found.is_stopped else None
            num_cached = request.num_cached_tokens
            self.end(request, reason, stop_reason)
            outcome.ended.append(request)
            outcome.num_sampled_tokens += len(found.token_ids)
            outcome.events.append(
                TokenEvent(request.request_id, found.token_ids, now_ns, found.entries, reason, stop_reason, num_cached)
            )

    def _record(self, plan: StepPlan, counts: StepCounts, now_ns: int) -> None:
        """Note what the step was and how long it took."""
        began_ns = self._last_commit_ns if counts.num_decodes else max(plan.now_ns, self._last_commit_ns)
        duration_ns = now_ns - began_ns
        num_prefill_tokens = counts.num_tokens - counts.num_decodes
        self._last_step = StepRecord(counts.num_decodes, num_prefill_tokens, duration_ns, counts.num_prefill_pairs)
        self._last_commit_ns = now_ns
        if not counts.num_decodes and num_prefill_tokens:
            known, ns_per_token = self._running.prefill_ns_per_token, duration_ns / num_prefill_tokens
            is_telling = num_prefill_tokens * TELLING_SHARE >= self.capacity.max_step_tokens
            if is_telling or ns_per_token < known or not known:
                self._running.prefill_ns_per_token = ns_per_token

    def abandon_flights(self) -> None:
        """The steps in flight will never be committed; nothing is scheduled any more."""
        self._flights.abandon()

    def check(self) -> None:
        """Verify the laws of memory and of the queues. Raises AssertionError. O(blocks + requests)."""
        check_kv(self.kv)
        self._flights.check(self._running.requests.values())
        self._running.check()
        self._padding.check(len(self._running) + self._waiting.num_joining, self.max_rows)
