"""The drain rate: what counts as time, what as an end, and for how long."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.admission.estimates import DRAIN_WINDOW_S, DrainMeter
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepStats

SECOND = 1_000_000_000


def step(meter: DrainMeter, at_s: float, num_waiting: int) -> None:
    at_ns = int(at_s * SECOND)
    meter.on_step(StepStats(0, at_ns, at_ns, 1, num_waiting, 10, 0, 0))


def end(meter: DrainMeter, at_s: float, reason: FinishReason = FinishReason.STOP, first_scheduled_ns: int | None = 0) -> None:
    meter.on_finish(RequestStats("a", "", 0, first_scheduled_ns, 0, int(at_s * SECOND), 1, 0, 1, 0, reason))


def serve(meter: DrainMeter, *, start_s: float, seconds: float, rate: float, num_waiting: int) -> float:
    """Steps every 50 ms, ends evenly at `rate` per second; returns the time after."""
    num_ended = 0
    for idx in range(int(seconds * 20) + 1):
        now_s = start_s + idx / 20
        while (num_ended + 1) / rate <= now_s - start_s + 1e-9:
            num_ended += 1
            end(meter, now_s)
        step(meter, now_s, num_waiting)
    return start_s + seconds


def test_the_rate_is_ends_over_the_time_in_which_others_waited():
    meter = DrainMeter()
    now_s = serve(meter, start_s=0, seconds=20, rate=2.0, num_waiting=12)
    assert meter.rate(int(now_s * SECOND)) == pytest.approx(2.0, rel=0.05)
    assert meter.ns_per_request(int(now_s * SECOND), 0, 8) == pytest.approx(SECOND / 2.0, rel=0.05)


def test_a_forecast_counts_like_as_many_ends_as_its_weight_says():
    meter = DrainMeter()
    assert meter.ns_per_request(0, 0, 8) is None
    assert meter.ns_per_request(0, 3e9, 8) == 3 * SECOND
    now_s = serve(meter, start_s=0, seconds=20, rate=2.0, num_waiting=12)  # 40 ends
    assert meter.ns_per_request(int(now_s * SECOND), SECOND, 40) == pytest.approx(0.75 * SECOND, rel=0.05)


def test_idle_time_says_nothing_about_the_rate():
    meter = DrainMeter()
    serve(meter, start_s=0, seconds=10, rate=0.2, num_waiting=0)
    assert meter.ns_per_request(10 * SECOND, 0, 8) is None
    now_s = serve(meter, start_s=10, seconds=10, rate=4.0, num_waiting=12)
    assert meter.rate(int(now_s * SECOND)) == pytest.approx(4.0, rel=0.05)


def test_who_was_turned_away_wanted_in_as_much_as_who_waits():
    meter = DrainMeter()
    for idx in range(10):
        meter.note_refusal(idx * SECOND)
        serve(meter, start_s=idx, seconds=0.95, rate=4.0, num_waiting=0)
    assert meter.rate(10 * SECOND) == pytest.approx(4.0, rel=0.3)


def test_only_the_window_counts():
    meter = DrainMeter()
    serve(meter, start_s=0, seconds=20, rate=20.0, num_waiting=12)
    now_s = serve(meter, start_s=20, seconds=35, rate=1.0, num_waiting=12)
    assert meter.rate(int(now_s * SECOND)) == pytest.approx(1.0, rel=0.3)


def test_an_old_measurement_is_forgotten():
    meter = DrainMeter()
    now_s = serve(meter, start_s=0, seconds=10, rate=5.0, num_waiting=12)
    assert meter.rate(int((now_s + 100) * SECOND)) == 0.0
    assert meter.ns_per_request(int((now_s + 100) * SECOND), 0, 8) is None


def test_while_nothing_ends_the_time_without_an_end_is_the_least_to_expect():
    meter = DrainMeter()
    for at_s in (0, 10, 20):
        step(meter, at_s, num_waiting=12)
    assert meter.ns_per_request(20 * SECOND, 0, 8) == 20 * SECOND


@pytest.mark.parametrize(
    ("reason", "first_scheduled_ns"),
    [(FinishReason.REJECTED, 0), (FinishReason.REJECTED, None), (FinishReason.ABORT, None)],
)
def test_requests_that_were_refused_or_gave_up_in_the_queue_free_no_place(reason, first_scheduled_ns):
    meter = DrainMeter()
    step(meter, 0, num_waiting=12)
    end(meter, 1, reason, first_scheduled_ns)
    step(meter, 5, num_waiting=12)
    assert meter.rate(5 * SECOND) == 0.0


@given(st.lists(st.tuples(st.floats(0, 90), st.integers(0, 3), st.integers(0, 3)), max_size=30))
def test_busy_time_never_exceeds_the_window(turns):
    meter, now_s = DrainMeter(), 0.0
    for gap_s, num_ended, num_waiting in turns:
        now_s += gap_s
        for _ in range(num_ended):
            end(meter, now_s)
        step(meter, now_s, num_waiting)
        assert 0 <= meter._totals(int(now_s * SECOND))[1] <= DRAIN_WINDOW_S + 1e-9


def test_a_step_longer_than_the_window_keeps_the_ends_it_brought():
    meter = DrainMeter()
    step(meter, 0, num_waiting=3)
    end(meter, 100)
    step(meter, 100, num_waiting=3)
    assert meter.rate(100 * SECOND) == pytest.approx(1 / DRAIN_WINDOW_S, rel=0.3)
