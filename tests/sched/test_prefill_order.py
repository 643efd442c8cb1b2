"""The order in which prompts get the tokens of a step: running and waiting ones, under orders that rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations

import pytest

from penstock.sched.policies.base import Order
from penstock.sched.policies.budgets import HoldLatency
from penstock.sched.policies.fair import FairShares
from penstock.sched.policies.orders import FirstComeFirstServed, PriorityClasses
from penstock.sched.policies.presets import make_policies
from penstock.testing import Driver, HashExecutor, make_core, make_request, make_scheduler
from penstock.testing.driver import STEP_NS
from penstock.testing.hash_executor import DEFAULT_CAPACITY
from penstock.types.events import Add
from penstock.types.request import Request, RequestStatus

HIGH, LOW = 0, 1


def make_driver(order: Order, *, long_tokens: int = 0, **capacity: int) -> Driver:
    """Steps of 16 tokens. `long_tokens`: longer prompts let others pass, one of them at a time; 0: none is long."""
    policies = make_policies(order=order, budget=HoldLatency(long_prefill_token_threshold=long_tokens), reserve="prompt")
    shape = replace(DEFAULT_CAPACITY, **({"block_size": 4, "num_blocks": 101, "max_step_tokens": 16} | capacity))
    return Driver(make_core(shape, policies, enable_prefix_caching=False), HashExecutor(shape))


def turn(driver: Driver, *requests: Request) -> dict[str, int]:
    """Tokens of each request in the next step, in the order of the plan."""
    plan = driver.turn(*(Add(request) for request in requests))
    driver.core.check()
    return {row.request_id: row.query_len for row in plan.rows} if plan else {}


def of(name: str, prompt: int, *, tenant: str = "", priority: int = 0, max_tokens: int = 1, arrival_ns: int = 0) -> Request:
    return make_request(
        name, prompt, tenant=tenant, priority=priority, max_tokens=max_tokens, arrival_ns=arrival_ns, temperature=0.0
    )


def test_a_prompt_in_work_gives_its_tokens_to_a_tenant_that_was_given_less() -> None:
    driver = make_driver(FairShares())
    assert turn(driver, of("heavy", 40, tenant="heavy")) == {"heavy": 16}
    assert turn(driver, of("light", 10, tenant="light")) == {"light": 10, "heavy": 6}
    assert turn(driver) == {"heavy": 16}


def test_a_prompt_in_work_gives_its_tokens_to_a_higher_class_and_keeps_its_row() -> None:
    driver = make_driver(PriorityClasses())
    low, high = of("low", 40, priority=LOW), of("high", 20, priority=HIGH, arrival_ns=1)
    assert turn(driver, low) == {"low": 16}
    assert turn(driver, high) == {"high": 16}
    assert turn(driver) == {"high": 4, "low": 12}
    assert (low.status, low.num_preemptions) == (RequestStatus.RUNNING, 0)


def test_an_aged_prompt_between_two_others_does_not_hide_who_goes_first() -> None:
    """It is outranked by nobody, and outranks neither."""
    order = FairShares()
    scheduler = make_scheduler(policies=make_policies(order=order))
    now_ns, served = 100_000_000_000, {"aged": 5000, "light": 0, "heavy": 3000}
    requests = {}
    for tenant, num_tokens in served.items():
        request = requests[tenant] = of(tenant, 100, tenant=tenant)
        request.status, request.first_scheduled_ns = RequestStatus.RUNNING, 0 if tenant == "aged" else now_ns
        order._account(tenant).counter = num_tokens * 1_000_000
    for names in permutations(served):
        ranked = scheduler._joining.rank([requests[name] for name in names], now_ns)
        assert ranked.index(requests["light"]) < ranked.index(requests["heavy"])


@pytest.mark.parametrize("order", [FairShares(), PriorityClasses(), FirstComeFirstServed()])
def test_a_prompt_in_work_keeps_its_tokens_from_an_equal(order: Order) -> None:
    driver = make_driver(order)
    turn(driver, of("first", 40))
    assert turn(driver, of("second", 10, arrival_ns=1)) == {"first": 16}
    assert turn(driver) == {"first": 8, "second": 8}


def test_a_class_that_has_aged_keeps_its_tokens() -> None:
    driver = make_driver(PriorityClasses(class_delay_ns=10))
    turn(driver, of("low", 40, priority=LOW))
    assert turn(driver, of("high", 10, priority=HIGH, arrival_ns=20)) == {"low": 16}


def test_two_tenants_who_stand_equal_are_computed_one_after_the_other() -> None:
    """In turns, both would take as long as both together."""
    driver = make_driver(FairShares(max_credit_tokens=0))
    steps = [turn(driver, of("a", 32, tenant="a"), of("b", 33, tenant="b")), *(turn(driver) for _ in range(4))]
    assert steps == [{"a": 16}, {"a": 16}, {"b": 16}, {"b": 16}, {"b": 1}]


def test_a_short_prompt_passes_a_long_one_of_another_tenant() -> None:
    """No tenant stands lower, but with its prompt computed the second still does."""
    driver = make_driver(FairShares(max_credit_tokens=0))
    turn(driver, of("long", 60, tenant="a"))
    assert turn(driver, of("short", 8, tenant="b")) == {"short": 8, "long": 8}


def test_a_prompt_in_work_is_not_put_off_forever_by_ever_new_tenants() -> None:
    """Each of them stands equal at most, and asks for less than a step has. Twenty steps later the prompt keeps its tokens."""
    driver = make_driver(FairShares(max_wait_ns=20 * STEP_NS, max_credit_tokens=0))  # with credit they rise to it before
    long = of("long", 60, tenant="heavy")
    turn(driver, long, of("waits", 60, tenant="heavy"))
    turns = 0
    while long.first_token_ns is None:
        turns += 1
        turn(driver, of(f"short-{turns}", 16, tenant=f"new-{turns}", arrival_ns=driver.clock.now_ns()))
        assert turns < 40
    assert turns > 10, "they do put it off for a while"


def test_a_tenant_that_decodes_is_given_something_too() -> None:
    """Fourteen rows that decode are worth 28 a step, so the prompt of their tenant waits for that of the other."""
    driver = make_driver(FairShares(max_credit_tokens=0), max_step_tokens=24, max_rows=16)
    turn(driver, *(of(f"stream-{idx}", 1, tenant="a", max_tokens=20) for idx in range(14)))
    steps = [turn(driver, of("own", 60, tenant="a"), of("other", 60, tenant="b")), *(turn(driver) for _ in range(5))]
    prompts = [{name: count for name, count in step.items() if not name.startswith("stream")} for step in steps]
    assert prompts == [{"other": 10}] * 6


def test_a_long_prompt_of_a_higher_class_does_not_wait_for_a_long_one_of_a_lower() -> None:
    driver = make_driver(PriorityClasses(), long_tokens=10)
    turn(driver, of("low", 60, priority=LOW))
    assert turn(driver, of("high", 20, priority=HIGH, arrival_ns=1)) == {"high": 16}
    assert turn(driver) == {"high": 4, "low": 12}


def test_a_long_prompt_of_its_own_class_is_one_at_a_time_as_before() -> None:
    driver = make_driver(PriorityClasses(), long_tokens=10)
    turn(driver, of("first", 60, priority=HIGH))
    assert turn(driver, of("second", 20, priority=HIGH, arrival_ns=1)) == {"first": 16}
    assert turn(driver, of("low", 4, priority=LOW, arrival_ns=2)) == {"first": 16}, "the higher class is not passed"


def test_short_prompts_pass_long_ones_of_their_class_and_leave_them_half() -> None:
    driver = make_driver(PriorityClasses(), long_tokens=10)
    turn(driver, of("long", 60, priority=HIGH))
    shorts = [of(f"short-{idx}", 6, priority=HIGH, arrival_ns=1 + idx) for idx in range(2)]
    assert turn(driver, *shorts) == {"short-0": 6, "short-1": 2, "long": 8}
    assert turn(driver) == {"short-1": 4, "long": 12}


def test_who_is_outranked_gets_what_others_cannot_use_for_lack_of_a_row() -> None:
    driver = make_driver(PriorityClasses(is_preemptive=False), max_rows=1)
    turn(driver, of("low", 40, priority=LOW))
    assert turn(driver, of("high", 10, priority=HIGH, arrival_ns=1)) == {"low": 16}


def test_a_long_prompt_that_was_held_back_goes_before_a_lower_class_that_was_paused() -> None:
    """Else the lower one would be resumed, and paused again in the next step."""
    driver = make_driver(PriorityClasses(), long_tokens=10, max_rows=2)
    low = of("low", 4, priority=LOW, max_tokens=30)
    first = of("first", 60, priority=HIGH, max_tokens=30, arrival_ns=1)
    turn(driver, low)
    turn(driver, first)
    pauser = of("pauser", 4, priority=HIGH, arrival_ns=2, max_tokens=10)
    held = of("held", 20, priority=HIGH, arrival_ns=3, max_tokens=4)
    turn(driver, pauser, held)
    assert low.status is RequestStatus.PREEMPTED
    while held.status is RequestStatus.WAITING:
        turn(driver)
    while driver.core.has_work:
        turn(driver)
    assert low.num_preemptions == 1
