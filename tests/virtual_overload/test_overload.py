"""Twice the capacity before the door, in virtual time: what gets in is served in time, and who comes back as told gets in."""

from __future__ import annotations

import random

import pytest

from penstock.admission.door import AdmissionLimits
from penstock.sched.policies.presets import make_policies
from virtual_overload.town import SECOND, Town, judge, make_clients, measure_capacity

SLO_S = 2.0
SECONDS = 25.0


@pytest.fixture(scope="module")
def capacity() -> float:
    return measure_capacity()


@pytest.mark.parametrize(
    ("cv", "return_share"), [(1.0, 1.0), (1.0, 0.0), (4.0, 1.0), (4.0, 0.5)], ids=lambda value: f"{value:g}"
)
def test_at_twice_the_capacity_the_door_keeps_the_target_and_its_word(capacity: float, cv: float, return_share: float) -> None:
    clients = make_clients(1, 2 * capacity, SECONDS, cv)
    rng = random.Random(3)
    for client in clients:
        client.returns = rng.random() < return_share
    town = Town(AdmissionLimits(slo_ttft_ns=int(SLO_S * SECOND)))
    town.run(clients)
    verdict = judge(clients, SLO_S, SECONDS)
    assert verdict.goodput >= 0.9 * capacity
    assert verdict.ttft_p99_s <= SLO_S
    assert verdict.return_share >= 0.9
    assert all(client.ended_ns for client in clients if client.admitted_ns is not None)
    town.core.check()


@pytest.mark.parametrize("gate", ["static", "dynamic"])
def test_the_target_is_kept_where_whole_batches_have_to_end_first(gate: str) -> None:
    """A target of several batches' time; those who come back compete for places that become free a batch at a time."""
    slo_s, seconds = 60.0, 120.0
    capacity = measure_capacity(make_policies(gate=gate))
    clients = make_clients(1, 2 * capacity, seconds, 1.0)
    Town(AdmissionLimits(slo_ttft_ns=int(slo_s * SECOND)), policies=make_policies(gate=gate)).run(clients)
    verdict = judge(clients, slo_s, seconds)
    assert verdict.goodput >= 0.9 * capacity
    assert verdict.ttft_p99_s <= slo_s
    assert verdict.return_share >= 0.9


def test_without_a_target_nearly_everyone_waits_too_long(capacity: float) -> None:
    clients = make_clients(1, 2 * capacity, SECONDS, 1.0)
    town = Town(AdmissionLimits(max_queue=10**6, kv_headroom=0))
    town.run(clients)
    verdict = judge(clients, SLO_S, SECONDS)
    assert verdict.num_refused == 0
    assert verdict.goodput <= 0.3 * capacity
    assert verdict.ttft_p99_s > 5 * SLO_S


def test_a_full_queue_keeps_its_word_without_a_target(capacity: float) -> None:
    clients = make_clients(2, 2 * capacity, SECONDS, 1.0)
    town = Town(AdmissionLimits(max_queue=20))
    town.run(clients)
    verdict = judge(clients, 60.0, SECONDS)
    assert verdict.goodput >= 0.9 * capacity
    assert verdict.return_share >= 0.9


def test_below_the_capacity_nobody_is_refused(capacity: float) -> None:
    clients = make_clients(4, 0.7 * capacity, SECONDS, 1.0)
    Town(AdmissionLimits(slo_ttft_ns=int(SLO_S * SECOND))).run(clients)
    assert not any(client.refused_ns for client in clients)


def test_those_who_are_sent_away_are_told_times_of_their_own(capacity: float) -> None:
    """No second of the announced returns has more than twice what the server can take."""
    clients = make_clients(5, 4 * capacity, 20.0, 4.0)
    Town(AdmissionLimits(slo_ttft_ns=int(SLO_S * SECOND))).run(clients)
    told = [at_ns // SECOND + wait_s for c in clients for at_ns, wait_s in zip(c.refused_ns, c.retry_after_s, strict=True)]
    measured = [second for second in told if second > 10]  # the rate is known by then
    assert max(measured.count(second) for second in set(measured)) <= 2 * capacity
