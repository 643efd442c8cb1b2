"""Intervals cover as often as they say, also where neighbours depend on each other; too small a sample has none."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from penstock.lab.intervals import (
    Estimate,
    Floats,
    Ints,
    binomial_ranks,
    effective_draws,
    grouped_quantile,
    mean_estimate,
    quantile_estimate,
    rate_estimate,
    share_estimate,
    student_quantile,
    student_tail,
)

NUM_RUNS = 500
LOAD = 0.7


def autocorrelated(rng: np.random.Generator, count: int, with_the_one_before: float) -> Floats:
    """A standard normal series whose neighbours correlate."""
    own = rng.normal(size=count) * math.sqrt(1 - with_the_one_before**2)
    series = np.empty(count)
    series[0] = rng.normal()
    for i in range(1, count):
        series[i] = with_the_one_before * series[i - 1] + own[i]
    return series


def waits_in_a_queue(rng: np.random.Generator, count: int) -> Floats:
    """M/M/1 at a load of `LOAD`, by Lindley's recursion."""
    steps = rng.exponential(1, count + 500) - rng.exponential(1 / LOAD, count + 500)
    walk = np.concatenate([[0.0], np.cumsum(steps)])
    waits: Floats = (walk - np.minimum.accumulate(walk))[501:]
    return waits


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low is not None and estimate.high is not None and estimate.low <= truth <= estimate.high


@pytest.mark.parametrize(("share", "count"), [(0.5, 500), (0.9, 500), (0.99, 2000)])
def test_quantiles_of_a_known_distribution_are_covered(share: float, count: int) -> None:
    rng = np.random.default_rng(1)
    truth = math.exp(0.7 * NormalDist().inv_cdf(share))
    hits = sum(covers(quantile_estimate(rng.lognormal(0, 0.7, count), share), truth) for _ in range(NUM_RUNS))
    assert 0.92 <= hits / NUM_RUNS <= 0.98


def test_the_mean_of_a_known_distribution_is_covered() -> None:
    rng = np.random.default_rng(2)
    hits = sum(covers(mean_estimate(rng.exponential(3.0, 500)), 3.0) for _ in range(NUM_RUNS))
    assert 0.92 <= hits / NUM_RUNS <= 0.98


def test_neighbours_that_depend_on_each_other_are_no_independent_draws() -> None:
    rng = np.random.default_rng(3)
    runs = [autocorrelated(rng, 2000, 0.8) for _ in range(200)]
    truth = NormalDist().inv_cdf(0.9)
    assert 0.90 <= np.mean([covers(quantile_estimate(run, 0.9), truth) for run in runs]) <= 0.99
    assert 0.90 <= np.mean([covers(mean_estimate(run), 0.0) for run in runs]) <= 0.99
    shuffled = [covers(quantile_estimate(rng.permutation(run), 0.9), truth) for run in runs]
    assert np.mean(shuffled) < 0.8, "the order of time is what tells it"


def test_the_effective_number_is_that_of_theory() -> None:
    rng = np.random.default_rng(4)
    assert effective_draws(rng.normal(size=20_000)).count == pytest.approx(20_000, rel=0.1)
    assert effective_draws(autocorrelated(rng, 20_000, 0.5)).count == pytest.approx(20_000 / 3, rel=0.15)
    assert effective_draws(np.full(7, 3.0)).count == 7


def test_a_drift_has_no_interval_however_long_the_series() -> None:
    """An overloaded server: every request waits longer than the one before."""
    waits = np.arange(10_000.0)
    assert not effective_draws(waits).is_enough
    assert not mean_estimate(waits).is_known
    assert not quantile_estimate(waits, 0.5).is_known


def test_waits_in_a_queue_are_covered() -> None:
    """M/M/1 at a load of 0.7, where some 30 requests in a row share their fate. P(wait > x) = 0.7 exp(-0.3 x)."""
    rng = np.random.default_rng(8)
    truths = {"mean": LOAD / (1 - LOAD)} | {p: math.log(LOAD / (1 - p)) / (1 - LOAD) for p in (0.5, 0.9)}
    found: dict[object, list[bool]] = {name: [] for name in truths}
    for _ in range(150):
        waits = waits_in_a_queue(rng, 2000)
        for name, truth in truths.items():
            estimate = quantile_estimate(waits, name) if isinstance(name, float) else mean_estimate(waits)
            found[name] += [covers(estimate, truth)] if estimate.is_known else []
    for name, hits in found.items():
        assert len(hits) > 100, name
        assert np.mean(hits) >= 0.85, name


def histograms(rows: Floats, values: Floats) -> Ints:
    """Count the numbers of each row [num_rows, num_draws] from each of the ascending `values` to the next one."""
    places = np.searchsorted(values, rows, side="right") - 1
    counts = np.zeros((len(rows), len(values)), np.int64)
    np.add.at(counts, (np.arange(len(rows))[:, None], places), 1)
    return counts


@pytest.mark.parametrize(("share", "own_level"), [(0.5, 0.3), (0.9, 0.3), (0.99, 0.05)])
def test_quantiles_of_groups_cover_though_a_group_has_its_own_level(share: float, own_level: float) -> None:
    """32 groups, each with 100 gaps that share a factor: the independent interval would be far too narrow."""
    rng = np.random.default_rng(5)
    values = np.exp(np.arange(-4, 4, 0.005))
    truth = math.exp(math.hypot(own_level, 0.3) * NormalDist().inv_cdf(share))
    num_runs, hits, num_known, hits_if_independent = 200, 0, 0, 0
    for _ in range(num_runs):
        gaps = np.exp(rng.normal(0, own_level, (32, 1)) + rng.normal(0, 0.3, (32, 100)))
        counts = histograms(gaps, values)
        estimate = grouped_quantile(values, counts, share)
        num_known += estimate.is_known
        hits += covers(estimate, truth)
        hits_if_independent += covers(quantile_estimate(rng.permutation(gaps.ravel()), share), truth)
    assert num_known > 0.83 * num_runs
    assert 0.92 <= hits / num_known <= 0.99
    assert hits_if_independent / num_runs < (0.7 if own_level > 0.1 else 1.0)


def test_an_interval_that_a_sample_is_too_small_for_is_unknown() -> None:
    rng = np.random.default_rng(6)
    assert not quantile_estimate(rng.normal(size=200), 0.999).is_known
    assert quantile_estimate(rng.normal(size=5000), 0.999).is_known
    assert not mean_estimate(np.array([1.0, 2.0, 3.0])).is_known
    assert not quantile_estimate(np.array([1.0]), 0.5).is_known
    assert not grouped_quantile(np.array([1.0]), np.array([[3]]), 0.5).is_known
    assert not rate_estimate(10.0, np.array([10.0]), 2.0).is_known


def test_ranks_are_those_of_the_tables() -> None:
    """For the median: W. J. Conover, Practical Nonparametric Statistics, table A3: 6 draws are the fewest at 95 %."""
    assert binomial_ranks(5, 0.5) is None
    assert binomial_ranks(6, 0.5) == (1, 6)
    assert binomial_ranks(100, 0.5) == (40, 61)
    fewest = math.ceil(math.log(0.025) / math.log(0.999))
    assert binomial_ranks(fewest - 1, 0.999) is None
    assert binomial_ranks(fewest, 0.999) is not None


@pytest.mark.parametrize(("degrees", "expected"), [(2, 4.3027), (5, 2.5706), (10, 2.2281), (30, 2.0423), (1000, 1.9623)])
def test_students_t_is_that_of_the_tables(degrees: float, expected: float) -> None:
    assert student_quantile(0.975, degrees) == pytest.approx(expected, rel=1e-3 if degrees > 2 else 1e-2)
    assert student_tail(expected, degrees) == pytest.approx(0.05, rel=1e-3)
    assert student_tail(-expected, degrees) == student_tail(expected, degrees)


def test_shares_at_the_edge_have_an_interval_within_0_and_1() -> None:
    latencies = np.random.default_rng(11).exponential(size=20)
    none, every = (share_estimate(np.full(20, held), latencies) for held in (False, True))
    assert (none.value, none.low) == (0, 0)
    assert none.high == pytest.approx(0.161, abs=0.02), "the normal one has 0.161; Student's t, a little more"
    assert (every.value, every.high) == (1, 1)
    assert every.low == pytest.approx(0.839, abs=0.02)
    latencies = np.random.default_rng(14).exponential(size=500)
    for count in range(20, 500):
        none, every = (share_estimate(np.full(count, held), latencies[:count]) for held in (False, True))
        assert (none.low or 0.0, every.high or 1.0) == (0, 1), "exactly"


def test_a_p99_of_waits_is_seldom_known_and_then_covered_badly() -> None:
    """As docs/plan.md warns: a run whose waits look independent enough for an interval is one without the long queues."""
    rng = np.random.default_rng(8)
    truth = math.log(LOAD / 0.01) / (1 - LOAD)
    found = [quantile_estimate(waits_in_a_queue(rng, 2000), 0.99) for _ in range(200)]
    hits = [covers(estimate, truth) for estimate in found if estimate.is_known]
    assert 0.02 < len(hits) / len(found) < 0.2
    assert np.mean(hits) < 0.5


def test_shares_of_independent_requests_are_covered() -> None:
    rng = np.random.default_rng(12)
    hits = [covers(share_estimate((values := rng.exponential(size=500)) <= math.log(10), values), 0.9) for _ in range(NUM_RUNS)]
    assert 0.92 <= np.mean(hits) <= 0.98


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_shares_of_waits_in_a_queue_are_covered(share: float) -> None:
    """As the waits themselves. Were they independent, the intervals would cover a third."""
    limit = math.log(LOAD / (1 - share)) / (1 - LOAD)
    rng = np.random.default_rng(13)
    found = [share_estimate(waits <= limit, waits) for waits in (waits_in_a_queue(rng, 2000) for _ in range(150))]
    known = [estimate for estimate in found if estimate.is_known]
    assert len(known) > 100
    assert np.mean([covers(estimate, share) for estimate in known]) >= 0.85


def test_a_share_of_too_few_draws_has_no_interval() -> None:
    grows = np.arange(200.0)
    assert not share_estimate(grows < 100, grows).is_known
    assert not share_estimate(np.full(200, True), grows).is_known
    assert not share_estimate(np.full(3, True), np.array([1.0, 2.0, 1.5])).is_known


def test_rates_cover() -> None:
    rng = np.random.default_rng(7)
    hits = sum(
        covers(rate_estimate(float(batches.sum()), batches, 40.0), 25.0)
        for batches in (rng.poisson(50, 20).astype(float) for _ in range(NUM_RUNS))
    )
    assert 0.92 <= hits / NUM_RUNS <= 0.98


def test_an_inverted_estimate_turns_its_interval() -> None:
    assert Estimate(4.0, 2.0, 8.0).inverted(16.0) == Estimate(4.0, 2.0, 8.0)
    assert Estimate(4.0, 0.0, 8.0).inverted(16.0) == Estimate(4.0)
    assert Estimate(0.0).inverted(16.0) == Estimate(math.inf)
