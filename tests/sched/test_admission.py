"""Admission: the bound of the queue and the honesty of its Retry-After."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.sched.admission import (
    DEFAULT_RETRY_AFTER_S,
    MAX_RETRY_AFTER_S,
    MIN_RETRY_AFTER_S,
    RESTART_RETRY_AFTER_S,
    Admission,
)
from penstock.types.errors import RejectReason
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats

SECOND = 1_000_000_000


def step(admission: Admission, at_s: float, num_waiting: int) -> None:
    at_ns = int(at_s * SECOND)
    admission.on_step(StepStats(0, at_ns, at_ns, 1, num_waiting, 1, 1, 1, 10, 0, 0, 0, 0, 0))


def end(admission: Admission, at_s: float, reason: FinishReason = FinishReason.STOP) -> None:
    admission.on_finish(RequestStats("a", "", 0, 0, 0, int(at_s * SECOND), 1, 0, 1, 0, reason))


def serve(admission: Admission, *, start_s: float, seconds: float, rate: float, num_waiting: int) -> float:
    """Steps every 50 ms, ends evenly at `rate` per second; returns the time after."""
    num_ended = 0
    for idx in range(int(seconds * 20) + 1):
        now_s = start_s + idx / 20
        while (num_ended + 1) / rate <= now_s - start_s + 1e-9:
            num_ended += 1
            end(admission, now_s)
        step(admission, now_s, num_waiting)
    return start_s + seconds


def test_the_queue_takes_as_many_as_it_is_told():
    admission = Admission(max_queue=2)
    assert admission.decide(1, 0) is None
    refusal = admission.decide(2, 0)
    assert refusal is not None
    assert refusal.reason is RejectReason.QUEUE_FULL
    assert "2" in refusal.detail


def test_without_a_measurement_the_default_is_announced():
    assert Admission(max_queue=1).retry_after_s(5, 0) == DEFAULT_RETRY_AFTER_S


def test_retry_after_is_the_excess_over_the_measured_rate():
    admission = Admission(max_queue=10)
    now_s = serve(admission, start_s=0, seconds=20, rate=2.0, num_waiting=12)
    assert admission.drain_rate(int(now_s * SECOND)) == pytest.approx(2.0, rel=0.05)
    assert admission.retry_after_s(15, int(now_s * SECOND)) == pytest.approx((15 - 10 + 1) / 2.0, rel=0.05)


def test_idle_time_says_nothing_about_the_rate():
    admission = Admission(max_queue=10)
    serve(admission, start_s=0, seconds=10, rate=0.2, num_waiting=0)
    now_s = serve(admission, start_s=10, seconds=10, rate=4.0, num_waiting=12)
    assert admission.drain_rate(int(now_s * SECOND)) == pytest.approx(4.0, rel=0.05)


def test_only_the_window_counts():
    admission = Admission(max_queue=10, window_s=5)
    serve(admission, start_s=0, seconds=20, rate=20.0, num_waiting=12)
    now_s = serve(admission, start_s=20, seconds=10, rate=1.0, num_waiting=12)
    assert admission.drain_rate(int(now_s * SECOND)) == pytest.approx(1.0, rel=0.3)


def test_an_old_measurement_is_forgotten():
    admission = Admission(max_queue=10)
    now_s = serve(admission, start_s=0, seconds=10, rate=5.0, num_waiting=12)
    assert admission.drain_rate(int((now_s + 100) * SECOND)) == 0.0
    assert admission.retry_after_s(10, int((now_s + 100) * SECOND)) == DEFAULT_RETRY_AFTER_S


def test_while_nothing_ends_the_time_without_an_end_is_the_least_to_expect():
    admission = Admission(max_queue=10)
    for at_s in (0, 10, 20):
        step(admission, at_s, num_waiting=12)
    assert admission.retry_after_s(11, 20 * SECOND) == pytest.approx(40.0)


def test_refused_requests_free_no_place():
    admission = Admission(max_queue=10)
    step(admission, 0, num_waiting=12)
    end(admission, 1, FinishReason.REJECTED)
    step(admission, 5, num_waiting=12)
    assert admission.drain_rate(5 * SECOND) == 0.0


@pytest.mark.parametrize(("num_waiting", "expected"), [(10, MIN_RETRY_AFTER_S), (100_000, MAX_RETRY_AFTER_S)])
def test_retry_after_is_clamped(num_waiting, expected):
    admission = Admission(max_queue=10)
    now_s = serve(admission, start_s=0, seconds=5, rate=20.0, num_waiting=12)
    assert admission.retry_after_s(num_waiting, int(now_s * SECOND)) == expected


@pytest.mark.parametrize("reason", [RejectReason.DRAINING, RejectReason.UNAVAILABLE])
def test_an_engine_that_takes_nothing_is_said_before_the_queue_is_looked_at(reason):
    refusal = Admission(max_queue=1).decide(100, 0, refuses_with=reason)
    assert refusal is not None
    assert (refusal.reason, refusal.retry_after_s) == (reason, RESTART_RETRY_AFTER_S)


def test_a_queue_without_places_is_an_error():
    with pytest.raises(ValueError, match="max_queue"):
        Admission(max_queue=0)


@given(
    st.lists(st.tuples(st.floats(0, 90), st.integers(0, 3), st.integers(0, 3)), max_size=30),
    st.integers(1, 10),
)
def test_busy_time_never_exceeds_the_window_and_the_answer_is_always_within_its_bounds(turns, window_s):
    admission, now_s = Admission(max_queue=1, window_s=window_s), 0.0
    for gap_s, num_ended, num_waiting in turns:
        now_s += gap_s
        for _ in range(num_ended):
            end(admission, now_s)
        step(admission, now_s, num_waiting)
        assert 0 <= admission._window.totals(int(now_s * SECOND))[1] <= window_s + 1e-9
        assert MIN_RETRY_AFTER_S <= admission.retry_after_s(3, int(now_s * SECOND)) <= MAX_RETRY_AFTER_S


def test_a_step_longer_than_the_window_keeps_the_ends_it_brought():
    admission = Admission(max_queue=1, window_s=5)
    step(admission, 0, num_waiting=3)
    end(admission, 20)
    step(admission, 20, num_waiting=3)
    assert admission.drain_rate(20 * SECOND) == pytest.approx(1 / 4, rel=0.3)
