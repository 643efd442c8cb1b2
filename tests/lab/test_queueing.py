"""Waits are those of textbooks, and of queues that are simulated event by event."""

from __future__ import annotations

import heapq
from random import Random

import pytest

from penstock.lab.queueing import erlang_b, erlang_c, mean_wait, wait_quantile


@pytest.mark.parametrize(
    ("servers", "load", "blocked", "waits"),
    [
        (1, 0.5, 1 / 3, 0.5),
        (2, 1.0, 0.2, 1 / 3),
        (5, 4.0, 0.199067, 0.554113),  # printed in tables of Erlang's formulas
        (10, 8.0, 0.121661, 0.409180),
    ],
)
def test_erlangs_formulas(servers: int, load: float, blocked: float, waits: float) -> None:
    assert erlang_b(servers, load) == pytest.approx(blocked, abs=1e-6)
    assert erlang_c(servers, load) == pytest.approx(waits, abs=1e-6)


def test_one_server_waits_as_pollaczek_and_khinchine_say() -> None:
    assert mean_wait(1, 0.8, 1.0, cv=1.0) == pytest.approx(0.8 / 0.2)  # M/M/1: load / (1 - load) services
    assert mean_wait(1, 0.8, 1.0, cv=0.0) == pytest.approx(0.8 / 0.2 / 2)  # M/D/1 waits half as long
    assert mean_wait(1, 0.8, 1.0, cv=2.0) == pytest.approx(0.8 / 0.2 * 2.5)


def test_the_tail_of_one_server_is_exponential() -> None:
    # P(wait > t) = 0.8 exp(-(1 - 0.8) t)
    assert wait_quantile(0.99, 1, 0.8, 1.0, cv=1.0) == pytest.approx(21.910, abs=1e-3)
    assert wait_quantile(0.1, 1, 0.8, 1.0, cv=1.0) == 0.0, "a fifth of the arrivals does not wait"


@pytest.mark.parametrize(("servers", "cv"), [(1, 0.0), (4, 1.0), (8, 0.5)])
def test_a_simulated_queue_waits_about_as_long(servers: int, cv: float) -> None:
    rng, rate, count = Random(3), 0.8 * servers, 200_000
    free_at = [0.0] * servers
    now = waited = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        service = rng.gammavariate(1 / cv**2, cv**2) if cv else 1.0
        begin = max(now, heapq.heappop(free_at))
        waited += begin - now
        heapq.heappush(free_at, begin + service)
    assert waited / count == pytest.approx(mean_wait(servers, rate, 1.0, cv), rel=0.08)


def test_longer_queues_with_more_load() -> None:
    waits = [mean_wait(4, rate, 1.0, 1.0) for rate in (1.0, 2.0, 3.0, 3.9)]
    assert waits == sorted(waits)
    assert mean_wait(8, 6.0, 1.0, 1.0) < mean_wait(4, 3.0, 1.0, 1.0), "one queue for more servers is shorter"


def test_servers_that_can_not_keep_up_are_an_error() -> None:
    with pytest.raises(ValueError, match="grows without bound"):
        mean_wait(2, 2.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="at least 1"):
        erlang_c(0, 0.0)
