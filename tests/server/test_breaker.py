"""Spares a server that fails: when requests are let through, and how often they are sent again."""

from __future__ import annotations

from penstock.clock import VirtualClock
from penstock.serve.breaker import MAX_FAILURES, MAX_RETRIES, REST_NS, RETRY_SHARE, Breaker, Turn


def turn_of(breaker: Breaker) -> Turn:
    turn = breaker.begin()
    assert isinstance(turn, Turn)
    return turn


def opened(clock: VirtualClock) -> Breaker:
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        turn_of(breaker).fail()
    return breaker


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            turn_of(breaker).fail()
        turn_of(breaker).succeed()
    assert not breaker.is_open
    breaker = opened(clock)
    assert breaker.is_open
    assert breaker.begin() == REST_NS


def test_after_the_rest_one_request_at_a_time_is_let_through() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    old = turn_of(breaker)
    for _ in range(MAX_FAILURES):
        turn_of(breaker).fail()
    clock.advance(REST_NS)
    probe = turn_of(breaker)
    assert isinstance(breaker.begin(), int), "the first one has not ended"
    for end in (old.succeed, old.fail, old.close):
        end()
        assert breaker.is_open, "what was sent before tells nothing"
        assert isinstance(breaker.begin(), int)
    probe.fail()
    assert breaker.begin() == REST_NS
    clock.advance(REST_NS)
    turn_of(breaker).close()
    turn_of(breaker).succeed()
    assert not breaker.is_open
    turn_of(breaker), turn_of(breaker)


def test_a_server_that_begins_answers_and_breaks_them_off_is_spared_too() -> None:
    clock = VirtualClock()
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        turn = turn_of(breaker)
        turn.works()
        turn.fail()
    assert breaker.is_open
    clock.advance(REST_NS)
    probe = turn_of(breaker)
    probe.works()
    assert not breaker.is_open, "others need not wait for its end"
    turn_of(breaker).fail()
    assert breaker.is_open


def test_second_attempts_are_a_small_part_of_all() -> None:
    breaker = Breaker(VirtualClock())
    num_retries = 0
    for _ in range(1000):
        turn = turn_of(breaker)
        num_retries += breaker.may_retry()
        turn.succeed()
    assert num_retries <= MAX_RETRIES + 1000 * RETRY_SHARE
    assert num_retries >= 1000 * RETRY_SHARE - 1
    assert not opened(VirtualClock()).may_retry()
