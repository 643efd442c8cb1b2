"""Signals: sustained and not of the moment; replicas that neither flap nor sleep. In virtual time."""

from __future__ import annotations

import random

import pytest

from penstock.obs.signals import WINDOW_S, Signals
from penstock.replicas import DOWN_S, UP_S
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats, StepCounts, StepStats, WaitReason
from support.loads import make_load

SECOND = 1_000_000_000
ROWS = 10
IDLE = make_load(num_rows_free=ROWS)


def make_step(at_s: float, num_running: int, num_waiting: int = 0, num_held: int = 0) -> StepStats:
    at_ns = int(at_s * SECOND)
    reason = WaitReason.ROWS if num_waiting else WaitReason.NOTHING
    return StepStats(0, at_ns, at_ns, num_running, num_waiting, 100, 100 - num_held, 0, StepCounts(waits_for=reason))


class Server:
    """Signals fed ten times a second, and what they said."""

    def __init__(self, drain_rate: float = 0.0, requests_per_call: int = 1) -> None:
        self.drain_rate = drain_rate
        self.requests_per_call = requests_per_call
        self.signals = Signals(ROWS, lambda now_ns: self.drain_rate)
        self.now_s = 0.0
        self.desired: list[int] = []

    def run(self, seconds: float, num_running: int, num_waiting: int = 0, calls_per_s: float = 0.0, num_held: int = 0) -> None:
        num_calls = 0.0
        for _ in range(round(seconds * 10)):
            self.now_s = round(self.now_s + 0.1, 3)
            self.signals.on_step(make_step(self.now_s, num_running, num_waiting, num_held))
            num_calls += calls_per_s / 10
            while num_calls >= 1:
                self.signals.on_call(int(self.now_s * SECOND), self.requests_per_call)
                num_calls -= 1
            held = make_load(num_running, num_waiting, ROWS - num_running, num_blocks_free=100 - num_held)
            self.last = self.signals.read(held, int(self.now_s * SECOND))
            self.desired.append(self.last.desired_replicas)


def test_a_queue_that_does_not_drain_is_not_one_without_a_wait():
    server = Server(drain_rate=0.0)
    server.run(WINDOW_S, num_running=10, num_waiting=8)
    assert server.last.queue_delay_s == pytest.approx(8 * WINDOW_S, rel=0.05), "none ended, so at most one in the window"
    server = Server(drain_rate=0.0)
    server.run(WINDOW_S, num_running=1)
    server.run(0.5, num_running=10, num_waiting=60)
    assert server.last.queue_delay_s < 2, "none ended yet: of so short a queue nothing is known"
    server.run(WINDOW_S + 1, num_running=10)
    assert server.last.queue_delay_s == 0


def test_means_are_over_the_window_and_not_of_the_moment():
    server = Server(drain_rate=2.0)
    server.run(WINDOW_S, num_running=10, num_waiting=8, calls_per_s=3, num_held=60)
    assert server.last.queue_depth == pytest.approx(8, rel=0.05)
    assert server.last.queue_delay_s == pytest.approx(4, rel=0.05)
    assert server.last.utilisation == pytest.approx(1.0, rel=0.02)
    assert server.last.kv_headroom == pytest.approx(0.4, rel=0.05)
    assert server.last.arrivals_per_s == pytest.approx(3, rel=0.1)
    server.run(WINDOW_S / 2, num_running=5, num_held=20)
    assert server.last.queue_depth == pytest.approx(4, rel=0.1)
    assert server.last.utilisation == pytest.approx(0.75, rel=0.05)
    assert server.last.kv_headroom == pytest.approx(0.6, rel=0.05)


def test_a_pause_without_steps_lasts_as_the_last_state():
    server = Server()
    server.run(10, num_running=0)
    later = server.signals.read(IDLE, int((server.now_s + 3600) * SECOND))
    assert (later.queue_depth, later.utilisation, later.kv_headroom) == (0, 0, 1)
    assert later.desired_replicas == 1


@pytest.mark.parametrize("pause_s", [1, 7, 29, 31, 40, 200, 299, 301, 335, 1000])
def test_a_long_idleness_is_as_if_it_had_been_watched(pause_s):
    """Its seconds are counted when it ends, and most of them are left out then."""
    watched, alone = Server(drain_rate=2.0), Server(drain_rate=2.0)
    for server in (watched, alone):
        server.run(40, num_running=10, num_waiting=8, calls_per_s=5)
        server.run(0.5, num_running=0)
    watched.run(pause_s, num_running=0)
    at_ns = int(watched.now_s * SECOND)
    assert alone.signals.read(IDLE, at_ns) == watched.signals.read(IDLE, at_ns)


def test_a_step_after_a_long_idleness_does_not_count_all_its_seconds():
    asked = []
    signals = Signals(ROWS, lambda now_ns: asked.append(now_ns) or 1.0)
    signals.on_step(make_step(1.0, num_running=0))
    signals.on_step(make_step(3600.0, num_running=1))
    assert len(asked) < 50


def test_one_call_in_the_first_moments_is_not_several_a_second():
    signals = Signals(ROWS, lambda now_ns: 0.0)
    signals.on_call(int(5.0 * SECOND), 1)
    assert signals.read(make_load(1, num_rows_free=ROWS), int(5.1 * SECOND)).arrivals_per_s == pytest.approx(0.2)
    assert signals.read(make_load(1, num_rows_free=ROWS), int(15.0 * SECOND)).arrivals_per_s == pytest.approx(0.1)


def test_who_leaves_between_two_steps_is_gone():
    signals = Signals(ROWS, lambda now_ns: 1.0)
    signals.on_step(make_step(1.0, num_running=8, num_waiting=20, num_held=50))
    for index in range(28):
        scheduled_ns = None if index < 20 else 1
        signals.on_finish(
            RequestStats("r", "", 0, scheduled_ns, None, int(1.5 * SECOND), 1, 0, 0, 0, finish_reason=FinishReason.ABORT)
        )
    later = signals.read(IDLE, 300 * SECOND)
    assert (later.queue_depth, later.utilisation, later.kv_headroom) == (0.0, 0.0, 1.0)


def test_twice_the_capacity_asks_for_three_servers_within_half_a_minute():
    server = Server(drain_rate=4.0)
    server.run(60, num_running=6)
    begun = len(server.desired)
    server.run(40, num_running=10, num_waiting=8, calls_per_s=8)
    assert server.desired[begun - 1] == 1
    assert server.desired[-1] == 3  # 2 / 0.8, and the queue
    assert server.desired[begun:].index(2) / 10 <= 30
    assert server.desired[begun:].index(2) / 10 >= UP_S


def test_a_call_of_several_requests_needs_as_many_servers_as_calls_of_one():
    one, several = Server(drain_rate=4.0), Server(drain_rate=4.0, requests_per_call=8)
    one.run(60, num_running=10, num_waiting=8, calls_per_s=16)
    several.run(60, num_running=10, num_waiting=8, calls_per_s=2)
    assert several.desired[-1] == one.desired[-1] == 5  # 16 / 4 / 0.8
    assert several.last.arrivals_per_s == pytest.approx(2, rel=0.1), "these are calls"


def test_a_short_peak_starts_nothing():
    server = Server(drain_rate=4.0)
    server.run(60, num_running=6)
    server.run(UP_S - 8, num_running=10, num_waiting=40, calls_per_s=40)
    server.run(60, num_running=6)
    assert set(server.desired) == {1}


def test_down_only_after_the_long_window():
    server = Server(drain_rate=4.0)
    server.run(60, num_running=10, num_waiting=8, calls_per_s=8)
    up = server.last.desired_replicas
    server.run(DOWN_S - 20, num_running=2)
    assert server.last.desired_replicas == up
    server.run(60, num_running=2)
    assert server.last.desired_replicas == 1


def test_a_noisy_load_does_not_flap():
    """Utilisation between 0.5 and 1.3 of the target from one second to the next, for four of the long windows."""
    rng = random.Random(1)
    server = Server()
    for _ in range(4 * DOWN_S):
        server.run(1, num_running=rng.randint(4, 10))
    changes = sum(before != after for before, after in zip(server.desired, server.desired[1:], strict=False))
    assert changes <= 2


def test_a_load_that_swings_faster_than_the_window_keeps_what_its_peaks_need():
    server = Server(drain_rate=4.0)
    for _ in range(10):
        server.run(60, num_running=10, num_waiting=8, calls_per_s=8)
        server.run(60, num_running=1)
    settled = server.desired[1200:]
    assert set(settled) == {3}


def test_a_job_in_the_background_calls_for_no_replica_and_leaves_the_last_request_the_last():
    server = Server()
    server.run(WINDOW_S, num_running=5)
    line = RequestStats("line", "", 0, 0, 0, int(server.now_s * SECOND), 1, 0, 1, 0, FinishReason.STOP, background=True)
    for _ in range(5):
        server.signals.on_finish(line)
    later_ns = int((server.now_s + WINDOW_S) * SECOND)
    held = make_load(5, 0, ROWS - 5, num_blocks_free=10)._replace(num_background=500, num_blocks_background=90)
    found = server.signals.read(held, later_ns)
    assert found.utilisation == pytest.approx(0.5, rel=0.05), "five of ten rows are still in use"
    assert found.kv_headroom == pytest.approx(1.0)
    assert found.desired_replicas == 1
