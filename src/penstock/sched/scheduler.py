"""The scheduler: decides in each step which requests run and how many of their tokens are computed.

`schedule` extends running requests, admits waiting ones and builds the plan. `commit` takes over what was computed. The
rules are in docs/architecture.md, "The step".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.kv.invariants import check as check_kv
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Tier
from penstock.sched import progress
from penstock.sched.adapters import DEFAULT_MAX_ADAPTERS, Adapters
from penstock.sched.ahead import Ahead
from penstock.sched.background import PAUSE_NS, Share
from penstock.sched.choosing.beams import Answer, Beams
from penstock.sched.choosing.groups import Groups
from penstock.sched.drafting import Drafter
from penstock.sched.fit import max_total_tokens, refusal
from penstock.sched.guessing import Guessing
from penstock.sched.joining import CLOSED, Joining
from penstock.sched.padding import Padding
from penstock.sched.policies.base import BudgetView, Policies, StepLimits, StepRecord
from penstock.sched.progress import Advance, StepOutcome
from penstock.sched.queue import Queues, WaitingQueue
from penstock.sched.running import Extending, Running
from penstock.sched.step_builder import StepBuilder
from penstock.types.adapter import AdapterSource
from penstock.types.errors import PolicyError, Rejected, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.plan import Capacity, RowPlan, StateSave, StepPlan
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.result import StepResult
from penstock.types.stats import PlanNews, StepCounts, WaitReason

MAX_FORCED_AT_ONCE = 255
"""Most forced tokens appended between two steps, while all rows wait."""
ALL_RUN: Sequence[Collection[str]] = ((),)
"""The `sit_out_sets` of `schedule` if no request must sit out."""


@dataclass(slots=True)
class PlannedStep:
    """A step that was planned and is not yet committed."""

    step_id: int
    counts: StepCounts
    void: frozenset[str] = frozenset()
    """Ids of requests that ended meanwhile. The results of their rows are ignored."""


class Scheduler:
    """Plans and commits steps.

    `Extending` plans rows of running requests, and `Joining` admits waiting ones: there is one for background requests, one for
    all others. `Guessing` and `Padding` add to the finished rows. `progress` is the only writer of requests.
    """

    def __init__(
        self,
        capacity: Capacity,
        policies: Policies,
        *,
        enable_prefix_caching: bool = True,
        tier: Tier | None = None,
        most_step_ns: Callable[[], int] = lambda: 0,
        others_serve: Callable[[int], bool] = lambda _: False,
        adapters: AdapterSource | None = None,
        max_adapters: int = DEFAULT_MAX_ADAPTERS,
        drafter: Drafter | None = None,
    ) -> None:
        """`most_step_ns` returns the time limit of a step while other models wait for the machine. 0: no limit.

        `others_serve(now_ns)` returns whether another model on this machine has requests other than background ones.
        `drafter`: a draft model, used beside the policies' guesser.
        """
        if capacity.is_one_pass and (enable_prefix_caching or tier is not None):
            raise ValueError("a model that only reads texts can't have a prefix cache or a tier")
        self.capacity = capacity
        self.max_rows = policies.gate.max_running(capacity)
        self.kv = KVManager(
            capacity.num_blocks,
            capacity.block_size,
            window=capacity.window,
            enable_prefix_caching=enable_prefix_caching,
            shares_parts=policies.shares_parts,
            has_state=capacity.has_state,
            num_state_blocks=capacity.num_state_blocks,
            eviction=policies.eviction,
            tier=tier,
        )
        self.news = PlanNews(0, WaitReason.NOTHING, (), ())
        self._policies = policies
        self._queues = Queues(policies.order, policies.gate.bucket_of)
        self.groups = Groups(capacity.block_size)
        self._running = Running(self.kv, policies, self._queues, self.groups, capacity, max_rows=self.max_rows)
        self._has_drafter = drafter is not None
        has_source = policies.guesser.is_on or drafter is not None
        can_guess = has_source and capacity.checks_guesses and policies.gate.is_continuous
        self._guessing = Guessing(policies.guesser, self.kv, capacity, drafter) if can_guess else None
        self._padding = Padding(capacity, self._running.release)
        self.adapters = Adapters(self.kv, self._running, self._queues, adapters, max_adapters)

        def make_joining(waiting: WaitingQueue, *, is_background: bool) -> Joining:
            return Joining(
                self.kv,
                policies,
                waiting,
                self._running,
                self.groups,
                self._padding,
                self.adapters,
                max_step_tokens=capacity.max_step_tokens,
                is_background=is_background,
            )

        self._joining = make_joining(self._queues.waiting, is_background=False)
        """Admission of all requests but background ones."""
        self._background_joining = make_joining(self._queues.background, is_background=True)
        self._share = Share(policies.background_share)
        if capacity.is_one_pass:
            self.skip_prefix_stops()
        self._extending = Extending(self.kv, self._running)
        self._flights: deque[PlannedStep] = deque()
        self._ahead = Ahead(self.kv, policies, self._running, self.groups)
        self._beams = Beams(self.kv, self._running, self.groups)
        self._is_continuous = policies.gate.is_continuous
        self._needs_preemption = False
        """The last plan was made ahead and needed a preemption, which is impossible then. So the next one is not made ahead."""
        self._most_step_ns = most_step_ns
        self._others_serve = others_serve
        self._yields_until_ns: int | None = None
        self._num_requests = self._num_background = 0
        """Requests that have not ended: all, and background ones."""
        self._num_steps = 0
        self._last_step: StepRecord | None = None
        self._last_commit_ns = 0

    def wakeup_ns(self, now_ns: int) -> int | None:
        """Return when the gate, other models or pending adapter loads require the next `schedule`, or None."""
        if self._yields_until_ns is not None:
            return self._yields_until_ns
        gates_ns = self._joining.wakeup_ns, self._background_joining.wakeup_ns
        adapter_ns = self.adapters.wakeup_ns(now_ns) if self._queues.has_aside else None
        return min((at_ns for at_ns in (*gates_ns, adapter_ns) if at_ns is not None), default=None)

    def skip_prefix_stops(self) -> None:
        """Do not record why prefix lookups ended, since nobody reads it."""
        self._joining.records_stops = self._background_joining.records_stops = False

    @property
    def drafting_ns(self) -> int | None:
        """Time that the draft model took while the last step was planned, or None without one."""
        return self._guessing.drafting_ns if self._guessing is not None and self._has_drafter else None

    def take_guesser_failure(self) -> PolicyError | None:
        """Return the failure that turned the guesser off, once, or None."""
        if self._guessing is None:
            return None
        error, self._guessing.failure = self._guessing.failure, None
        return error

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prefill_ns_per_token(self) -> float:
        """Time to compute a token of a prompt. 0: not known yet."""
        return self._running.prefill_ns_per_token

    @property
    def num_waiting(self) -> int:
        return self._num_requests - len(self._running)

    @property
    def num_background(self) -> tuple[int, int]:
        """Return (running, waiting) background requests, which `num_running` and `num_waiting` include."""
        num_running = self._running.num_background
        return num_running, self._num_background - num_running

    @property
    def num_background_blocks(self) -> int:
        num_held = self.kv.num_total_blocks - self.kv.pool.num_available
        return min(num_held, self._running.num_background_blocks)

    @property
    def running(self) -> Mapping[str, Request]:
        return self._running.requests

    # requests come and go

    def add(self, request: Request, now_ns: int) -> Rejected | None:
        """Queue a request. Return why it is refused, or None."""
        rejected = refusal(request, self.capacity) or self._refuse_beams(request)
        if rejected is not None:
            return rejected
        progress.limit(request, max_total_tokens(request, self.capacity))
        if request.adapter is not None:
            rejected = self.adapters.refusal(request) or self.adapters.want(request.adapter)
            if rejected is not None:
                return rejected
        if request.predicted_new_tokens is None and not request.background:
            request.predicted_new_tokens = self._policies.predictor.predict(request)
        first = request if request.sampling.beams is None else self.groups.add(request)
        if first is not None:
            self._queues.of(first).push(first, now_ns)
        self._num_requests += 1
        self._num_background += request.background
        return None

    def _refuse_beams(self, request: Request) -> Rejected | None:
        beams = request.sampling.beams
        if beams is None:
            return None
        detail = ""
        if self.capacity.num_state_blocks:
            detail = "Beam search is not available: this model has a recurrent state, which beams can't share."
        elif not self._is_continuous:
            detail = "Beam search needs --batching continuous: its rows come and go, and a static or dynamic batch is fixed."
        elif beams.width > self.max_rows:
            detail = (
                f"A beam search of width {beams.width} needs as many rows, but at most {self.max_rows} run at once. "
                f"Ask for an 'n' of at most {self.max_rows}, or raise --max-num-seqs."
            )
        elif self.groups.is_broken(request):
            detail = "Another request of this beam search ended before this one arrived."
        return Rejected(RejectReason.INVALID, detail) if detail else None

    def end(self, request: Request, reason: FinishReason, stop_reason: int | str | None = None, num_cut: int = 0) -> None:
        """End a request. The last `num_cut` tokens of its output do not count, but their KV may be cached."""
        if request.status is RequestStatus.RUNNING:
            # Cache neither a failed row, whose KV may be NaN, nor a beam, whose output was replaced by its hypothesis.
            if reason is not FinishReason.ERROR and request.sampling.beams is None:
                self.kv.publish_last(request)
            self._running.leave(request)
        elif self.groups.is_queued(request):
            self._queues.of(request).remove(request)
        self._num_requests -= 1
        self._num_background -= request.background
        if request.sampling.beams is not None:
            self.groups.forget(request)
        if self._padding.is_active:
            self._padding.end(request)
        self._free(request)
        progress.end(request, reason, stop_reason, num_cut)
        if not request.background:  # batch jobs would skew the predictions for other requests
            self._policies.predictor.ended(request)
        if self._guessing is not None:
            self._guessing.ended(request)

    def _free(self, request: Request) -> None:
        """Free the blocks of a request that ends, once no step in flight uses them."""
        if not (self._flights and request.num_inflight_tokens):
            self.kv.free(request.request_id)
            return
        for flight in self._flights:
            flight.void |= {request.request_id}
        self.kv.fence(request.request_id, self._flights[-1].step_id)

    def refused(self, now_ns: int) -> Sequence[tuple[Request, Rejected]]:
        """Return waiting requests to refuse, with reasons: the adapter failed, loads too long, or does not fit beside them."""
        return self.adapters.refused(now_ns) if self._queues.has_aside else ()

    # schedule

    def schedule(self, now_ns: int, sit_out_sets: Sequence[Collection[str]] = ALL_RUN) -> StepPlan | None:
        """Return the plan of the next step. Return None if there is nothing to compute, or a step in flight must be committed
        first.

        `sit_out_sets`: ids to leave out of the step. A later, smaller set replaces an earlier one if the step would be empty.
        The last set is empty.
        """
        self._share.pass_time(now_ns, has_work=self._has_background)
        if self._yields_until_ns is not None:
            self._last_commit_ns = now_ns  # no step ran since then
        self._yields_until_ns = now_ns + PAUSE_NS if self._yields(now_ns) else None
        if self._yields_until_ns is not None:
            self.news = PlanNews(now_ns, WaitReason.NOTHING, (), ())
            return None
        plan = self._schedule(now_ns, sit_out_sets if self._is_continuous else ALL_RUN)
        if self.adapters.seen:
            self.adapters.forget_seen()
        return plan

    def _yields(self, now_ns: int) -> bool:
        """Return whether to leave the machine to other models.

        They have other requests, while this model has only background requests and owes these no time.
        """
        if not self._has_background or self._share.is_owed:
            return False
        return self._num_requests == self._num_background and self._others_serve(now_ns)

    def _schedule(self, now_ns: int, sit_out_sets: Sequence[Collection[str]]) -> StepPlan | None:
        if not self._flights:
            return self._plan(now_ns, sit_out_sets)
        assert len(self._flights) == 1, "two steps are in flight"
        if not self._needs_preemption and self._ahead.begin():
            try:
                if not self._joining.must_preempt(now_ns):
                    return self._plan(now_ns, sit_out_sets)
            finally:
                self._ahead.end()
        self.news = PlanNews(now_ns, self.news.waits_for, (), ())
        return None

    def _plan(self, now_ns: int, sit_out_sets: Sequence[Collection[str]]) -> StepPlan | None:
        if self._padding.is_active and not self._running and not self._queues.num_joining:
            self._padding.stop()
        self.kv.pool.now_ns = now_ns
        step, fills = self._begin_step(now_ns), self._is_continuous and self._has_background
        self._joining.wakeup_ns = self._background_joining.wakeup_ns = None
        if fills and self._share.is_owed:
            self._fill(step, sit_out_sets)
            others = self._running.of_class(background=False)
            step.counts.rested = [*step.counts.rested, *[request.request_id for request in others]]
            if not step.rows:  # without the blocks and rows promised to background requests
                step = self._begin_step(now_ns, after=step)
            elif len(self._queues.waiting):
                step.counts.waits_for = step.counts.waited_for or WaitReason.TOKENS
        if not step.rows:
            self._serve(step, self._joining_batch, sit_out_sets)
            if step.admissions or step.counts.waits_for not in (WaitReason.ROWS, WaitReason.MEMORY, WaitReason.ADAPTER):
                self._running.protect_next()
            if fills:
                self._fill(step, sit_out_sets)
        self._needs_preemption = step.needs_preemption
        self.news = PlanNews(now_ns, step.counts.waits_for, step.admissions, step.preemptions, step.set_aside)
        return self._build(step) if step.rows or step.padding_rows else None

    def _begin_step(self, now_ns: int, after: StepBuilder | None = None) -> StepBuilder:
        """Return an empty step, with the preemptions and the requests set aside of `after`, a step without rows."""
        capacity, limits = self.capacity, StepLimits(self.capacity.max_step_tokens)
        step = StepBuilder(now_ns, limits, CLOSED, bool(self._flights), capacity.max_scored, capacity.is_one_pass)
        step.counts.most_ns = self._most_step_ns()
        step.counts.waited_for = self.news.waits_for
        if after is not None:
            step.preemptions, step.set_aside = after.preemptions, after.set_aside
            step.counts.num_preemptions, step.counts.num_swaps = after.counts.num_preemptions, after.counts.num_swaps
        if self._padding.is_active:
            self._padding.begin(step)
        return step

    @property
    def _has_background(self) -> bool:
        return self._running.num_background > 0 or len(self._queues.background) > 0

    @property
    def _joining_batch(self) -> Joining:
        """The admission of this step. A background static or dynamic batch starts only if no other request runs or waits."""
        if self._is_continuous or not self._has_background:
            return self._joining
        is_under_way = self._running.num_background or self._queues.background.num_joining
        is_next = not len(self._running) and not len(self._queues.waiting)
        return self._background_joining if is_under_way or is_next else self._joining

    def _serve(self, step: StepBuilder, joining: Joining, sit_out_sets: Sequence[Collection[str]]) -> None:
        """Plan the rows of one class of requests, and ask the budget for the tokens of their prompts."""
        counts, running = step.counts, self._running.of_class(background=joining.is_background)
        step.gate = joining.ask_gate(step.now_ns)
        is_alone = self._is_continuous and self._policies.budget.separates_prompts
        if is_alone:
            self._serve_prompts(step, joining, running)
            if step.rows:
                return
            running = self._running.of_class(background=joining.is_background)
        prefills = self._extending.decodes(step, running, sit_out_sets[0])
        if len(prefills) > 1:
            prefills = joining.rank(prefills, step.now_ns)
        if step.rows or prefills or counts.sat_out or len(joining.waiting):
            step.limits = self._ask_budget(counts, prefills)
        if not is_alone and (prefills or len(joining.waiting)):  # else there is nothing to share out, as in most steps
            self._share_out(step, joining, prefills)
        for fewer in sit_out_sets[1:]:
            if counts.sat_out and not step.rows:  # no other request has a row
                self._extending.decodes(step, running, fewer)

    def _serve_prompts(self, step: StepBuilder, joining: Joining, running: Sequence[Request]) -> None:
        """Plan a step of prefills only, if any can be computed. No decode gets a row then."""
        prefills = [request for request in running if request.num_behind > 1 and not request.is_jumping]
        if prefills or len(joining.waiting):
            step.limits = self._ask_budget(step.counts, prefills)
            self._share_out(step, joining, joining.rank(prefills, step.now_ns))
        if step.rows:
            with_rows = {row.request_id for row in step.rows}
            step.counts.rested = [request.request_id for request in running if request.request_id not in with_rows]

    def _fill(self, step: StepBuilder, sit_out_sets: Sequence[Collection[str]]) -> None:
        """Plan rows of background requests with the tokens that other requests left, up to the budget's `fill_tokens`."""
        counts, running = step.counts, self._running.of_class(background=True)
        num_before, waits_for, sat_out, rested = counts.num_tokens, counts.waits_for, counts.sat_out, counts.rested
        prefills = [request for request in running if request.num_behind > 1 and not request.is_jumping]
        if not step.rows:
            step.limits = self._ask_budget(counts, prefills, is_idle=True)
        limits = step.limits
        num_left = min(limits.max_tokens, limits.fill_tokens) - num_before
        # Short requests don't pass long ones: a job's order keeps shared prefixes together.
        step.limits = StepLimits(num_before + num_left, splits_prompts=limits.splits_prompts, most_ns=limits.most_ns)
        step.gate = self._background_joining.ask_gate(step.now_ns)
        step.long_prefills, step.late, step.num_let_in = [], [], 0
        if waits_for not in (WaitReason.ROWS, WaitReason.MEMORY, WaitReason.LOADING):
            # Background requests do not use up the other resources, or return them when they are preempted.
            counts.waits_for = WaitReason.NOTHING
        for fewer in sit_out_sets:
            most = min(int(num_left / limits.decode_tokens), self.capacity.max_step_tokens - num_before)
            most = max(0 if step.rows else 1, most)
            self._extending.decodes(step, running, fewer, most=most)
            while not step.rows and len(left := self._running.of_class(background=True)) < len(running):
                running = left  # the first was preempted for the next
                self._extending.decodes(step, running, fewer, most=most)
            if step.rows or not counts.sat_out:
                break
        num_decodes = counts.num_tokens - num_before
        max_tokens = step.limits.max_tokens - round(num_decodes * (limits.decode_tokens - 1.0))
        step.limits.max_tokens = min(max_tokens, self.capacity.max_step_tokens)
        if step.limits.max_tokens > counts.num_tokens:
            self._share_out(step, self._background_joining, prefills)
        counts.num_background_tokens = counts.num_tokens - num_before
        counts.waits_for, counts.sat_out, counts.rested = waits_for, [*sat_out, *counts.sat_out], [*rested, *counts.rested]
        if num_before:
            step.limits = limits

    def _ask_budget(self, counts: StepCounts, prefills: Sequence[Request], *, is_idle: bool = False) -> StepLimits:
        view = BudgetView(
            max_step_tokens=self.capacity.max_step_tokens,
            num_decodes=counts.num_decodes,
            prefill_context_len=prefills[0].num_computed_tokens if prefills else 0,
            last_step=self._last_step,
            most_ns=counts.most_ns,
            has_background=self._has_background,
            is_idle=is_idle,
        )
        limits = self._policies.budget.limits(view)
        if not self._running and counts.num_tokens >= limits.max_tokens:
            # Padding alone uses up these limits for as long as the batch lasts, so nothing else would get tokens.
            limits = replace(limits, max_tokens=self.capacity.max_step_tokens)
        return limits

    def _share_out(self, step: StepBuilder, joining: Joining, prefills: list[Request]) -> None:
        """Give the tokens that decodes left over to the running prefills and waiting requests of a class.

        Admissions leave the class's running requests the blocks for their current tokens, so no request is preempted for these
        after an admission.
        """
        has_waiting = len(joining.waiting) > 0
        if has_waiting:
            joining.resume(step)
        if has_waiting or prefills:
            step.num_promised_blocks += self._running.num_missing_blocks(background=joining.is_background)
        if prefills:
            self._extending.note_long(step, prefills)
            for request in joining.rank(prefills, step.now_ns, tuple(step.late)):
                if has_waiting:
                    joining.admit(step, before=request)
                joining.keep_tokens(step, request)
                self._extending.prefill(step, request)
                if request in step.late:
                    step.late.remove(request)
            step.num_kept_tokens = 0
        if has_waiting:
            admit = joining.admit_texts if self.capacity.is_one_pass else joining.admit
            admit(step)
        if len(joining.waiting):  # perhaps just preempted
            step.counts.waits_for = joining.waits_for(step)

    def _build(self, step: StepBuilder) -> StepPlan:
        counts = step.counts
        if self.kv.adapters.num_pinned:
            step.group_by_adapter(self._running.requests)
        guesses = {} if self._guessing is None else self._guessing.widen(step, self._running.requests)
        rows = tuple(step.rows)
        counts.num_rows = len(rows)
        counts.num_blocks_held = self.kv.num_total_blocks - self.kv.pool.num_available
        counts.num_repeated = self.kv.pool.num_repeats * self.kv.block_size
        counts.max_prefill_tokens = max(0, step.limits.max_tokens - counts.num_decodes)
        self._note_served(step, rows)
        if self._padding.is_active:
            self._padding.add_tails(step)
            rows += tuple(step.padding_rows)
        releases = self._running.take_releases(step.admits)
        admits = tuple(step.admits.values())
        saves = self._save_states(step)
        plan = StepPlan(self._num_steps, step.now_ns, admits, rows, releases, saves, guesses, counts.num_repeated)
        self._num_steps += 1
        self._flights.append(PlannedStep(plan.step_id, counts))
        return plan

    def _note_served(self, step: StepBuilder, rows: tuple[RowPlan, ...]) -> None:
        """Report the step's rows to the order policy, except those of background requests, which have an order of their own."""
        requests = self._running.requests
        num_decodes = 0 if step.counts.sat_out else step.num_decode_rows  # 0: each row is charged for itself
        if self._running.num_background:
            num_decodes -= sum(requests[row.request_id].background for row in rows[:num_decodes])
            rows = tuple([row for row in rows if not requests[row.request_id].background])
        self._policies.order.served(rows, requests, self._last_step, num_decodes)

    def _save_states(self, step: StepBuilder) -> tuple[StateSave, ...]:
        """Plan which recurrent states of prompts to save. Call this last: states only get blocks that no row needs."""
        if not self.capacity.num_state_blocks:
            return ()
        rows = [(self._running.requests[row.request_id], row.query_len) for row in step.counts.prefills]
        return tuple([save for request, query_len in rows for save in self.kv.save_states(request, query_len)])

    # commit

    def commit(self, plan: StepPlan, result: StepResult, now_ns: int) -> StepOutcome:
        """Take over the result of a step. Rows of requests that ended meanwhile are ignored.

        Raises KeyError or ValueError if a sampling row lacks its tokens, or if the step is not the oldest in flight.
        """
        if not self._flights or self._flights[0].step_id != plan.step_id:
            raise ValueError(f"step {plan.step_id} is not the oldest in flight")
        flight = self._flights.popleft()
        self.kv.lift_fence(flight.step_id)
        self._record(plan, flight.counts, now_ns, result.timing.waited_ns)
        outcome = StepOutcome(flight.counts, flight.void)
        grouped, failures = [one.request_id for group in self.groups.running for one in group.members], result.failures
        rows = tuple([row for row in plan.rows if row.request_id not in flight.void]) if flight.void else plan.rows
        if result.prompt_logprobs:
            self._score(rows, result)
        if plan.guesses and self._guessing is not None:
            self._guessing.learn([row.request_id for row in rows if row.samples > 1], result)
        advances = progress.advance(
            self._running.requests,
            rows,
            result,
            now_ns,
            outcome,
            block_size=self.capacity.block_size,
            is_last=not self._flights,
            apart={*grouped, *failures} if grouped or failures else (),
        )
        if result.features and self._guessing is not None:
            self._guessing.see(plan.rows, self._running.requests, result.features)
        for request_id, (_, num_accepted) in flight.counts.guesses.items():
            request = self._running.requests[request_id]
            if num_accepted and not request.background:
                self._policies.order.gained(request, num_accepted)
        if self.capacity.num_state_blocks:
            self._publish_states(plan, failures)
        for advance in advances:
            request = advance.request
            if not advance.is_apart:
                self._settle(advance, outcome)
            elif request.status is not RequestStatus.RUNNING:
                continue  # another of its group failed
            elif request.request_id in failures:
                self._fail(request, failures[request.request_id], outcome, now_ns)
            else:
                self.kv.publish(request)
                self._beams.take(request, result)
        if failures and self._padding.is_active:
            self._padding.fail(failures)
        if grouped:
            for answer in self._beams.choose():
                self._end_beam(answer, outcome, now_ns)
        return outcome

    def max_forced(self, request_id: str) -> int:
        """Return how many tokens a grammar may append at once after the sampled one; 0: none."""
        request = self._running.requests[request_id]
        if request.num_inflight_tokens or request.sampling.logprobs is not None:
            return 0
        return min(request.max_total_tokens - request.num_tokens, MAX_FORCED_AT_ONCE)

    def force(self, event: TokenEvent, token_ids: Sequence[int], outcome: StepOutcome) -> TokenEvent:
        """Append tokens that a grammar forces, as if sampled with those of `event`. Return the event with them."""
        request = self._running.requests[event.request_id]
        forced, reason, stop_reason = progress.force(request, token_ids)
        outcome.counts.forced[request.request_id] = len(forced)
        outcome.counts.num_sampled_tokens += len(forced)
        if not request.background:
            self._policies.order.gained(request, len(forced))
        if reason is None:
            self._running.resend(request)
        else:
            self.end(request, reason, stop_reason)
            outcome.ended.append(request)
        return replace(event, token_ids=event.token_ids + forced, finish_reason=reason, stop_reason=stop_reason)

    def end_by_text(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None, num_cut: int, outcome: StepOutcome
    ) -> None:
        """End a request for what its text says, and drop the last `num_cut` tokens from its output and the step's counts.

        If a token of the step had ended the request already, replace that reason.
        """
        counts, request_id = outcome.counts, request.request_id
        counts.num_sampled_tokens -= num_cut
        if request_id in counts.forced:
            counts.forced[request_id] = max(0, counts.forced[request_id] - num_cut)
        if request.status is RequestStatus.FINISHED:
            progress.end(request, reason, stop_reason, num_cut)
        else:
            self.end(request, reason, stop_reason, num_cut)
            outcome.ended.append(request)

    def _score(self, rows: Iterable[RowPlan], result: StepResult) -> None:
        for row in rows:
            if row.request_id in result.prompt_logprobs:
                progress.score(self._running.requests[row.request_id], row, result.prompt_logprobs[row.request_id])

    def _settle(self, advance: Advance, outcome: StepOutcome) -> None:
        request = advance.request
        if not self.capacity.is_one_pass:  # nothing is kept of a text
            self._publish(request, advance.row)
        if advance.reason is not None:
            self.end(request, advance.reason, advance.stop_reason)
            outcome.ended.append(request)

    def _publish(self, request: Request, row: RowPlan) -> None:
        """Add the blocks that a row filled to the prefix cache, and release those no longer read."""
        size, is_prefill = self.capacity.block_size, row.query_len > row.samples
        if is_prefill or request.num_computed_tokens // size > row.context_len // size:
            self.kv.publish(request)
            if is_prefill and request.num_behind == 1:  # later prompts may share the prompt's last, partial block
                self.kv.publish_tail(request)
            if self.capacity.window:
                self.kv.release_unread(request)

    def _publish_states(self, plan: StepPlan, failures: Mapping[str, str]) -> None:
        for request_id in dict.fromkeys([*(row.request_id for row in plan.admits), *(save.request_id for save in plan.saves)]):
            if request_id in self._running.requests and request_id not in failures:
                self.kv.publish_states(self._running.requests[request_id])

    def _fail(self, request: Request, detail: str, outcome: StepOutcome, now_ns: int) -> None:
        for member in self.groups.members(request):
            self.end(member, FinishReason.ERROR)
            outcome.ended.append(member)
            event = TokenEvent(member.request_id, (), now_ns, finish_reason=FinishReason.ERROR, detail=detail)
            outcome.events.append(event)

    def _end_beam(self, answer: Answer, outcome: StepOutcome, now_ns: int) -> None:
        request, token_ids = answer.request, answer.token_ids
        progress.replace_output(request, token_ids)
        progress.note_first_token(request, now_ns)
        num_cached = request.num_cached_tokens
        reason = FinishReason.STOP if answer.is_stopped else FinishReason.LENGTH
        stop_reason = token_ids[-1] if answer.is_stopped else None
        self.end(request, reason, stop_reason)
        outcome.ended.append(request)
        outcome.counts.num_sampled_tokens += len(token_ids)
        event = TokenEvent(request.request_id, token_ids, now_ns, answer.logprobs, reason, stop_reason, num_cached)
        outcome.events.append(event)

    def _record(self, plan: StepPlan, counts: StepCounts, now_ns: int, waited_ns: int) -> None:
        began_ns = self._last_commit_ns if counts.num_decodes else max(plan.now_ns, self._last_commit_ns)
        duration_ns = now_ns - began_ns - waited_ns
        num_prefill_tokens = counts.num_tokens - counts.num_decodes
        step_ns = max(0, duration_ns - (self.drafting_ns or 0))
        self._last_step = StepRecord(counts.num_decodes, num_prefill_tokens, step_ns, counts.num_prefill_pairs, waited_ns)
        if self._guessing is not None:
            self._guessing.time(self._last_step)
        self._last_commit_ns = now_ns
        self._share.count(duration_ns, counts)
        if not counts.num_decodes and num_prefill_tokens:
            self._running.learn_pace(num_prefill_tokens, duration_ns)

    def abandon_flights(self) -> None:
        """Drop the steps in flight, since the engine failed."""
        while self._flights:
            self.kv.lift_fence(self._flights.popleft().step_id)

    def check(self) -> None:
        check_kv(self.kv)
        assert self._flights or not self.kv.fenced, "a fence is left, and no step is in flight"
        for request in self._running:
            assert self._flights or not request.num_inflight_tokens, (
                f"{request.request_id!r} has tokens in flight, and no step is"
            )
            assert not request.num_pending_samples, f"{request.request_id!r} counts a token that nobody knows"
        self._running.check()
        self.groups.check(self.num_waiting - len(self._queues))
        self._padding.check(len(self._running) + self._queues.num_joining, self.max_rows)
