"""Background requests get what others leave, and no other request is planned differently for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given

from penstock.sched.adapters import LOAD_TIMEOUT_NS
from penstock.sched.background import PAUSE_NS, Share
from penstock.sched.policies.base import UNLIMITED, Budget, BudgetView, GateDecision, GateView, StepLimits, StepRecord
from penstock.sched.policies.budgets import DecodeFirst, HoldLatency
from penstock.sched.policies.gates import Continuous
from penstock.sched.policies.orders import FirstComeFirstServed
from penstock.sched.policies.presets import TABLES, make_policies
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request
from penstock.testing.driver import STEP_NS
from penstock.testing.hash_executor import DEFAULT_CAPACITY
from penstock.types.events import Abort, Add
from penstock.types.plan import StepPlan
from penstock.types.request import FinishReason, Request, RequestStatus
from penstock.types.sampling import BeamParams
from penstock.types.stats import StepCounts, WaitReason
from support.fake_adapters import FakeAdapters, make_adapter
from support.half_right import HalfRight
from support.stepwise import Device
from support.strategies import JOB, Engine, Workload, engines, workloads

MS = 1_000_000
CAPACITY = replace(DEFAULT_CAPACITY, block_size=4, num_blocks=101, max_rows=4, max_step_tokens=32, max_model_len=200)


def line(idx: int, prompt: int = 8, max_tokens: int = 40, **fields: Any) -> Request:
    return make_request(f"line-{idx}", [5 + idx] * prompt, max_tokens=max_tokens, background=True, arrival_ns=idx, **fields)


def person(idx: int, prompt: int = 8, max_tokens: int = 40, **fields: Any) -> Request:
    return make_request(f"person-{idx}", [20 + idx] * prompt, max_tokens=max_tokens, arrival_ns=1000 + idx, **fields)


def make_driver(*requests: Request, share: float = 0.0, budget: object = None, order: str = "fcfs", **capacity: int) -> Driver:
    policies = make_policies(order=order, budget=budget or DecodeFirst(), background_share=share)
    shape = replace(CAPACITY, **capacity)
    driver = Driver(make_core(shape, policies), HashExecutor(shape))
    driver.core.apply([Add(request) for request in requests], 0)
    return driver


def rows_of(plan: StepPlan | None, kind: str = "") -> set[str]:
    return {row.request_id for row in plan.rows if row.request_id.startswith(kind)} if plan is not None else set()


def finish(driver: Driver, *requests: Request) -> None:
    while driver.core.has_work:
        driver.turn()
        driver.core.check()
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=driver.executor.model, max_model_len=200)
        assert tuple(driver.outcomes[request.request_id].token_ids) == expected.token_ids


# nobody waits for them


def play(engine: Engine, workload: Workload, *, with_job: bool) -> tuple[list[list[tuple[object, ...]]], list[int]]:
    """Return the rows of other requests in each turn, and how often each was preempted.

    Without guesses: what they cost is learned from all rows.
    """
    core, executor = replace(engine, capacity=replace(engine.capacity, checks_guesses=False)).make()
    driver, others, history = Driver(core, executor), [], []
    requests = [request for request in workload.requests() if with_job or not request.background]
    script = workload.script(requests)
    for turn in range(400):
        known = {request.request_id for request in requests}
        commands = [one for one in script.pop(turn, ()) if isinstance(one, Add) or one.request_id in known]
        plan = driver.turn(*commands)
        core.check()
        driver.clock.advance_to((turn + 1) * STEP_NS)  # also where there was nothing to compute
        others = [request for request in requests if not request.background]
        names = {request.request_id for request in others}
        rows = () if plan is None else plan.rows
        history.append(sorted((row.request_id, row.context_len, row.query_len) for row in rows if row.request_id in names))
        if not script and not core.has_work:
            break
    assert not core.has_work, "a request starved"
    while history and not history[-1]:  # the job ends later
        history.pop()
    return history, [request.num_preemptions for request in others]


@given(engine=engines(), workload=workloads())
def test_others_are_planned_as_if_there_was_no_job(engine: Engine, workload: Workload) -> None:
    """In each step: without a cache, whose content differs, and a budget of time, which learns from all rows."""
    policies = replace(engine.policies, gate=Continuous(), budget=DecodeFirst(), background_share=0.0)
    engine = replace(engine, policies=policies, enable_prefix_caching=False, depth=1)
    assert play(engine, workload, with_job=True) == play(engine, workload, with_job=False)


def with_room_for_all(engine: Engine, workload: Workload, **policies: object) -> tuple[Engine, Workload]:
    """Nobody is paused and nothing cached is lost. The job's prompts are found by itself alone."""
    num_tokens = max(engine.capacity.max_step_tokens, len(workload.prompts))
    num_blocks = 20 * engine.capacity.num_blocks
    capacity = replace(engine.capacity, num_blocks=num_blocks, max_rows=40, max_step_tokens=num_tokens)
    policies = {"gate": Continuous(), "budget": DecodeFirst(), "background_share": 0.0, **policies}
    salts = [b"job" if tenant == JOB else salt for (_, tenant, _), salt in zip(workload.ranks, workload.salts, strict=True)]
    engine = replace(engine, capacity=capacity, policies=replace(engine.policies, **policies), enable_prefix_caching=True)
    return engine, replace(workload, salts=tuple(salts))


@given(engine=engines(), workload=workloads())
def test_others_find_and_wait_for_prompts_as_if_there_was_no_job(engine: Engine, workload: Workload) -> None:
    """Also with two steps in flight."""
    engine, workload = with_room_for_all(engine, workload)
    assert play(engine, workload, with_job=True) == play(engine, workload, with_job=False)


@given(engine=engines(), workload=workloads(has_early_ends=False))
def test_a_share_of_the_time_changes_no_step_of_others(engine: Engine, workload: Workload) -> None:
    """They have the same steps, with those of the job between them."""
    engine, workload = with_room_for_all(engine, workload, order=FirstComeFirstServed(), background_share=0.3)
    workload = replace(workload, arrival_turns=(0,) * len(workload.prompts))
    (found, _), (wanted, _) = [play(replace(engine, depth=1), workload, with_job=with_job) for with_job in (True, False)]
    assert [rows for rows in found if rows] == [rows for rows in wanted if rows]


@pytest.mark.parametrize("order", TABLES["order"])
def test_a_row_is_taken_from_the_background_under_every_order(order: str) -> None:
    lines = [line(idx, priority=-5) for idx in range(5)]
    driver = make_driver(*lines, order=order)
    driver.turn()
    assert len(rows_of(driver.turn(), "line")) == 4
    people = [person(idx, priority=5) for idx in range(3)]
    plan = driver.turn(*map(Add, people))
    assert rows_of(plan, "person") == {"person-0", "person-1", "person-2"}
    assert rows_of(plan, "line") == {"line-0"}, "the last to come is paused first"
    finish(driver, *lines, *people)
    assert not any(request.num_preemptions for request in people)


def test_memory_is_taken_from_the_background() -> None:
    """24 blocks: two lines hold 20 of them; the person wants 12 at once, and then grows."""
    lines, one = [line(idx, prompt=40) for idx in range(2)], person(0, prompt=45)
    driver = make_driver(*lines, num_blocks=25, max_step_tokens=100)
    driver.turn()
    assert rows_of(driver.turn(Add(one)), "person") == {"person-0"}
    finish(driver, *lines, one)
    assert one.num_preemptions == 0


def test_nobody_loses_memory_to_room_in_which_the_background_could_grow() -> None:
    """Four lines hold 12 of 40 blocks, and could grow to 48."""
    lines, one = [line(idx) for idx in range(4)], person(0, max_tokens=4)
    driver = make_driver(*lines, num_blocks=41, max_rows=5)
    driver.turn()
    driver.turn()
    assert "person-0" in rows_of(driver.turn(Add(one)))
    assert not any(request.num_preemptions for request in lines)
    finish(driver, *lines, one)


def short_of_memory(*requests: Request, num_blocks: int = 12, share: float = 0.0) -> Driver:
    """Blocks of 4 tokens. None is kept back at the door, and the last to come would be preempted."""
    shape = replace(CAPACITY, num_blocks=num_blocks + 1)
    policies = make_policies(budget=DecodeFirst(), reserve="chunk", victim="latest", background_share=share)
    driver = Driver(make_core(shape, policies, enable_prefix_caching=False), HashExecutor(shape))
    driver.core.apply([Add(request) for request in requests], 0)
    return driver


def test_nobody_loses_memory_while_the_background_has_some() -> None:
    people, lines = [person(idx, max_tokens=12) for idx in range(2)], [line(0, prompt=12, max_tokens=28)]
    finish(short_of_memory(*people, *lines), *people, *lines)
    assert [request.num_preemptions > 0 for request in (*people, *lines)] == [False, False, True]


def test_one_joins_in_the_step_in_which_another_takes_memory_from_the_background() -> None:
    first, second, lines = person(0, max_tokens=28), person(1, prompt=1, max_tokens=4), [line(0, prompt=18, max_tokens=28)]
    driver = short_of_memory(first, *lines, num_blocks=13)
    while driver.core.scheduler.kv.pool.num_available or first.num_tokens % 4 != 1:
        driver.turn()
    assert rows_of(driver.turn(Add(second))) == {"person-0", "person-1"}
    finish(driver, first, second, *lines)


def test_a_lower_class_keeps_its_row_while_the_background_has_one() -> None:
    low, lines, high = person(0, prompt=1, priority=5), [line(0, prompt=20, priority=-5)], person(1, priority=1)
    driver = make_driver(low, *lines, order="priority", max_rows=2)
    driver.turn()
    assert rows_of(driver.turn(Add(high))) == {"person-0", "person-1"}
    finish(driver, low, high, *lines)
    assert low.num_preemptions == 0


def test_a_job_teaches_nothing_about_the_answers_of_others() -> None:
    lines = [line(idx, max_tokens=3) for idx in range(20)]
    driver = make_driver(*lines)
    finish(driver, *lines)
    one = person(0)
    driver.turn(Add(one))
    assert one.predicted_new_tokens == make_policies().predictor.predict(one)


class FourAtATime(Continuous):
    def decide(self, view: GateView) -> GateDecision:
        return GateDecision(max(0, 4 - view.num_running))


def test_a_gate_does_not_count_the_background_where_it_is_asked_for_others() -> None:
    lines, people = [line(idx) for idx in range(6)], [person(idx) for idx in range(4)]
    policies = replace(make_policies(budget=DecodeFirst()), gate=FourAtATime())
    shape = replace(CAPACITY, max_rows=16, max_step_tokens=100)
    driver = Driver(make_core(shape, policies), HashExecutor(shape))
    driver.turn(*map(Add, lines))
    assert len(rows_of(driver.turn(), "line")) == 4
    assert rows_of(driver.turn(*map(Add, people)), "person") == {one.request_id for one in people}
    finish(driver, *lines, *people)


def test_who_joins_in_a_step_takes_no_turn_at_the_gate_from_the_background() -> None:
    lines, people = [line(idx) for idx in range(4)], [person(idx) for idx in range(4)]
    policies = replace(make_policies(budget=DecodeFirst()), gate=FourAtATime())
    shape = replace(CAPACITY, max_rows=16, max_step_tokens=100)
    driver = Driver(make_core(shape, policies), HashExecutor(shape))
    assert len(rows_of(driver.turn(*map(Add, [*lines, *people])))) == 8
    finish(driver, *lines, *people)


def test_what_an_owed_step_promises_binds_nobody_if_it_gets_no_row() -> None:
    """The lines wait for adapters that never come, and rows are kept for them."""
    policies = make_policies(budget=DecodeFirst(), background_share=0.5)
    adapters = FakeAdapters(worker=lambda job, is_urgent: None)
    shape = replace(CAPACITY, max_rows=8, max_step_tokens=100)
    driver = Driver(make_core(shape, policies, adapters=adapters), HashExecutor(shape))
    first, people = person(0), [person(idx) for idx in range(1, 8)]
    driver.turn(Add(first))
    driver.turn(*[Add(line(idx, adapter=make_adapter(idx))) for idx in range(8)])
    driver.turn()
    assert driver.core.scheduler._share.is_owed
    assert len(rows_of(driver.turn(*map(Add, people)), "person")) == 8


def with_adapters_that_never_come(*requests: Request) -> Driver:
    adapters = FakeAdapters(worker=lambda job, is_urgent: None)
    driver = Driver(make_core(CAPACITY, make_policies(budget=DecodeFirst()), adapters=adapters), HashExecutor(CAPACITY))
    driver.turn(*map(Add, requests))
    return driver


def test_who_waits_for_an_adapter_lets_others_take_rows_from_the_background() -> None:
    driver = with_adapters_that_never_come(*[line(idx) for idx in range(4)])
    assert len(rows_of(driver.turn(), "line")) == 4
    late, others = person(0, adapter=make_adapter(1)), [person(idx) for idx in range(1, 3)]
    assert rows_of(driver.turn(*map(Add, [late, *others])), "person") == {"person-1", "person-2"}
    driver.clock.advance(LOAD_TIMEOUT_NS)
    driver.turn()
    assert late.finish_reason is FinishReason.REJECTED
    finish(driver, *others)


def with_two_adapters(*requests: Request, **policies: Any) -> Driver:
    core = make_core(CAPACITY, make_policies(**policies), adapters=FakeAdapters(), max_adapters=2)
    driver = Driver(core, HashExecutor(CAPACITY))
    driver.turn(*map(Add, requests))
    driver.turn()
    return driver


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_place_of_an_adapter_is_taken_from_the_background(share: float) -> None:
    """Two adapters may run, each with two lines. With a share the oldest line keeps the place of its own."""
    lines = [line(idx, adapter=make_adapter(1 + idx % 2)) for idx in range(4)]
    driver = with_two_adapters(*lines, budget=DecodeFirst(), background_share=share)
    assert len(rows_of(driver.turn(), "line")) == 4
    one = person(0, adapter=make_adapter(3))
    driver.turn(Add(one))
    assert one.status is RequestStatus.RUNNING
    assert sum(request.num_preemptions for request in lines) == 2
    assert not share or lines[0].num_preemptions == 0
    finish(driver)


def test_who_may_not_join_yet_takes_no_place_of_an_adapter() -> None:
    """One long prompt at a time is computed, and a second one waits for it."""
    budget = DecodeFirst(long_prefill_token_threshold=16, max_long_partial_prefills=1)
    lines = [line(idx, adapter=make_adapter(1 + idx)) for idx in range(2)]
    driver = with_two_adapters(*lines, budget=budget)
    long, second = person(0, prompt=100), person(1, prompt=100, adapter=make_adapter(3))
    driver.turn(Add(long), Add(second))
    while long.num_behind > 1:
        assert not any(request.num_preemptions for request in lines)
        driver.turn()
    driver.turn()
    assert second.status is RequestStatus.RUNNING
    assert sum(request.num_preemptions for request in lines) == 1
    finish(driver)


def test_who_lacks_memory_takes_no_place_of_an_adapter() -> None:
    """Pausing all requests of the lower class would not make enough room."""
    lower = [person(idx, adapter=make_adapter(1 + idx), priority=1) for idx in range(2)]
    driver = with_two_adapters(person(2, prompt=160), *lower, budget=DecodeFirst(), order="priority", reserve="no-evict")
    for _ in range(6):
        driver.turn()
    one = person(3, prompt=180, max_tokens=20, adapter=make_adapter(3))
    driver.turn(Add(one))
    assert not any(request.num_preemptions for request in lower)
    assert one.status is RequestStatus.WAITING
    assert driver.core.snapshot.waits_for is WaitReason.ADAPTER
    finish(driver)


def test_beam_searches_of_the_background_wait_as_nobody() -> None:
    beams = BeamParams(width=3)
    driver = make_driver()
    for group in range(3):
        for idx in range(3):
            one = line(group)
            one.request_id, one.parent_id = f"{group}-{idx}", f"search-{group}"
            one.sampling = replace(one.sampling, beams=beams, logprobs=6)
            assert driver.core.apply([Add(one)], 0) is not None
    driver.turn()
    load = driver.core.snapshot
    assert (load.num_running, load.num_waiting, load.num_background) == (0, 0, 9)


class DearDecodes(Budget):
    """Lets the background decode two rows in a step."""

    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens, fill_tokens=8, decode_tokens=4.0)


class CheapDecodes(Budget):
    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens, decode_tokens=0.1)


def test_decodes_that_cost_little_do_not_exceed_the_step() -> None:
    driver = make_driver(*[line(idx) for idx in range(7)], budget=CheapDecodes(), max_rows=8, max_step_tokens=8)
    while driver.core.num_running < 7 or len(driver.turn().rows) < 7:
        driver.turn()
    plan = driver.turn(Add(person(0, prompt=6)))
    assert (rows_of(plan, "person"), plan.num_tokens) == ({"person-0"}, 8)
    finish(driver)


def test_a_beam_search_of_the_background_ends_though_not_all_its_beams_decode_in_one_step() -> None:
    """Beams that have their token wait for the others, and use up no row."""
    search = [line(0, max_tokens=6) for _ in range(4)]
    for idx, one in enumerate(search):
        one.request_id, one.parent_id = f"line-{idx}", "search"
        one.sampling = replace(one.sampling, beams=BeamParams(width=4), logprobs=8)
    driver = make_driver(*search, budget=DearDecodes())
    for _ in range(100):
        driver.turn()
        driver.core.check()
    assert not driver.core.has_work


def test_a_block_that_lines_share_counts_once() -> None:
    """The rest of what is held is what others would hold without the job."""
    people, lines = [person(idx, prompt=40) for idx in range(3)], []
    for idx in range(4):
        lines.append(make_request(f"line-{idx}", [7] * 40 + [10 + idx] * 4, max_tokens=40, background=True, arrival_ns=idx))
    held = []
    for job in ([], lines):
        driver = make_driver(*people, *job, max_rows=8, max_step_tokens=400)
        for _ in range(3):
            driver.turn()
        load = driver.core.snapshot
        held.append(load.num_blocks_held - load.num_blocks_background)
        driver.turn(*[Abort(request.request_id) for request in people])
        people = [person(idx, prompt=40) for idx in range(3)]
    assert held == [33, 33]
    assert load.num_blocks_background == 18, "10 are shared, and each line has two of its own"


def test_what_the_background_waits_for_is_told_to_nobody() -> None:
    driver = make_driver(*[line(idx) for idx in range(9)])
    driver.turn()
    load = driver.core.snapshot
    assert (load.num_running, load.num_waiting, load.num_rows_free, load.waits_for) == (0, 0, 4, WaitReason.NOTHING)
    assert load.num_background == 9
    assert load.num_blocks_background == load.num_blocks_held == 8


def test_a_prompt_waits_for_an_equal_one_unless_that_is_of_the_background() -> None:
    job = line(0, prompt=100)
    people = [make_request(f"person-{idx}", (*job.prompt_token_ids, 1, 2, 3, idx), max_tokens=4) for idx in range(3)]
    driver = make_driver(job, max_step_tokens=64)
    driver.turn()  # a part of the line's prompt
    assert rows_of(driver.turn(*map(Add, people)), "person") == {"person-0"}
    finish(driver, job, *people)
    computed = [one.num_prompt_tokens - one.num_cached_tokens for one in people]
    assert computed == [40, 1, 1], "the first computes what the line has not, and the others wait for it"


def test_a_planned_step_is_collected_where_someone_must_be_paused() -> None:
    """With two steps in flight no row is taken from a step that is computed, and nobody waits longer than that."""
    lines = [line(idx, prompt=4) for idx in range(4)]
    device = Device(make_core(replace(CAPACITY, max_model_len=60, num_blocks=61), make_policies(budget=DecodeFirst())))
    device.begin(*map(Add, lines))
    device.begin()
    device.finish()
    assert device.begin(Add(person(0, prompt=4))) is None, "a line must be paused first"
    device.finish()
    assert any(name == "person-0" for name, _, _ in device.begin() or ())
    device.run()


class NoneBesideOthers(Budget):
    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens, fill_tokens=view.max_step_tokens if view.is_idle else 0)


def test_a_line_that_rests_and_lacks_a_block_keeps_no_step_from_being_planned_ahead() -> None:
    """4 blocks of 4 tokens: the line has one and wants a second. The person has the others from its ninth token on."""
    policies = make_policies(budget=NoneBesideOthers(), reserve="chunk")
    shape = replace(CAPACITY, max_model_len=60, num_blocks=5)
    device = Device(make_core(shape, policies, enable_prefix_caching=False))
    job, one = line(0, prompt=4, max_tokens=4), person(0, prompt=6, max_tokens=7)
    device.begin(Add(job))
    device.finish()
    device.begin(Add(one))
    for context_len in range(6, 12):
        assert device.begin() == [("person-0", context_len, 1)]
        device.finish()
    device.run()
    assert job.num_preemptions == 0


# what they get


def test_they_fill_the_rows_and_tokens_that_are_left() -> None:
    people, lines = [person(idx) for idx in range(2)], [line(idx, prompt=12) for idx in range(4)]
    driver = make_driver(*lines, *people)
    plan = driver.turn()
    assert [row.query_len for row in plan.rows if row.request_id.startswith("person")] == [8, 8]
    assert sum(row.query_len for row in plan.rows) == 32, "the step is full"
    assert len(rows_of(driver.turn())) == 4
    finish(driver, *lines, *people)


def taught(**fields: float) -> HoldLatency:
    """A budget that knows: a step takes 2 ms and 1 ms for each token. Prompts may take it to 50 ms, lines alone to 14 ms."""
    budget = HoldLatency(**fields)
    budget.cost.learn(StepRecord(1, 0, 3 * MS))
    budget.cost.fixed_ns, budget.cost.decode_ns, budget.cost.any_prefill_ns = 2.0 * MS, 1.0 * MS, 0.0
    budget.cost.prefill_ns, budget.cost.attention_ns = 1.0 * MS, 0.0
    return budget


@pytest.mark.parametrize(("second", "reason"), [(20, WaitReason.PREFIX), (21, WaitReason.TOKENS)])
def test_lines_join_while_others_wait_for_what_lines_do_not_use(second: int, reason: WaitReason) -> None:
    """One long prompt is computed at a time, 8 tokens of 32 a step. The second person waits for it, or for a part of it."""
    people = [make_request(f"person-{idx}", [token] * 60, max_tokens=4) for idx, token in enumerate((20, second))]
    driver = make_driver(*people, budget=DecodeFirst(long_prefill_token_threshold=8, max_long_partial_prefills=1))
    driver.turn()
    job = line(0)
    assert rows_of(driver.turn(Add(job))) == {"person-0", "line-0"}
    assert driver.core.scheduler.news.waits_for is reason
    finish(driver, job, *people)


def fill_tokens(num_decodes: int, most_ns: int = 0, *, is_idle: bool = False, **fields: float) -> int:
    view = BudgetView(512, num_decodes, 0, None, most_ns, has_background=True, is_idle=is_idle)
    return taught(**fields).limits(view).fill_tokens - num_decodes


def test_they_get_a_tenth_of_the_time_that_a_prompt_could_have_and_a_quarter_alone() -> None:
    assert fill_tokens(0) == 16, "a chunk, as every prompt gets"
    assert fill_tokens(0, fluent_itl_ns=302 * MS) == 30, "beside a prompt"
    assert fill_tokens(0, fluent_itl_ns=302 * MS, is_idle=True) == 75
    assert fill_tokens(8) == 4  # 10 ms without them, 50 ms with a prompt
    assert fill_tokens(100) == 10  # 102 ms, and twice that
    assert fill_tokens(8, slo_itl_ns=44 * MS) == 3  # the slowest 1 % of the steps are a tenth longer
    assert fill_tokens(8, fill_share=0.25, most_ns=13 * MS) == 3  # another model waits for the machine
    assert fill_tokens(50, slo_itl_ns=44 * MS) == 0, "the target is missed without them"
    assert taught().limits(BudgetView(512, 8, 0, None)).fill_tokens == UNLIMITED, "not computed where there are none"
    assert HoldLatency().limits(BudgetView(512, 8, 0, None, has_background=True)).fill_tokens == 40, "a short first step"


def test_a_decode_of_the_background_counts_as_long_as_it_takes() -> None:
    budget = taught()
    budget.cost.decode_ns = 3.0 * MS
    people, lines = [person(0, prompt=1)], [line(idx, prompt=1) for idx in range(8)]
    driver = make_driver(*lines, budget=HoldLatency(fill_share=0.25), max_rows=16)
    driver.turn(*map(Add, people))
    driver.core.scheduler._policies.budget.cost = budget.cost
    plan = driver.core.begin(driver.clock.now_ns())
    # 5 ms with the person alone, and a quarter of the 45 that are left
    assert len(rows_of(plan, "line")) == 3
    assert "person-0" in rows_of(plan)


def guesses_of_a_person(job: Sequence[Request], fill_share: float) -> list[int]:
    """Return how many guesses each of its steps has."""
    shape = replace(CAPACITY, checks_guesses=True, max_scored=32, num_blocks=201)
    executor = HashExecutor(shape)
    policies = make_policies(budget=HoldLatency(fill_share=fill_share), guesser=HalfRight(executor.model, shape))
    driver, nums = Driver(make_core(shape, policies), executor), list[int]()
    one = person(0, max_tokens=60)
    driver.turn(*map(Add, [one, *job]))
    while one.status is not RequestStatus.FINISHED:
        plan = driver.turn()
        assert not any(request_id.startswith("line") for request_id in plan.guesses)
        nums.append(len(plan.guesses.get("person-0", ())))
    return nums


def test_a_job_leaves_others_their_guesses() -> None:
    assert guesses_of_a_person([line(0)], 0.0) == guesses_of_a_person([], 0.0)
    beside_lines = guesses_of_a_person([line(idx, max_tokens=100) for idx in range(3)], 0.3)
    assert sum(beside_lines) > 0.7 * sum(guesses_of_a_person([], 0.3)) > 0


def test_a_line_that_gets_no_row_keeps_its_memory() -> None:
    lines, one = [line(idx) for idx in range(4)], person(0, max_tokens=100)
    driver = make_driver(*lines, budget=HoldLatency(slo_itl_ns=1), max_rows=8)  # no time is left beside anybody
    while len(rows_of(driver.turn(), "line")) < 4 or not driver.core.scheduler._policies.budget.cost.is_known:
        pass
    driver.turn(Add(one))
    for _ in range(20):
        assert rows_of(driver.turn()) == {"person-0"}
    assert all(request.status is RequestStatus.RUNNING for request in lines), "none lost its blocks"
    driver.turn(Abort("person-0"))
    assert len(rows_of(driver.turn(), "line")) > 0, "they go on at once"
    finish(driver, *lines)


def test_the_share_of_the_time_is_kept_beside_others_that_want_all_of_it() -> None:
    """Nothing is left beside others, and they wait for rows. The job gets steps of its own, and its oldest line its row."""
    for share in (0.0, 0.25):
        people = [person(idx, prompt=30, max_tokens=60) for idx in range(12)]
        budget = HoldLatency(slo_itl_ns=1)
        job = line(0, max_tokens=150)
        driver = make_driver(job, share=share, budget=budget, max_rows=2)
        driver.turn()
        driver.turn(*map(Add, people))
        num_steps, got = 0, 0.0
        while driver.core.scheduler.num_waiting > 3:
            plan = driver.turn()
            num_steps += 1
            of_job = sum(row.query_len for row in plan.rows if row.request_id == "line-0")
            got += of_job / sum(row.query_len for row in plan.rows)
        assert num_steps > 100
        assert people[0].num_preemptions == 0
        assert not share or job.num_preemptions == 0, "the oldest line keeps its row"
        assert got == 0 if not share else share * num_steps - 2 < got < share * num_steps + 2
        finish(driver)


def test_others_wait_for_the_same_while_the_background_has_a_step() -> None:
    people, job = [person(idx, prompt=30, max_tokens=60) for idx in range(12)], line(0, max_tokens=150)
    driver = make_driver(job, *people, share=0.5, max_rows=2)
    found, num_owed = set[WaitReason](), 0
    driver.turn()
    while driver.core.scheduler.num_waiting > 3:
        num_owed += not rows_of(driver.turn(), "person")
        found.add(driver.core.scheduler.news.waits_for)
    assert num_owed > 50
    assert found == {WaitReason.ROWS}
    finish(driver)


def test_the_only_row_is_kept_for_no_line() -> None:
    job, one = line(0), person(0, max_tokens=4)
    driver = make_driver(job, share=0.5, max_rows=1)
    driver.turn()
    assert rows_of(driver.turn(Add(one))) == {"person-0"}
    finish(driver, job, one)


def test_a_request_that_needs_much_memory_gets_it_before_another_line_keeps_its_place() -> None:
    """The first line keeps its blocks until it ends. Then whoever waits has them, though lines that run came before it."""
    lines, big = [line(idx, max_tokens=20 + 4 * idx) for idx in range(8)], person(0, prompt=88, max_tokens=8)
    driver = make_driver(*lines, share=0.5, num_blocks=26, max_rows=4, max_step_tokens=100)
    while len(rows_of(driver.turn())) < 3:
        pass
    driver.turn(Add(big))
    while big.status is RequestStatus.WAITING:
        assert lines[1].status is not RequestStatus.FINISHED, "nobody else may be kept"
        driver.turn()
    assert lines[0].num_preemptions == 0
    finish(driver, *lines, big)
    assert big.num_preemptions == 0


def test_the_line_that_keeps_its_place_loses_it_to_the_most_senior_alone() -> None:
    for num_people, num_lost in ((2, [0, 1, 0]), (1, [0, 1])):
        requests = [*[person(idx, max_tokens=28) for idx in range(num_people)], line(0, max_tokens=28)]
        driver = short_of_memory(*requests, num_blocks=7 * num_people + 3, share=0.5)
        finish(driver, *requests)
        assert [request.num_preemptions for request in requests] == num_lost


def test_a_share_that_cannot_be_had_yet_is_not_saved_up() -> None:
    share, now_ns = Share(0.5), 100_000 * MS
    share.pass_time(0, has_work=True)
    share.pass_time(now_ns, has_work=True)
    num_steps = 0
    while share.is_owed:
        share.count(100 * MS, StepCounts(num_tokens=1, num_background_tokens=1))
        now_ns += 100 * MS
        share.pass_time(now_ns, has_work=True)
        num_steps += 1
    assert num_steps == 10, "of 100 s without its half, one second counts"
    share.count(1000 * MS, StepCounts(num_tokens=1, num_background_tokens=1))
    share.pass_time(now_ns, has_work=False)
    share.pass_time(now_ns + 1000 * MS, has_work=True)
    assert not share.is_owed, "it had no work to do in this time"
    share.pass_time(now_ns + 1001 * MS, has_work=True)
    assert share.is_owed, "nor is what it had too much, once it has nothing to do"


# beside other models of the machine


def test_the_background_waits_while_other_models_serve_and_people_of_its_own_do_not() -> None:
    are_serving, lines, one = [False], [line(idx) for idx in range(2)], person(0, max_tokens=4)
    driver = make_driver(*lines, budget=HoldLatency())
    scheduler = driver.core.scheduler
    scheduler._others_serve = lambda _: are_serving[0]
    for _ in range(9):
        assert len(rows_of(driver.turn())) == 2
    are_serving[0] = True
    for _ in range(50):
        now_ns = driver.clock.now_ns()
        assert driver.turn() is None
        assert driver.core.next_wakeup_ns(now_ns) == now_ns + PAUSE_NS
        driver.clock.advance(PAUSE_NS)
    plan = driver.turn(Add(one))
    assert rows_of(plan) == {"person-0", "line-0", "line-1"}, "lines fill the steps of people"
    while one.status is not RequestStatus.FINISHED:
        driver.turn()
    assert driver.turn() is None
    driver.clock.advance(PAUSE_NS)
    are_serving[0] = False
    assert len(rows_of(driver.turn())) == 2
    finish(driver, *lines, one)
    cost = scheduler._policies.budget.cost
    assert cost.estimate_ns(StepRecord(2, 0, 0)) < 1.5 * STEP_NS, "the pauses belong to no step"


def test_a_static_batch_of_the_background_pauses_too_unless_people_wait_for_its_end() -> None:
    are_serving = [False]
    policies = make_policies("static", settings={"gate": {"max_queue_delay_ns": 0}})
    lines, one = [line(idx, max_tokens=6) for idx in range(2)], person(0, max_tokens=3)
    driver = Driver(make_core(CAPACITY, policies), HashExecutor(CAPACITY))
    driver.core.scheduler._others_serve = lambda _: are_serving[0]
    driver.turn(*map(Add, lines))
    are_serving[0] = True
    assert driver.turn() is None
    driver.turn(Add(one))
    finish(driver, *lines, one)


def test_a_static_batch_takes_them_when_no_other_waits() -> None:
    policies = make_policies("static", settings={"gate": {"max_queue_delay_ns": 0}})
    lines, people = [line(idx, max_tokens=4) for idx in range(2)], [person(idx, max_tokens=4) for idx in range(3)]
    driver = Driver(make_core(CAPACITY, policies), HashExecutor(CAPACITY))
    driver.core.apply([Add(request) for request in (*lines, *people)], 0)
    finish(driver, *lines, *people)
    order = [request.first_scheduled_ns for request in (*people, *lines)]
    assert order == sorted(order)
    assert len(set(order)) == 3, "a batch has requests of one class"


def test_no_line_passes_a_longer_one() -> None:
    """The budget lets short prompts of others pass, so that people wait less; the order of a job is what its lines share."""
    budget = HoldLatency(long_prefill_token_threshold=4, max_long_partial_prefills=1)
    lines = [line(0, prompt=20), line(1, prompt=20), line(2, prompt=3)]
    driver, begun = make_driver(*lines, budget=budget, max_step_tokens=8), list[str]()
    while len(begun) < 3:
        plan = driver.turn()
        begun += sorted(rows_of(plan, "line") - set(begun))
    assert begun == ["line-0", "line-1", "line-2"]
    finish(driver, *lines)


class Narrows(Budget):
    """All tokens for the first steps, then one."""

    def __init__(self) -> None:
        self.num_steps = 0

    def limits(self, view: BudgetView) -> StepLimits:
        self.num_steps += 1
        return StepLimits(view.max_step_tokens if self.num_steps < 20 else 1)


@pytest.mark.parametrize("num_blocks", range(14, 22))
def test_a_line_that_preempts_itself_leaves_its_row_to_the_next(num_blocks: int) -> None:
    """Steps have one row, and there is no memory for both: somebody always advances."""
    lines = [line(0, max_tokens=30), line(1, max_tokens=40)]
    lines[0].priority = 1  # it is first, and is preempted for the other one
    shape = replace(CAPACITY, num_blocks=num_blocks)
    driver = Driver(make_core(shape, make_policies(order="priority", budget=Narrows(), reserve="chunk")), HashExecutor(shape))
    driver.core.apply([Add(one) for one in lines], 0)
    plans = []
    while driver.core.has_work:
        driver.turn()
        plans.append(len(driver.plans))
        assert len(plans) < 500
    finish(driver, *lines)
    assert len(driver.plans) == plans[-1]
    assert all(after > before for before, after in pairwise(plans[:-1])), "no turn without a step"
