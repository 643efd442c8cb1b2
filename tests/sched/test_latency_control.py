"""The budget that holds a latency, on the real scheduler and a virtual clock: soon settled when the load changes, and still."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest

from penstock.sched.policies.base import BudgetView, StepRecord
from penstock.sched.policies.budgets import PROBE_PERIOD, PROBE_SHARE, HoldLatency, StepCost
from penstock.sched.policies.presets import make_policies
from penstock.testing import Driver, HashExecutor, make_core, make_request
from penstock.types.events import Abort, Add, Command
from penstock.types.plan import Capacity, StepPlan
from penstock.types.request import Request
from penstock.types.result import StepResult, StepTiming

MS = 1_000_000
STREAMS, MORE_STREAMS = 8, 24
JOIN_STEP, LEAVE_STEP, NUM_STEPS = 120, 240, 360
NUM_STEPS_TO_SETTLE = 12
CAPACITY = Capacity(num_blocks=8001, block_size=16, max_rows=64, max_step_tokens=512, max_model_len=8192)


@dataclass(frozen=True)
class Step:
    num_decodes: int
    num_prefill_tokens: int
    duration_ms: float


def cost_ns(plan: StepPlan) -> float:
    """As of a small model on two cores: 12 ms for 32 decodes; a prompt's token takes 0.2 ms, twice that behind 2,000 others."""
    total = 2.0 * MS
    for row in plan.rows:
        total += 0.3 * MS if row.query_len == 1 else row.query_len * (0.2 + 0.0001 * (row.context_len + row.query_len / 2)) * MS
    return total


def run(budget: HoldLatency | str, noise: float = 0.0, stalls: float = 0.0) -> list[Step]:
    """Long prompts all the time, beside 8 streams, then 32, then 8. `noise` is the standard deviation of durations, as a share;
    a share of `stalls` takes four times as long."""
    rng = random.Random(0)
    if isinstance(budget, HoldLatency):
        budget.long_prefill_token_threshold = 256  # so that the streams need not wait until a prompt is computed
    core = make_core(CAPACITY, make_policies(budget=budget), enable_prefix_caching=False)
    prompts = [make_request(f"prompt-{idx}", 4000, max_tokens=1, arrival_ns=idx + 1) for idx in range(60)]
    now_ns, steps = 0, []
    core.apply([Add(request) for request in (*streams(0, STREAMS), *prompts)], now_ns)
    for number in range(NUM_STEPS):
        core.apply(commands(number), now_ns)
        plan = core.begin(now_ns)
        assert plan is not None
        duration_ns = cost_ns(plan) * max(0.5, rng.gauss(1, noise)) * (4 if rng.random() < stalls else 1)
        num_decodes = sum(row.query_len == 1 for row in plan.rows)
        steps.append(Step(num_decodes, plan.num_tokens - num_decodes, duration_ns / MS))
        now_ns += int(duration_ns)
        tokens = {row.request_id: (7,) for row in plan.rows if row.samples}
        core.finish(plan, StepResult(plan.step_id, tokens, StepTiming(0, 0)), now_ns)
    return steps


def streams(first: int, count: int) -> list[Request]:
    return [make_request(f"stream-{idx}", 2, max_tokens=4000, arrival_ns=0) for idx in range(first, first + count)]


def commands(number: int) -> list[Command]:
    if number == JOIN_STEP:
        return [Add(request) for request in streams(STREAMS, MORE_STREAMS)]
    if number == LEAVE_STEP:
        return [Abort(f"stream-{idx}") for idx in range(STREAMS, STREAMS + MORE_STREAMS)]
    return []


def settled(steps: Sequence[Step]) -> list[list[Step]]:
    """Those with decodes, some steps after the start and after each change."""
    starts = (0, JOIN_STEP, LEAVE_STEP, NUM_STEPS)
    return [list(steps[start + NUM_STEPS_TO_SETTLE : end]) for start, end in pairwise(starts)]


def durations_ms(steps: Sequence[Step]) -> list[float]:
    return sorted(step.duration_ms for step in steps)


SLO_MS = 26


@pytest.mark.parametrize("slo_ms", [SLO_MS, 50])
def test_the_latency_is_held_soon_after_the_load_changes_and_without_oscillation(slo_ms: int) -> None:
    for part in settled(run(HoldLatency(slo_itl_ns=slo_ms * MS))):
        durations = [step.duration_ms for step in part]
        assert max(durations) < 1.05 * slo_ms
        assert durations_ms(part)[len(part) // 10] > 0.85 * slo_ms, "time that prefills may have is not left unused"
        swings = [abs(after / before - 1) for before, after in pairwise(durations)]
        assert sorted(swings)[-len(swings) // 10] < 0.05, "nine in ten follow the one before, but for where a prompt ends"


@pytest.mark.parametrize("slo_ms", [SLO_MS, 50])
def test_with_noise_the_target_is_lower_so_that_few_steps_exceed_the_latency(slo_ms: int) -> None:
    for part in settled(run(HoldLatency(slo_itl_ns=slo_ms * MS), noise=0.05)):
        durations = durations_ms(part)
        assert durations[int(0.97 * len(durations))] < 1.03 * slo_ms
        assert durations[len(durations) // 2] > 0.75 * slo_ms


def test_stalls_do_not_stop_prefills() -> None:
    """One step in fifty takes four times as long; chunks are not the reason, and stay near what they were."""
    for calm, stalled in zip(settled(run(held())), settled(run(held(), stalls=0.02)), strict=True):
        tokens = [sum(step.num_prefill_tokens for step in part) for part in (calm, stalled)]
        assert tokens[1] > 0.6 * tokens[0]


def held() -> HoldLatency:
    return HoldLatency(slo_itl_ns=SLO_MS * MS)


def test_without_a_target_a_step_takes_at_most_twice_one_without_prefills() -> None:
    _, many, _ = settled(run(HoldLatency(fluent_itl_ns=0, min_chunk_tokens=1)))
    base_ms = 2.0 + 0.3 * (STREAMS + MORE_STREAMS)
    durations = durations_ms(many)
    assert 1.8 * base_ms < durations[len(durations) // 2] < 2.1 * base_ms
    assert durations[-1] < 2.2 * base_ms


def test_without_a_target_chunks_are_not_made_smaller_than_anybody_would_notice() -> None:
    for part in settled(run(HoldLatency())):
        assert 45 < durations_ms(part)[len(part) // 2] < 55


def test_without_the_controller_prefills_fill_the_step() -> None:
    for part in settled(run("decode-first")):
        assert durations_ms(part)[len(part) // 10] > 100


def test_without_decodes_the_whole_step_is_the_prefills() -> None:
    budget = held()
    budget.cost.learn(StepRecord(0, 512, 100 * MS))
    assert budget.limits(view(num_decodes=0)).max_tokens == 512
    assert budget.limits(view(num_decodes=1)).max_tokens < 512


def busy_ns(plan: StepPlan) -> float:
    """As where other programs use the cores: a step with more than one token in a row waits for threads that do not run."""
    return cost_ns(plan) + (100 * MS if any(row.query_len > 1 for row in plan.rows) else 0)


def slow_ns(plan: StepPlan) -> float:
    return 5 * cost_ns(plan)


def even_ns(plan: StepPlan) -> float:
    """Duration of a step of a model that takes long without prompts, and little more with them."""
    return 20 * MS + sum(row.query_len for row in plan.rows) * 0.1 * MS


def prompt_time_s(
    budget: HoldLatency | str,
    step_ns: Callable[[StepPlan], float],
    noise: float,
    on_step: Callable[[float], None] = lambda _ms: None,
) -> float:
    """Time of a prompt of 4,000 tokens beside a stream. Durations differ by `noise` in the standard deviation, as a share;
    `on_step` hears those beside the prompt, in milliseconds."""
    rng = random.Random(0)
    core = make_core(CAPACITY, make_policies(budget=budget), enable_prefix_caching=False)
    now_ns = start_ns = 0
    core.apply([Add(request) for request in streams(0, 1)], now_ns)
    for number in range(4000):
        if number == 40:
            start_ns = now_ns
            core.apply([Add(make_request("long", 4000, max_tokens=1, arrival_ns=now_ns))], now_ns)
        plan = core.begin(now_ns)
        assert plan is not None
        duration_ns = int(step_ns(plan) * max(0.3, rng.gauss(1, noise)))
        now_ns += duration_ns
        if number >= 40:
            on_step(duration_ns / MS)
        tokens = {row.request_id: (7,) for row in plan.rows if row.samples}
        core.finish(plan, StepResult(plan.step_id, tokens, StepTiming(0, 0)), now_ns)
        if "long" in tokens:
            return (now_ns - start_ns) / 1e9
    raise AssertionError("the prompt starved")


@pytest.mark.parametrize("noise", [0.0, 0.2])
@pytest.mark.parametrize("step_ns", [busy_ns, slow_ns])
def test_a_prompt_keeps_a_share_of_the_time_where_smaller_chunks_do_not_save_it(
    step_ns: Callable[[StepPlan], float], noise: float
) -> None:
    full_s = prompt_time_s("decode-first", step_ns, noise)
    assert prompt_time_s(HoldLatency(), step_ns, noise) < 3 * full_s


def test_a_prompt_keeps_a_share_of_the_time_whatever_the_target() -> None:
    assert prompt_time_s(HoldLatency(slo_itl_ns=MS), busy_ns, 0.0) < 3 * prompt_time_s("decode-first", busy_ns, 0.0)


@pytest.mark.parametrize("slo_ms", [24, 26, 35])
def test_a_target_is_held_if_a_small_chunk_keeps_it(slo_ms: int) -> None:
    """A step without prompts takes 20.1 ms, so there is less time than prompts have where no target can be held."""
    durations: list[float] = []
    prompt_time_s(HoldLatency(slo_itl_ns=slo_ms * MS), even_ns, 0.01, durations.append)
    settled = sorted(durations[NUM_STEPS_TO_SETTLE:])
    assert settled[int(0.98 * len(settled))] < 1.02 * slo_ms
    assert settled[len(settled) // 2] > 0.85 * slo_ms


def test_where_steps_hold_less_than_the_target_allows_equal_chunks_are_interrupted_as_well() -> None:
    budget = HoldLatency()
    budget.cost.learn(linear(1, 512, 130_000))
    budget.cost.prefill_ns = 10_000.0  # so that thousands would keep the target
    last, allowed = linear(1, 16, 0), []
    for _ in range(2 * PROBE_PERIOD):
        allowed.append(budget.limits(view(last_step=last)).max_tokens - 1)
        last = StepRecord(1, allowed[-1], 10 * MS)
    assert min(allowed) < max(allowed) / 2 == 511 / 2


def test_equal_chunks_are_interrupted_to_see_what_a_smaller_one_saves() -> None:
    budget = held()
    budget.cost.learn(linear(1, 512, 130_000))
    allowed: list[int] = []
    for _ in range(3 * PROBE_PERIOD):
        last = linear(1, allowed[-1], 0) if allowed else linear(1, 16, 0)
        allowed.append(budget.limits(view(last_step=last)).max_tokens - 1)
    usual = sorted(allowed)[len(allowed) // 2]
    assert 2 <= sum(tokens < usual / 2 for tokens in allowed[PROBE_SHARE:]) <= 3


def test_chunks_that_differ_by_themselves_are_not_interrupted() -> None:
    budget = held()
    budget.cost.learn(linear(1, 512, 130_000))
    for number in range(3 * PROBE_PERIOD):
        last = linear(1, 3 if number % 10 == 0 else 70, 0)
        assert budget.limits(view(last_step=last)).max_tokens > 30


def test_prefills_get_a_chunk_even_where_decodes_alone_take_too_long() -> None:
    budget = HoldLatency(slo_itl_ns=MS, min_chunk_tokens=16)
    budget.cost.learn(StepRecord(32, 0, 12 * MS))
    share_ns = budget.cost.least_ns(32) / 2  # a third of the step, as not even 16 tokens keep the target
    num_tokens = max(16, int(share_ns / budget.cost.token_ns(0)))
    assert budget.limits(view(num_decodes=32)).max_tokens == 32 + num_tokens
    budget.cost.prefill_ns = share_ns  # a token takes all of that
    assert budget.limits(view(num_decodes=32)).max_tokens == 32 + 16


def test_a_step_is_learnt_from_once() -> None:
    budget, step = held(), StepRecord(8, 0, 5 * MS)
    budget.limits(view(last_step=step))
    doubt = budget.cost.estimate_ns(StepRecord(8, 0, 0))
    budget.limits(view(last_step=step))
    assert budget.cost.estimate_ns(StepRecord(8, 0, 0)) == doubt


@pytest.mark.parametrize("max_tokens", [1, 8])
def test_a_long_prefill_takes_what_others_leave_and_half_at_least(max_tokens: int) -> None:
    """A step has 16 tokens; "a" is computed in two of them, while short prompts take half of each."""
    budget = HoldLatency(long_prefill_token_threshold=10)
    core = make_core(replace(CAPACITY, max_step_tokens=16), make_policies(budget=budget), enable_prefix_caching=False)
    driver = Driver(core, HashExecutor(core.scheduler.capacity))
    driver.turn(Add(make_request("a", 40, max_tokens=max_tokens)))
    shorts = [make_request(f"short-{idx}", 6, max_tokens=1) for idx in range(3)]
    plans = [driver.turn(*(Add(request) for request in shorts)), driver.turn(), driver.turn()]
    shapes = [{row.request_id: row.query_len for row in plan.rows} for plan in plans if plan]
    assert shapes[0] == {"short-0": 6, "short-1": 2, "a": 8}
    assert shapes[1] == {"short-1": 4, "short-2": 4, "a": 8}
    assert shapes[2]["a"] == 8


def view(last_step: StepRecord | None = None, **fields: int) -> BudgetView:
    values = {"max_step_tokens": 512, "num_decodes": 1, "prefill_context_len": 0}
    return BudgetView(**(values | fields), last_step=last_step)


def linear(num_decodes: int, num_prefill_tokens: int, num_pairs: int) -> StepRecord:
    duration_ns = 3 * MS + 300_000 * num_decodes + 200_000 * num_prefill_tokens + 100 * num_pairs
    return StepRecord(num_decodes, num_prefill_tokens, duration_ns, num_pairs)


def test_a_first_step_that_took_too_long_is_soon_forgotten() -> None:
    """As after a cold start: ten times as long as it should. Ten steps of decodes later, the budget knows what they take."""
    budget = HoldLatency()
    shapes = [(0, 512, 130_000), (8, 60, 1800), (16, 60, 1800), (24, 60, 1800), *[(32, 0, 0)] * 10]
    for number, shape in enumerate(shapes):
        step = linear(*shape)
        budget.limits(view(last_step=replace(step, duration_ns=step.duration_ns * 10) if number == 0 else step))
    assert budget.cost.estimate_ns(StepRecord(32, 0, 0)) == pytest.approx(linear(32, 0, 0).duration_ns, rel=0.1)


def test_prefills_that_seem_to_cost_less_than_nothing_are_given_the_whole_step() -> None:
    """Steps with prefills are the shorter ones, as where something else slows the others. Later they are not, and are held."""
    budget, last = held(), StepRecord(8, 0, 10 * MS)
    for _ in range(1000):
        for step in (StepRecord(8, 0, 10 * MS), StepRecord(8, 100, 9 * MS)):
            num_tokens = budget.limits(BudgetView(512, 8, 0, last)).max_tokens
            last = step
    assert num_tokens == 512
    for _ in range(100):
        num_prefill_tokens = budget.limits(BudgetView(512, 8, 0, last)).max_tokens - 8
        last = StepRecord(8, num_prefill_tokens, int((10 + 0.2 * num_prefill_tokens) * MS))
    assert 0.8 * SLO_MS * MS < last.duration_ns < 1.05 * SLO_MS * MS


class TestStepCost:
    def test_every_part_is_found(self) -> None:
        cost, rng = StepCost(), random.Random(0)
        for _ in range(400):
            shape = rng.randrange(1, 40), rng.randrange(200), rng.randrange(200_000)
            cost.learn(linear(*shape))
        parts = cost.fixed_ns, cost.decode_ns, cost.prefill_ns, cost.attention_ns
        assert parts == pytest.approx((3e6, 3e5, 2e5, 100), rel=0.2)

    def test_equal_steps_spoil_no_part(self) -> None:
        """Thousands of decodes teach nothing about prefills, so what was known of them stays."""
        cost = StepCost()
        for shape in ((0, 512, 130_000), (0, 512, 390_000), (0, 100, 5000), (32, 0, 0), (4, 0, 0)) * 3:
            cost.learn(linear(*shape))
        before = cost.token_ns(1000)
        for _ in range(5000):
            cost.learn(StepRecord(32, 0, 20 * MS))
        assert cost.estimate_ns(StepRecord(32, 0, 0)) == pytest.approx(20 * MS, rel=0.02)
        assert cost.token_ns(1000) == pytest.approx(before, rel=0.3)

    def test_a_part_that_is_nothing_leaves_the_error_to_the_others(self) -> None:
        """A first step of two tokens was slow; no attention costs anything, and nothing less."""
        cost = StepCost()
        cost.learn(StepRecord(0, 2, 120 * MS, 1))
        for _ in range(20):
            cost.learn(StepRecord(1, 16, 30 * MS, 16 * 500))
        assert cost.estimate_ns(StepRecord(1, 16, 0, 16 * 500)) == pytest.approx(30 * MS, rel=0.1)

    def test_a_stall_teaches_little(self) -> None:
        cost = StepCost()
        for _ in range(50):
            cost.learn(StepRecord(32, 0, 12 * MS))
        cost.learn(StepRecord(32, 0, 1200 * MS))
        assert cost.estimate_ns(StepRecord(32, 0, 0)) < 14 * MS

    def test_a_machine_that_became_slower_is_noticed_within_thirty_steps(self) -> None:
        cost = StepCost()
        for _ in range(100):
            cost.learn(StepRecord(32, 40, 20 * MS, 1000))
        for _ in range(30):
            cost.learn(StepRecord(32, 40, 40 * MS, 1000))
        assert cost.estimate_ns(StepRecord(32, 40, 0, 1000)) == pytest.approx(40 * MS, rel=0.1)
