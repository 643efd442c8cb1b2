"""Requests of a higher class pause those of a lower one. They run on the hash executor, which checks every plan and answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.clock import VirtualClock
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.orders import PriorityClasses
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import WholePrompt
from penstock.testing import Driver, HashExecutor, expected_tokens, make_core, make_request
from penstock.testing.hash_executor import DEFAULT_CAPACITY
from penstock.types.events import Add
from penstock.types.request import Request, RequestStatus
from penstock.types.sampling import BeamParams
from support.strategies import Engine, LowerTier

HIGH, MIDDLE, LOW = 0, 1, 2
SECOND = 1_000_000_000


def classed(name: str, priority: int, prompt: int = 8, arrival_ns: int = 0, max_tokens: int = 30) -> Request:
    request = make_request(name, [priority + 10] * prompt, arrival_ns=arrival_ns, max_tokens=max_tokens)
    request.priority = priority
    return request


def make_driver(*requests: Request, order: PriorityClasses | None = None, num_long: int = 0, **capacity: int) -> Driver:
    """`num_long`: prompts of more than 16 tokens that are computed at the same time; 0: none is taken for long."""
    budget = HoldLatency(long_prefill_token_threshold=16 if num_long else 0, max_long_partial_prefills=num_long)
    policies = make_policies(order=order or PriorityClasses(), budget=budget, victim="lowest-priority", reserve=WholePrompt())
    shape = replace(DEFAULT_CAPACITY, **({"block_size": 4, "num_blocks": 101, "max_model_len": 200} | capacity))
    core = make_core(shape, policies, enable_prefix_caching=False)
    driver = Driver(core, HashExecutor(shape))
    core.apply([Add(request) for request in requests], 0)
    return driver


def beams_of(name: str, *, width: int, priority: int, prompt: int = 8) -> list[Request]:
    """The requests of a search."""
    beams = BeamParams(width=width)
    requests = [make_request(f"{name}{idx}", [5] * prompt, max_tokens=8, beams=beams, logprobs=width) for idx in range(width)]
    for request in requests:
        request.parent_id, request.priority = name, priority
    return requests


def finish(driver: Driver, *requests: Request) -> None:
    while driver.core.has_work:
        driver.turn()
        driver.core.check()
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=driver.executor.model, max_model_len=200)
        assert tuple(driver.outcomes[request.request_id].token_ids) == expected.token_ids


def test_a_row_is_taken_from_the_lowest_class() -> None:
    middle, low, high = classed("middle", MIDDLE), classed("low", LOW), classed("high", HIGH)
    driver = make_driver(middle, low, max_rows=2)
    driver.turn()
    plan = driver.turn(Add(high))
    assert plan is not None
    assert plan.releases == ("low",)
    assert {row.request_id for row in plan.rows} == {"middle", "high"}
    assert low.status is RequestStatus.PREEMPTED
    finish(driver, middle, low, high)
    assert [request.num_preemptions for request in (middle, low, high)] == [0, 1, 0]


def test_memory_is_taken_from_the_lowest_class() -> None:
    """24 blocks: the two low ones hold 20 and grow; the high one wants 12."""
    lows = [classed(f"low-{idx}", LOW, prompt=40, arrival_ns=idx) for idx in range(2)]
    high = classed("high", HIGH, prompt=45)
    driver = make_driver(*lows, num_blocks=25)
    driver.turn()
    plan = driver.turn(Add(high))
    assert plan is not None
    assert plan.releases == ("low-1",), "the later of the two, and not both"
    assert high.status is RequestStatus.RUNNING
    finish(driver, *lows, high)


def test_nobody_is_paused_in_vain() -> None:
    """Even without the low one there would not be enough memory beside the other high one."""
    first, low = classed("first", HIGH, prompt=60), classed("low", LOW, prompt=12)
    second = classed("second", HIGH, prompt=60)
    driver = make_driver(first, low, num_blocks=25)
    driver.turn()
    driver.turn(Add(second))
    assert low.num_preemptions == 0
    finish(driver, first, low, second)


def test_nobody_is_paused_for_a_search_that_lacks_rows_anyway() -> None:
    high, lows = classed("high", HIGH), [classed(f"low-{idx}", LOW) for idx in range(3)]
    driver = make_driver(high, *lows, max_rows=4)
    driver.turn()
    search = beams_of("b", width=4, priority=MIDDLE)
    driver.turn(*map(Add, search))
    assert [request.num_preemptions for request in lows] == [0, 0, 0]
    while driver.core.has_work:
        driver.turn()
    assert [request.num_preemptions for request in lows] == [0, 0, 0]


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_search_pauses_for_all_its_rows(width: int) -> None:
    lows = [classed(f"low-{idx}", LOW) for idx in range(4)]
    driver = make_driver(*lows, max_rows=4)
    driver.turn()
    driver.turn(*map(Add, beams_of("b", width=width, priority=MIDDLE)))
    assert sum(request.num_preemptions for request in lows) == width


def test_the_rows_that_a_search_keeps_for_its_forks_are_freed_with_it() -> None:
    low = beams_of("low", width=4, priority=LOW, prompt=40)
    driver = make_driver(max_rows=4, max_step_tokens=16)
    driver.turn(*map(Add, low))
    assert driver.core.num_running == 1, "its prompt is being computed"
    high = classed("high", HIGH)
    driver.turn(Add(high))
    assert high.status is RequestStatus.RUNNING
    assert low[0].status is RequestStatus.PREEMPTED


def test_blocks_that_the_lower_share_with_each_other_alone_are_theirs() -> None:
    """Each has 40 blocks in common with the other and a few of its own; 30 are wanted, and 17 are free."""
    shape = replace(DEFAULT_CAPACITY, block_size=4, num_blocks=61, max_rows=8, max_step_tokens=300, max_model_len=230)
    core = make_core(shape, make_policies(order="priority"))
    driver = Driver(core, HashExecutor(shape))
    lows = [make_request(f"low-{idx}", range(160), priority=1, max_tokens=60, seed=idx, temperature=1.0) for idx in range(2)]
    driver.turn(*map(Add, lows))
    for _ in range(3):
        driver.turn()
    assert core.scheduler.kv.pool.num_shared > 30
    high = make_request("high", [7] * 120, max_tokens=5)
    driver.turn(Add(high))
    assert high.status is RequestStatus.RUNNING


def test_what_the_lower_share_with_who_waits_is_not_counted_twice() -> None:
    """It needs 18 of 20 blocks, 10 of which the lower one holds for it; the other one holds 5."""
    shape = replace(DEFAULT_CAPACITY, block_size=4, num_blocks=21, max_rows=8, max_step_tokens=300, max_model_len=80)
    core = make_core(shape, make_policies(order="priority", reserve="prompt"))
    driver = Driver(core, HashExecutor(shape))
    equal, low = make_request("equal", [9] * 20, max_tokens=20), make_request("low", range(40), priority=1, max_tokens=12)
    driver.turn(Add(equal))
    driver.turn(Add(low))
    driver.turn()
    high = make_request("high", [*range(40), *[7] * 30], max_tokens=5)
    driver.turn(Add(high))
    assert low.num_preemptions == 0


def test_who_is_paused_for_another_runs_until_that_is_loaded() -> None:
    shape = replace(DEFAULT_CAPACITY, block_size=4, num_blocks=31, max_rows=4, max_step_tokens=64, max_model_len=120)
    engine = Engine(
        shape, make_policies(order="priority"), True, LowerTier(num_slots=500, num_staged_blocks=200, promptness=0.0)
    )
    core, executor = engine.make()
    clock = VirtualClock()
    transfers, worker = engine.make_transfers(core, executor, clock)
    assert worker is not None
    driver = Driver(core, executor, clock, transfers=transfers, worker=worker)

    def come(request: Request, turns: int) -> list[bool]:
        """Whether there was a step."""
        core.apply([Add(request)], clock.now_ns())
        return [driver.turn() is not None for _ in range(turns)]

    prefix = [idx % 39 + 1 for idx in range(60)]
    low = make_request("low", [9] * 30, max_tokens=80, priority=5)
    for request in (make_request("warm", prefix, max_tokens=2), make_request("flood", [7] * 100, max_tokens=2), low):
        come(request, 8)
        worker.run(worker.num_jobs)
    high = make_request("high", [*prefix, *[3] * 36], max_tokens=5, priority=-5)
    assert all(come(high, 20)), "the machine is idle while the store reads"
    assert low.status is RequestStatus.RUNNING
    worker.run(worker.num_jobs)
    driver.turn()
    assert (low.status, high.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    assert high.num_cached_tokens >= 56, "what was loaded is still there"


@pytest.mark.parametrize("order", [PriorityClasses(is_preemptive=False), PriorityClasses(class_delay_ns=0)])
def test_who_may_not_overtake_pauses_nobody(order: PriorityClasses) -> None:
    low, high = classed("low", LOW), classed("high", HIGH, arrival_ns=1)
    driver = make_driver(low, max_rows=1, order=order)
    driver.turn()
    driver.turn(Add(high))
    assert low.status is RequestStatus.RUNNING
    finish(driver, low, high)


def test_equals_do_not_pause_each_other() -> None:
    first, second = classed("first", LOW), classed("second", LOW)
    driver = make_driver(first, second, max_rows=1)
    driver.turn()
    assert second.status is RequestStatus.WAITING
    finish(driver, first, second)
    assert first.num_preemptions == second.num_preemptions == 0


def test_the_paused_wait_until_the_higher_classes_have_a_row_each() -> None:
    lows = [classed(f"low-{idx}", LOW, max_tokens=6) for idx in range(2)]
    highs = [classed(f"high-{idx}", HIGH, max_tokens=6) for idx in range(4)]
    driver = make_driver(*lows, max_rows=2)
    driver.turn()
    driver.turn(*(Add(request) for request in highs))
    finish(driver, *lows, *highs)
    ends = sorted((*lows, *highs), key=lambda request: driver.outcomes[request.request_id].last.at_ns)
    assert {request.request_id for request in ends[:4]} == {"high-0", "high-1", "high-2", "high-3"}


def test_the_lowest_class_ends_though_higher_ones_never_stop_coming() -> None:
    """Each step down is a delay of 20 ms, that is 20 steps; a high one comes in each, and takes two steps."""
    driver = make_driver(order=PriorityClasses(class_delay_ns=20_000_000), max_rows=2)
    low = classed("low", LOW, max_tokens=10)
    driver.turn(Add(low))
    turns = 0
    while low.status is not RequestStatus.FINISHED:
        turns += 1
        driver.turn(Add(classed(f"high-{turns}", HIGH, arrival_ns=driver.clock.now_ns(), max_tokens=2)))
        driver.core.check()
    assert low.num_preemptions > 0
    assert turns < 100


def test_the_highest_class_is_not_preempted_for_a_lower_one_that_grows() -> None:
    low, high = classed("low", LOW, max_tokens=60), classed("high", HIGH, arrival_ns=1, max_tokens=60)
    driver = make_driver(low, high, num_blocks=26)
    finish(driver, low, high)
    assert (low.num_preemptions > 0, high.num_preemptions) == (True, 0)


def test_who_was_held_back_goes_before_whom_it_paused() -> None:
    """Else the victim, which had run, would be resumed in the same step, be paused in the next, and so on."""
    low, first = classed("low", LOW), classed("first", HIGH, prompt=60, arrival_ns=1)
    high = classed("high", HIGH, prompt=40)
    driver = make_driver(low, first, num_long=1, max_rows=2, max_step_tokens=24)
    driver.turn()
    driver.turn(Add(high))
    assert driver.core.scheduler._queues.waiting.num_held_back == 1
    while high.status is not RequestStatus.RUNNING:
        driver.turn()
    assert (low.num_preemptions, first.num_preemptions) == (1, 0)
    finish(driver, low, first, high)


def test_a_long_prefill_that_is_paused_and_resumed_in_one_step_has_one_row() -> None:
    """All of whom there is memory for: the long one and either of the others. It is paused first, which is not enough."""
    low = classed("low", LOW, max_tokens=120)
    long = classed("long", MIDDLE, prompt=80, arrival_ns=1, max_tokens=4)
    high = classed("high", HIGH, arrival_ns=2, max_tokens=120)
    budget = HoldLatency(long_prefill_token_threshold=16)
    policies = make_policies(order="priority", budget=budget, victim="latest", reserve="no-evict")
    shape = replace(DEFAULT_CAPACITY, block_size=4, num_blocks=61, max_model_len=200, max_step_tokens=24)
    driver = Driver(make_core(shape, policies, enable_prefix_caching=False), HashExecutor(shape))
    driver.turn(Add(low))
    driver.turn(Add(long))
    plan = driver.turn(Add(high))
    assert plan is not None
    assert [request.num_preemptions for request in (low, long, high)] == [1, 1, 0]
    assert sorted(row.request_id for row in plan.rows) == ["high", "long"]
    finish(driver, low, long, high)


def test_memory_is_counted_right_where_a_decode_that_rests_needs_a_block() -> None:
    """20 blocks of a token: each of the low ones holds 10 and has 11 tokens, while steps are for prompts alone."""
    lows = [make_request(f"low-{idx}", [5 + idx] * 9, max_tokens=8, priority=LOW) for idx in range(2)]
    high = make_request("high", [9] * 11, max_tokens=8, priority=HIGH)
    policies = make_policies(order="priority", budget="prefill-first", reserve="chunk")
    shape = replace(DEFAULT_CAPACITY, block_size=1, num_blocks=21, max_rows=3, max_step_tokens=32, max_model_len=20)
    driver = Driver(make_core(shape, policies), HashExecutor(shape))
    driver.turn(*map(Add, lows))
    driver.turn()
    driver.turn(Add(high))
    assert high.status is RequestStatus.RUNNING
    while driver.core.has_work:
        driver.turn()
        driver.core.check()
    assert high.num_preemptions == 0
