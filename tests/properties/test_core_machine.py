"""The core as a state machine: any order of commands and steps keeps every law. The laws stand in `check` and below."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.clock import VirtualClock
from penstock.engine.stepper import Stepper
from penstock.kv.block_table import extend_chain, pack, root_hash
from penstock.sched.policies.fair import FairShares
from penstock.sched.policies.orders import PriorityClasses
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import expected_tokens, make_request
from penstock.testing.hash_executor import mix, root_of
from penstock.types.adapter import BASE
from penstock.types.events import Abort, Add, Command, Stop, TokenEvent
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.result import StepResult
from penstock.types.sampling import SamplingParams
from penstock.types.stats import WaitReason
from support.fake_adapters import make_adapter
from support.strategies import JOB, MAX_ADAPTERS, MAX_SHARE, MODEL, Engine, engines, matcher_of, prompts, ranks, samplings

MAX_MODEL_LEN = 40


class CoreMachine(RuleBasedStateMachine):
    """Time is counted in rules; a step may be interrupted by commands between `begin` and `finish`, and with a depth of 2 by
    any other rule. Some have a tier below the pool, which does its work late, and not always right; some have adapters, of
    which the same is true."""

    @initialize(
        engine=st.one_of(
            engines(MAX_MODEL_LEN),
            engines(MAX_MODEL_LEN, has_lower_tier=True),
            engines(MAX_MODEL_LEN, has_adapters=True),
        )
    )
    def start(self, engine: Engine) -> None:
        self.engine = engine
        self.source, loader = (None, None) if engine.lora is None else engine.lora.make()
        self.core, self.executor = engine.make(self.source)
        self.clock = VirtualClock()
        self.transfers, self.worker = engine.make_transfers(self.core, self.executor, self.clock)
        self.worker = self.worker or loader
        self.stepper = Stepper(
            self.core,
            self.executor,
            self.clock,
            report=lambda events, _: self.record(events),
            transfers=self.transfers,
            poll_aborts=self.poll_aborts,
            collect=self.collect,
        )
        self.aborted: Sequence[int] = ()
        """Requests that are cancelled while the next step runs."""
        self.failed: int | None = None
        """The request whose row has no usable logit in the next step, if it samples."""
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, TokenEvent] = {}
        """Finish events. The last that ended is the last here."""
        self.early: dict[str, set[FinishReason]] = defaultdict(set)
        """How each request may end before its answer is whole."""
        self.num_added = 0

    @property
    def now_ns(self) -> int:
        return self.clock.now_ns()

    @rule(
        count=st.integers(1, 3),
        prompt=prompts(MAX_MODEL_LEN - 1),
        sampling=samplings(MAX_MODEL_LEN),
        salt=st.sampled_from([b"", b"salt"]),
        rank=ranks(),
        patience=st.one_of(st.none(), st.integers(1, 60)),
        comes_again=st.booleans(),
        number=st.integers(BASE, MAX_ADAPTERS),
    )
    def add(
        self,
        count: int,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: bytes,
        rank: tuple[int, str, int | None],
        patience: int | None,
        comes_again: bool,
        number: int,
    ) -> None:
        """Several equal requests, so that memory runs short soon; also under ids that others had before."""
        self.clock.advance(1)
        for _ in range(count):
            name = f"r{self.num_added % 21}"
            if comes_again and self.ended:
                name = next(reversed(self.ended))
            elif name in self.requests and name not in self.ended:
                return
            self.num_added += 1
            if name in self.ended:
                self.check_answer(name)
            self.add_one(name, prompt, sampling, salt, rank, patience, number)

    def add_one(
        self,
        name: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        salt: bytes,
        rank: tuple[int, str, int | None],
        patience: int | None,
        number: int = BASE,
    ) -> None:
        priority, tenant, predicted = rank
        request = make_request(
            name,
            prompt,
            sampling=sampling,
            cache_salt=salt,
            arrival_ns=self.now_ns,
            priority=priority,
            tenant=tenant,
            background=tenant == JOB,
            predicted_new_tokens=predicted,
            deadline_ns=None if patience is None else self.now_ns + patience,
            matcher=matcher_of(sampling),
            adapter=make_adapter(number) if number and self.source is not None else None,
        )
        self.requests[name], self.tokens[name] = request, []
        self.early[name] = set() if patience is None else {FinishReason.ABORT}
        if request.adapter is not None and number in self.source.failing:
            self.early[name] |= {FinishReason.REJECTED, FinishReason.ERROR}
        self.apply(Add(request))

    @rule(idx=st.integers(0, 20), is_stop=st.booleans())
    def end_early(self, idx: int, is_stop: bool) -> None:
        command = Stop(f"r{idx}", "stop string") if is_stop else Abort(f"r{idx}")
        self.early[f"r{idx}"].add(FinishReason.STOP if is_stop else FinishReason.ABORT)
        self.apply(command)
        assert f"r{idx}" in self.ended or f"r{idx}" not in self.requests

    @rule(idx=st.integers(0, 2), prompt=prompts(MAX_MODEL_LEN - 1))
    def come_again(self, idx: int, prompt: tuple[int, ...]) -> None:
        """Cancelled with a row in flight, and followed at once by another of the same id."""
        running = [name for name, request in self.core.scheduler.running.items() if request.num_inflight_tokens]
        for name in running[idx : idx + 1]:
            self.early[name].add(FinishReason.ABORT)
            self.apply(Abort(name))
            self.check_answer(name)
            self.add_one(name, prompt, SamplingParams(max_tokens=8, temperature=0.0), b"", (0, "", None), None)
            self.step(())

    @rule()
    def forget_adapters(self) -> None:
        """None is in memory any more; those in the pool stay."""
        if self.source is not None:
            self.source.forget_all()

    @rule(count=st.integers(1, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step(())

    @rule(aborted=st.lists(st.integers(0, 20), max_size=2))
    def step_with_aborts(self, aborted: list[int]) -> None:
        """Commands that arrive while the step runs."""
        self.step(aborted)

    @rule(failed=st.integers(0, 20))
    def step_with_failure(self, failed: int) -> None:
        """One row has no usable logit, if it samples."""
        self.step((), failed)

    def step(self, aborted: Sequence[int], failed: int | None = None) -> None:
        self.clock.advance(1)
        self.aborted, self.failed = aborted, failed
        if self.transfers is not None:  # as the stepper does; here the core is checked in between
            self.transfers.arrive()
            self.core.check()
        self.apply()
        preempted_before = {name for name, request in self.requests.items() if request.status is RequestStatus.PREEMPTED}
        had_flights = self.stepper.has_flights
        plan = self.stepper.begin()
        if self.worker is not None:
            self.worker.turn()
        is_loading = self.core.scheduler.news.waits_for in (WaitReason.LOADING, WaitReason.ADAPTER)
        is_loading |= any(True for _ in self.core.scheduler._queues.adapters_aside)
        if not had_flights and not is_loading:  # else one that has to wait for the step in flight, or a load, is no wrong
            self.check_work_conserving(plan)
        if plan is not None:
            self.check_preempted_go_first(preempted_before, plan)
        if self.stepper.must_finish(plan):
            self.stepper.finish()

    def poll_aborts(self) -> list[Command]:
        for idx in self.aborted:
            self.early[f"r{idx}"].add(FinishReason.ABORT)
        return [Abort(f"r{idx}") for idx in self.aborted]

    def apply(self, *commands: Command) -> None:
        """Apply commands after telling what was sampled before, as the stepper does."""
        self.stepper.report_pending()
        self.record(self.core.apply(commands, self.now_ns))

    def collect(self, ticket: Ticket) -> StepResult:
        result = self.executor.collect(ticket)
        if f"r{self.failed}" in result.token_ids:
            tokens = {name: token_ids for name, token_ids in result.token_ids.items() if name != f"r{self.failed}"}
            result = replace(result, token_ids=tokens, failures={f"r{self.failed}": "no logit is a number"})
            self.early[f"r{self.failed}"].add(FinishReason.ERROR)
        return result

    def record(self, events: list[TokenEvent]) -> None:
        for event in events:
            assert event.request_id not in self.ended, "heard of after its end"
            self.tokens[event.request_id] += event.token_ids
            if event.finish_reason is not None:
                self.ended[event.request_id] = event

    def check_work_conserving(self, plan: StepPlan | None) -> None:
        capacity, scheduler = self.engine.capacity, self.core.scheduler
        wakeup_ns = self.core.next_wakeup_ns(self.now_ns)
        if plan is None:
            gate_ns = scheduler.wakeup_ns(self.now_ns)
            is_gated = scheduler.num_running == 0 and gate_ns is not None and gate_ns > self.now_ns
            assert not self.core.has_work or is_gated, "there is work, no step, and no gate that waits"
            assert not is_gated or (wakeup_ns is not None and wakeup_ns <= gate_ns), "nobody will wake the gate"
            return
        if plan.num_tokens == capacity.max_step_tokens or not self.engine.fills_steps:
            return
        has_row = {row.request_id for row in plan.rows}
        if self.is_the_jobs_own(plan):
            return
        assert scheduler.running.keys() <= has_row, "a running request has no row, and tokens are left"
        released = [self.requests[request_id] for request_id in plan.releases if request_id in self.requests]  # others pad
        preempted_now = any(request.status is RequestStatus.PREEMPTED for request in released)
        if not self.engine.is_continuous:
            return  # who waits for a batch waits beside free memory
        if self.core.num_waiting == 0 or len(has_row) == min(capacity.max_rows, capacity.max_step_tokens) or preempted_now:
            return
        if self.num_aside():
            return  # they wait for a prefix, and others leave them their places
        # Memory must be short: for the largest of those who wait, beside all that the reserve may keep back.
        waiting = [r for r in self.requests.values() if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)]
        largest = max((r.num_tokens for r in waiting if not r.background), default=None)
        if largest is None:
            return  # background requests wait until the others need nothing more
        promised = sum(
            scheduler.kv.num_blocks_for(r.num_tokens) - len(scheduler.kv.block_table(r.request_id))
            for r in scheduler.running.values()
        )
        growth = self.max_growth_blocks()
        kept_back = promised + growth + int(MAX_SHARE * scheduler.kv.num_total_blocks) + 1
        assert scheduler.kv.pool.num_available < scheduler.kv.num_blocks_for(largest) + kept_back, "a request waits for nothing"

    def is_the_jobs_own(self, plan: StepPlan) -> bool:
        """Background requests are owed a share of the time, and have a step without others."""
        is_owed = self.engine.policies.background_share > 0
        return is_owed and all(self.requests[row.request_id].background for row in plan.rows if row.request_id in self.requests)

    def num_aside(self) -> int:
        return len(self.aside())

    def aside(self) -> list[Request]:
        queues = self.core.scheduler._queues
        return [follower.request for queue in (queues.waiting, queues.background) for follower in queue.aside]

    def max_growth_blocks(self) -> int:
        """The most blocks that a reserve may want for all running requests and the next, up to their limits."""
        num_blocks_for = self.core.scheduler.kv.num_blocks_for
        live = [r for r in self.requests.values() if r.request_id not in self.ended]
        return sum(num_blocks_for(r.max_total_tokens) - num_blocks_for(r.num_computed_tokens) for r in live)

    def check_preempted_go_first(self, preempted_before: set[str], plan: StepPlan) -> None:
        # Not `plan.admits`: running requests with forced tokens are told to the executor again, in full.
        admitted = [admission.request_id for admission in self.core.scheduler.news.admissions]
        aside = {request.request_id for request in self.aside()}
        left = preempted_before - set(admitted) - aside
        for request_id in admitted:
            if request_id not in preempted_before:
                request = self.requests[request_id]
                if request.background and self.is_the_jobs_own(plan):
                    continue
                overtaken = [other for other in left if not self.may_overtake(request, self.requests[other])]
                assert not overtaken, "a newer request overtook a preempted one"

    def may_overtake(self, fresh: Request, preempted: Request) -> bool:
        """May a fresh request go first: is it of a higher class, or of another tenant whose turn it is?"""
        if fresh.background or preempted.background:
            return not fresh.background
        match self.engine.policies.order:
            case PriorityClasses():
                return fresh.priority < preempted.priority
            case FairShares():
                return fresh.tenant != preempted.tenant
        return False

    @invariant()
    def laws_hold(self) -> None:
        if hasattr(self, "core"):
            self.core.check()
            self.check_cache()

    def check_cache(self) -> None:
        """Content that the cache can find is there, also that of requests that have ended."""
        index, size = self.core.scheduler.kv.prefix.index, self.engine.capacity.block_size
        for request in self.requests.values():
            token_ids = [*request.prompt_token_ids, *request.output_token_ids]
            values = [root_of(request.adapter)]
            for token_id in token_ids:
                values.append(mix(values[-1], token_id))
            parent = root_hash(request.cache_salt, request.adapter)
            hashes, _ = extend_chain(parent, token_ids, size)
            for start, name in zip(range(0, len(token_ids), size), [*hashes, b""], strict=False):
                block_id, num_tokens = index.block_of(name), size
                if block_id is None:
                    block_id, num_tokens = index.lookup_child(parent, pack(token_ids[start : start + size]))
                found = self.executor._slots[block_id * size : block_id * size + num_tokens]
                assert found == values[start + 1 : start + 1 + num_tokens], f"block {block_id} is not what it is found as"
                parent = name

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(2000):
            if not self.core.has_work:
                break
            had_flights = self.stepper.has_flights
            self.step(())
            if self.worker is not None:
                self.worker.run()
            if not had_flights and not self.stepper.has_flights and self.core.has_work and not self.core.num_running:
                self.clock.advance_to(max(self.now_ns, self.core.next_wakeup_ns(self.now_ns) or 0))
            self.core.check()
        while self.stepper.has_flights:
            self.step(())
        self.core.check()
        assert not self.core.scheduler.kv.fenced, "blocks were not given back"
        assert self.ended.keys() == self.requests.keys(), "a request never ended"
        for request_id in self.requests:
            self.check_answer(request_id)

    def check_answer(self, request_id: str) -> None:
        """And forget its end."""
        request, got, end = self.requests[request_id], tuple(self.tokens[request_id]), self.ended.pop(request_id)
        expected = expected_tokens(
            request.prompt_token_ids,
            request.sampling,
            model=MODEL,
            max_model_len=MAX_MODEL_LEN,
            matcher=matcher_of(request.sampling),
            adapter=request.adapter,
        )
        answer = (got, end.finish_reason, end.stop_reason)
        if answer != (expected.token_ids, expected.finish_reason, expected.stop_reason):
            assert end.finish_reason in self.early[request_id], f"ended early by itself: {end}"
            assert end.finish_reason is not FinishReason.STOP or end.stop_reason == "stop string"
            assert got == expected.token_ids[: len(got)]


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=settings.default.max_examples, stateful_step_count=40)


def test_a_running_request_that_is_told_again_has_overtaken_nobody() -> None:
    """A plan's `admits` also has running requests with forced tokens, which the executor is told of in full."""
    machine = CoreMachine()
    capacity = Capacity(num_blocks=21, block_size=2, max_rows=2, max_step_tokens=40, max_model_len=MAX_MODEL_LEN)
    policies = make_policies(reserve=Watermark(share=0.0, growth_tokens=0))
    machine.start(engine=Engine(capacity, policies, enable_prefix_caching=True))
    forced = SamplingParams(max_tokens=38, temperature=0.0, seed=1, follows_grammar=True)
    plain = SamplingParams(max_tokens=18, temperature=0.0)
    for prompt, sampling in (((1, 2), forced), ((1,) * 19, plain)):
        machine.add(1, prompt, sampling, b"", (0, "", None), None, False, BASE)
    was_preempted = False
    while "r0" not in machine.ended:
        machine.steps(1)
        was_preempted |= machine.requests["r1"].status is RequestStatus.PREEMPTED
    assert was_preempted
    machine.teardown()


def test_what_was_sampled_is_told_before_the_end_that_a_command_brings() -> None:
    """With a grammar, the stepper tells a step's tokens only once the next one was submitted, or before commands."""
    machine = CoreMachine()
    capacity = Capacity(num_blocks=21, block_size=2, max_rows=2, max_step_tokens=40, max_model_len=MAX_MODEL_LEN)
    machine.start(engine=Engine(capacity, make_policies(), enable_prefix_caching=True))
    forced = SamplingParams(max_tokens=38, temperature=0.0, follows_grammar=True)
    machine.add(1, (1, 2), forced, b"", (0, "", None), None, False, BASE)
    machine.steps(2)
    machine.end_early(0, False)
    machine.steps(1)
    machine.teardown()
