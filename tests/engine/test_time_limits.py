"""Limits of a request's wait, first token and whole time: each ends it when it is due, and frees its blocks at once."""

from __future__ import annotations

import pytest

from penstock.testing import Driver, HashExecutor, make_core, make_request
from penstock.types.errors import RejectReason
from penstock.types.events import Abort, Add
from penstock.types.request import FinishReason, Request

MS = 1_000_000
"""Also what a step takes."""


def make_driver(*requests: Request, **limits: int) -> Driver:
    core = make_core(**{"max_rows": 1, "max_step_tokens": 8, "num_blocks": 65, "block_size": 4} | limits)
    driver = Driver(core, HashExecutor(core.scheduler.capacity))
    driver.record(core.apply([Add(request) for request in requests], 0))
    return driver


def limited(name: str, num_prompt: int = 4, **limits_ms: int) -> Request:
    """`queue`, `first_token`, `total`."""
    request = make_request(name, num_prompt, max_tokens=30)
    for kind, value_ms in limits_ms.items():
        field = {"queue": "queue_deadline_ns", "first_token": "first_token_deadline_ns", "total": "deadline_ns"}[kind]
        setattr(request, field, value_ms * MS)
    return request


def run(driver: Driver) -> None:
    while driver.core.has_work:
        driver.turn()
        driver.core.check()


def test_who_waits_too_long_for_its_turn_is_ended_and_who_runs_is_not():
    driver = make_driver(limited("a", queue=5), limited("b", queue=5))
    run(driver)
    assert driver.outcomes["a"].finish_reason is FinishReason.LENGTH
    assert driver.outcomes["b"].last.reject_reason == RejectReason.QUEUE_TIMEOUT
    assert driver.outcomes["b"].last.at_ns == 5 * MS


def test_the_first_token_is_limited_and_those_after_it_are_not():
    driver = make_driver(limited("quick", first_token=3))
    run(driver)
    assert driver.outcomes["quick"].finish_reason is FinishReason.LENGTH
    driver = make_driver(limited("long", 100, first_token=3))  # 13 steps of 8 tokens
    run(driver)
    assert driver.outcomes["long"].last.reject_reason == RejectReason.FIRST_TOKEN_TIMEOUT
    assert driver.outcomes["long"].token_ids == []


def test_of_several_limits_the_one_that_is_due_counts():
    driver = make_driver(limited("a", queue=2, first_token=4, total=10), limited("b", queue=20, first_token=6, total=8))
    run(driver)
    assert driver.outcomes["a"].last.reject_reason == RejectReason.DEADLINE
    assert driver.outcomes["a"].last.at_ns == 10 * MS
    assert driver.outcomes["b"].last.reject_reason == RejectReason.FIRST_TOKEN_TIMEOUT
    assert driver.outcomes["b"].last.at_ns == 6 * MS


def test_the_wait_of_a_call_is_over_when_its_first_request_has_begun():
    first, second = [limited(name, queue=5, first_token=5) for name in ("first", "second")]
    first.call = second.call = (first, second)
    driver = make_driver(second, first)
    run(driver)
    assert driver.outcomes["first"].finish_reason is driver.outcomes["second"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("limit", ["queue", "first_token"])
def test_all_requests_of_a_call_end_that_has_waited_too_long(limit):
    first, second = [limited(name, **{limit: 5}) for name in ("first", "second")]
    first.call = second.call = (first, second)
    driver = make_driver(make_request("other", 4, max_tokens=30), first, second)
    run(driver)
    assert driver.outcomes["first"].last.at_ns == driver.outcomes["second"].last.at_ns == 5 * MS


def test_the_core_asks_to_be_woken_for_a_limit():
    driver = make_driver(limited("a", queue=7))
    assert driver.core.next_wakeup_ns(0) == 7 * MS


@pytest.mark.parametrize("limit", ["first_token", "total", "abort"])
def test_what_ends_frees_its_blocks_before_the_next_step(limit):
    request = limited("a", 100) if limit == "abort" else limited("a", 100, **{limit: 3})
    driver = make_driver(request, make_request("b", 4, max_tokens=2))
    kv = driver.core.scheduler.kv
    for _ in range(2):
        driver.turn()
    assert kv.pool.num_available < kv.num_total_blocks
    driver.clock.advance(MS)
    driver.record(driver.core.apply([Abort("a")] if limit == "abort" else [], 3 * MS))
    assert kv.pool.num_available == kv.num_total_blocks
    plan = driver.turn()
    assert plan is not None
    assert plan.releases == ("a",)
    assert [row.request_id for row in plan.rows] == ["b"]
    run(driver)
