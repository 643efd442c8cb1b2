"""Spares a server that fails: when requests are let through, and how often they are sent again."""

from __future__ import annotations

from penstock.clock import VirtualClock
from penstock.serve.breaker import MAX_FAILURES, MAX_RETRIES, REST_NS, RETRY_SHARE, Breaker


def opened(clock: VirtualClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        assert breaker.wait_ns() == 0
        breaker.fail()
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            breaker.fail()
        breaker.succeed()
    assert not breaker.is_open
    breaker = opened(clock)
    assert breaker.is_open
    assert breaker.wait_ns() == REST_NS


def test_after_the_rest_one_request_at_a_time_is_let_through() -> None:
    clock = VirtualClock()
    breaker = opened(clock)
    clock.advance(REST_NS)
    assert breaker.wait_ns() == 0
    assert breaker.wait_ns() > 0, "the first one has not ended"
    breaker.fail()
    assert breaker.wait_ns() == REST_NS
    clock.advance(REST_NS)
    assert breaker.wait_ns() == 0
    breaker.forget()
    assert breaker.wait_ns() == 0, "it told nothing, so another one may try"
    breaker.succeed()
    assert not breaker.is_open
    assert breaker.wait_ns() == breaker.wait_ns() == 0


def test_second_attempts_are_a_small_part_of_all() -> None:
    breaker = Breaker(VirtualClock())
    num_retries = 0
    for _ in range(1000):
        breaker.wait_ns()
        num_retries += breaker.may_retry()
        breaker.succeed()
    assert num_retries <= MAX_RETRIES + 1000 * RETRY_SHARE
    assert num_retries >= 1000 * RETRY_SHARE - 1
    assert not opened(VirtualClock()).may_retry()
