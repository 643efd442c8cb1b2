"""Open-loop arrivals have the rate and the burstiness that was asked for."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock.lab.arrivals import (
    NS_PER_S,
    arrive,
    bursts,
    constant,
    gamma,
    mean_rate,
    num_arrivals,
    poisson,
    ramp,
    stages,
)
from penstock.lab.transforms import speed, think
from penstock.lab.workload import Job, Workload
from penstock.types.errors import ConfigError


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_the_spread_asked_for(cv: float) -> None:
    times = gamma(random.Random(0), 40_000, rate=5.0, cv=cv)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(NS_PER_S / 5, rel=0.08)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.08)
    assert times == sorted(times)


def test_poisson_is_gamma_of_cv_one_and_repeats_with_its_seed() -> None:
    assert poisson(random.Random(3), 10, 2.0) == gamma(random.Random(3), 10, 2.0, cv=1.0)


@pytest.fixture
def rng() -> random.Random:
    return random.Random(0)


def test_constant_is_even() -> None:
    assert constant(4, 2.0) == [0, NS_PER_S // 2, NS_PER_S, 3 * NS_PER_S // 2]


def count_between(times: list[int], from_s: float, until_s: float) -> int:
    return sum(from_s * NS_PER_S <= at_ns < until_s * NS_PER_S for at_ns in times)


@pytest.mark.parametrize(("first", "last"), [(2.0, 8.0), (8.0, 2.0), (5.0, 5.0)])
def test_ramp_changes_evenly_and_takes_as_long_as_it_says(rng: random.Random, first: float, last: float) -> None:
    times = ramp(rng, 50_000, first, last)
    assert times == sorted(times)
    assert times[-1] / NS_PER_S == pytest.approx(10_000, rel=0.02)
    assert count_between(times, 0, 1000) == pytest.approx(1000 * (first + (last - first) * 0.05), rel=0.1)
    assert count_between(times, 5000, 6000) == pytest.approx(1000 * (first + (last - first) * 0.55), rel=0.1)
    assert count_between(times, 9000, 10_000) == pytest.approx(1000 * (first + (last - first) * 0.95), rel=0.1)


def test_stages_follow_each_other_and_begin_again(rng: random.Random) -> None:
    times = stages(rng, 7000, [(2.0, 1000.0), (0.0, 500.0), (10.0, 200.0)])
    assert times == sorted(times)
    for begin_s in (0.0, 1700.0 - 1e-9):
        assert count_between(times, begin_s, begin_s + 1000) == pytest.approx(2000, rel=0.1)
        assert count_between(times, begin_s + 1000, begin_s + 1500) == 0
    assert count_between(times, 1500, 1700) == pytest.approx(2000, rel=0.1)


def test_bursts_keep_the_mean_rate_and_are_silent_between(rng: random.Random) -> None:
    times = bursts(rng, 10_000, rate=4.0, on_s=5.0, off_s=15.0)
    assert times[-1] / NS_PER_S == pytest.approx(2500, rel=0.03)
    assert all(at_ns % (20 * NS_PER_S) < 5 * NS_PER_S for at_ns in times)
    assert bursts(random.Random(1), 10, 4.0, on_s=5.0, off_s=0.0) == stages(random.Random(1), 10, [(4.0, 5.0)])


def job_at(arrival_ns: int, after: int | None = None) -> Job:
    return Job(arrival_ns=arrival_ns, num_prompt_tokens=1, num_output_tokens=1, after=after)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rng: poisson(rng, 1, 0.0), "rate is 0.0"),
        (lambda rng: constant(1, -1.0), "rate is -1.0"),
        (lambda rng: gamma(rng, 1, 1.0, 0.0), "variation of the gaps is 0.0"),
        (lambda rng: ramp(rng, 1, 1.0, float("nan")), "rate is nan"),
        (lambda rng: stages(rng, 1, [(0.0, 1.0)]), "No stage has a rate"),
        (lambda rng: stages(rng, 1, [(1.0, 0.0)]), "rate 1.0 for 0.0 s"),
        (lambda rng: bursts(rng, 1, 1.0, 0.0, 1.0), "last 0.0 s"),
        (lambda rng: constant(2, 1e-9), "more than ten years"),
        (lambda rng: poisson(rng, 1, 1e-300), "rate is 1e-300"),
        (lambda rng: gamma(rng, 1, 1.0, 1e200), "variation of the gaps is 1e\\+200"),
        (lambda rng: ramp(rng, 1, 1.0, 1e200), "rate is 1e\\+200"),
        (lambda rng: stages(rng, 9, [(1e-9, 1e9), (0.0, 1e9)]), "more than ten years"),
        (lambda rng: stages(rng, 9, [(1e-9, 1e-9)]), "have 1e-18 of 9 requests"),
        (lambda rng: speed(Workload(name="w", jobs=[job_at(5)]), 1e-300), "more than ten years"),
        (lambda rng: think(Workload(name="w", jobs=[job_at(0), job_at(0, after=0)]), 1e300, 0), "more than ten years"),
    ],
)
def test_what_makes_no_sense_is_an_error(rng: random.Random, make: Callable[[random.Random], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(rng)


def test_new_arrivals_move_deadlines_along_and_leave_follow_ups_alone() -> None:
    jobs = [
        Job(arrival_ns=5, num_prompt_tokens=1, num_output_tokens=1, deadline_ns=15, cancelled_ns=8),
        Job(arrival_ns=7, num_prompt_tokens=1, num_output_tokens=1, after=0),
        Job(arrival_ns=6, num_prompt_tokens=1, num_output_tokens=1),
    ]
    workload = Workload(name="w", jobs=jobs)
    assert num_arrivals(workload) == 2
    moved = arrive(workload, [100, 200], "moved")
    assert [(job.arrival_ns, job.deadline_ns, job.cancelled_ns) for job in moved.jobs] == [
        (100, 110, 103),
        (7, None, None),
        (200, None, None),
    ]
    assert moved.name == "w, moved"


def test_mean_rate_is_that_of_the_gaps() -> None:
    jobs = [Job(arrival_ns=at_s * NS_PER_S, num_prompt_tokens=1, num_output_tokens=1) for at_s in (1, 2, 5)]
    assert mean_rate(Workload(name="w", jobs=jobs)) == 0.5
    assert mean_rate(Workload(name="w", jobs=jobs[:1])) is None
