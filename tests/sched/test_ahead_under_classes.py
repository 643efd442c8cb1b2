"""Steps that are planned ahead under an order that pauses the low for the high: when one is, when not, and for how long."""

from __future__ import annotations

from penstock.sched.policies.budgets import DecodeFirst
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.testing import make_core, make_request
from penstock.types.events import Add
from support.stepwise import CAPACITY, Device, answer


def classed(**capacity: int) -> Device:
    """Under an order that pauses the low for the high."""
    policies = make_policies(order="priority", reserve=Watermark(share=0.0, growth_tokens=0))
    return Device(make_core(CAPACITY, policies, **capacity))


def test_who_pauses_another_for_a_row_waits_for_the_step_in_flight() -> None:
    device = classed(max_rows=1)
    low, high = make_request("low", 5, max_tokens=9, priority=1), make_request("high", [9], max_tokens=2, priority=0)
    device.begin(Add(low))
    assert device.begin() == [("low", 5, 1)]
    device.finish()
    assert device.begin(Add(high)) is None
    device.finish()
    assert device.begin() == [("high", 0, 1)]
    assert device.begin() == [("high", 1, 1)], "who was paused waits, and pauses nobody"
    device.run()
    assert [device.tokens_of(request) for request in (low, high)] == [answer(low), answer(high)]


def test_who_pauses_another_for_memory_waits_for_the_step_in_flight() -> None:
    device = classed(num_blocks=9, max_step_tokens=64)
    low, high = make_request("low", 18, max_tokens=9, priority=1), make_request("high", [9] * 14, max_tokens=2, priority=0)
    device.begin(Add(low))
    assert device.begin(Add(high)) is None
    device.finish()
    assert device.begin() == [("high", 0, 14)]
    device.run()
    assert low.num_preemptions == 1
    assert [device.tokens_of(request) for request in (low, high)] == [answer(low), answer(high)]


def test_who_waits_for_its_equals_keeps_no_step_from_being_planned_ahead() -> None:
    device = classed(max_rows=1)
    requests = [make_request(name, [idx + 4], max_tokens=5, priority=idx) for idx, name in enumerate(["high", "low"])]
    assert device.begin(*map(Add, requests)) == [("high", 0, 1)]
    for context_len in range(1, 5):
        assert device.begin() == [("high", context_len, 1)]
        device.finish()
    device.run()
    assert [device.tokens_of(request) for request in requests] == [answer(request) for request in requests]


def test_who_outranks_another_and_fits_beside_it_joins_ahead() -> None:
    device = classed()
    low, high = make_request("low", 5, max_tokens=9, priority=1), make_request("high", [9], max_tokens=2, priority=0)
    device.begin(Add(low))
    assert device.begin(Add(high)) == [("low", 5, 1), ("high", 0, 1)]
    device.run()
    assert low.num_preemptions == 0


def test_nobody_waits_for_the_step_in_flight_where_even_a_pause_would_not_do() -> None:
    """The other high one has the memory that is lacking."""
    device = classed(num_blocks=13, max_step_tokens=64)
    first, low = make_request("first", [7] * 30, max_tokens=3), make_request("low", 6, max_tokens=9, priority=1)
    device.begin(Add(first), Add(low))
    assert device.begin(Add(make_request("second", [9] * 30, max_tokens=2))) == [("first", 30, 1), ("low", 6, 1)]
    device.run()
    assert low.num_preemptions == 0


def test_a_pause_that_planning_finds_out_waits_a_step_and_no_longer() -> None:
    """The first of two fits beside the low one, and the second does not."""
    device = classed(max_rows=2)
    low = make_request("low", 5, max_tokens=20, priority=1)
    highs = [make_request(name, [9 + idx, 5], max_tokens=9, arrival_ns=idx) for idx, name in enumerate(["first", "second"])]
    device.begin(Add(low))
    assert device.begin(*map(Add, highs)) == [("low", 5, 1), ("first", 0, 2)]
    device.finish()
    assert device.begin() is None
    device.finish()
    assert device.begin() == [("first", 2, 1), ("second", 0, 2)]
    assert device.begin() == [("first", 3, 1), ("second", 2, 1)]
    device.run()
    assert low.num_preemptions == 1
    assert [device.tokens_of(request) for request in (low, *highs)] == [answer(request) for request in (low, *highs)]


def test_a_pause_that_only_planning_finds_waits_a_step_and_no_longer() -> None:
    """For the whole prompt even a pause would not do, but a step takes eight tokens of it, for which it does."""
    policies = make_policies(order="priority", budget=DecodeFirst(long_prefill_token_threshold=8), reserve="chunk")
    device = Device(make_core(CAPACITY, policies, max_step_tokens=60))
    first, low = make_request("first", [7] * 43, max_tokens=9), make_request("low", [5] * 26, max_tokens=20, priority=1)
    high = make_request("high", [9] * 50, max_tokens=2, arrival_ns=9)
    device.begin(Add(first), Add(low))
    device.begin()
    while not (first.output_token_ids and low.output_token_ids):
        device.finish()
        device.begin()
    device.finish()
    assert device.num_available < 2
    assert device.begin(Add(high)) is not None
    device.finish()
    assert device.begin() is None
    device.finish()
    plan = device.begin()
    assert plan is not None
    assert ("high", 0, 8) in plan
    device.run()
    assert low.num_preemptions == 1
    assert [device.tokens_of(request) for request in (first, low, high)] == [answer(request) for request in (first, low, high)]
