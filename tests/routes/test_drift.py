"""Drift: the distance of two sets of gains, what a fit keeps of its own, and the bounded window of a server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.routes.drift import LEAST, MAX_QUANTILES, WINDOW, Drift, distance, quantiles_of
from penstock.routes.learned import SHARES, Cascade, Fit, LearnedRoute, read_route


@pytest.mark.parametrize(
    ("some", "others", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 0.0),
        ([1, 2], [3, 4], 1.0),
        ([1, 2, 3, 4], [3, 4, 5, 6], 0.5),
        ([1, 1, 1, 2], [1, 2], 0.25),
        ([5], [1, 2, 9, 9], 0.5),
    ],
)
def test_the_distance_is_the_largest_difference_of_the_shares_below(some: list, others: list, expected: float) -> None:
    assert distance(np.array(some, float), np.array(others, float)) == pytest.approx(expected)
    assert distance(np.array(others, float), np.array(some, float)) == pytest.approx(expected)


def test_no_threshold_has_a_larger_difference_of_shares() -> None:
    rng = np.random.default_rng(0)
    some, others = rng.normal(size=300), rng.normal(0.4, size=200)
    found = [abs((some >= at).mean() - (others >= at).mean()) for at in np.linspace(-4, 4, 2001)]
    assert max(found) <= distance(some, others) + 1e-12
    assert max(found) == pytest.approx(distance(some, others), abs=0.02)


@pytest.mark.parametrize("count", [1, 50, 5000])
def test_a_fit_keeps_its_gains_at_even_ranks(count: int) -> None:
    rng = np.random.default_rng(count)
    gains = rng.normal(size=count)
    moved = gains + 0.1 * rng.normal(size=count)
    kept = quantiles_of(gains, moved)
    assert kept.shape == (min(count, MAX_QUANTILES), 2)
    assert distance(kept[:, 1], moved) < 0.01
    assert distance(kept[:, 0], gains) < 0.1
    assert (np.diff(kept[:, 1]) >= 0).all()
    assert (quantiles_of(gains)[:, 0] == quantiles_of(gains)[:, 1]).all()


def route_of(quantiles: np.ndarray | None, margin: float | None = None) -> LearnedRoute:
    fits = [Fit(np.zeros(num), np.ones(num), np.zeros(4 + num + 1), np.zeros(4 + num + 1)) for num in (2, 5)]
    cascade = None if margin is None else Cascade("small", 4, margin, fits[1])
    return LearnedRoute(
        embedder="vectors",
        by_question=fits[0],
        cascade=cascade,
        thresholds=tuple(1 - share for share in SHARES),
        quantiles=quantiles,
    )


def test_the_gains_of_a_cascade_are_those_that_would_have_decided(tmp_path: Path) -> None:
    pairs = np.array([[0.1, 0.9], [0.4, 0.2], [0.6, 0.7], [0.9, 0.1]])
    route_of(pairs, margin=0.2).write(tmp_path / "r.json")
    route = read_route(tmp_path / "r.json")
    assert route.fitted_gains(0.5).tolist() == [0.1, 0.2, 0.7, 0.9]
    assert route.fitted_gains(np.inf).tolist() == [0.1, 0.4, 0.6, 0.9]
    assert route_of(pairs).fitted_gains(0.5).tolist() == [0.1, 0.4, 0.6, 0.9]
    assert route_of(None).fitted_gains(0.5) is None


def test_the_last_questions_are_compared_once_there_are_enough() -> None:
    drift = Drift(np.linspace(0, 1, 101))
    for _ in range(LEAST - 1):
        drift.recent.append(2.0)
    assert drift.distance() is None
    drift.recent.append(2.0)
    assert drift.distance() == 1.0
    for gain in np.linspace(0, 1, WINDOW):
        drift.recent.append(float(gain))
    assert len(drift.recent) == WINDOW
    assert drift.distance() < 0.02
