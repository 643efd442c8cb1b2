"""Open-loop arrivals have the rate and the burstiness that was asked for."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise

import pytest

from penstock.lab.arrivals import NS_PER_S, gamma, poisson


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_mean_and_the_spread_asked_for(cv: float) -> None:
    times = gamma(random.Random(0), 40_000, rate=5.0, cv=cv)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert statistics.fmean(gaps) == pytest.approx(NS_PER_S / 5, rel=0.08)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.08)
    assert times == sorted(times)


def test_poisson_is_gamma_of_cv_one_and_repeats_with_its_seed() -> None:
    assert poisson(random.Random(3), 10, 2.0) == gamma(random.Random(3), 10, 2.0, cv=1.0)
