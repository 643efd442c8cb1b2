"""Confidence intervals of means, quantiles, shares and rates, all at `LEVEL`. Too small a sample has no interval.

Successive requests share a queue, so their latencies are not independent. A series is passed in time order, and its length n
is replaced by its effective sample size: n over the integrated autocorrelation time (Sokal 1997, section 3, with the
corrections of Wolff, Computer Physics Communications 156, 2004). docs/bench-results.md names the method for each figure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

LEVEL = 0.95
MIN_DRAWS = 6.0
MAX_BATCHES = 20
"""Most batches. More gain little, and neighbouring ones would be less independent."""
_ALMOST_NORMAL, _NUM_SLICES = 2000.0, 4096


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure and the ends of its confidence interval. The ends are None if the sample is too small."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_known(self) -> bool:
        return self.low is not None and self.high is not None

    def scaled(self, factor: float) -> Estimate:
        if self.low is None or self.high is None:
            return Estimate(self.value * factor)
        return Estimate(self.value * factor, self.low * factor, self.high * factor)

    def inverted(self, numerator: float) -> Estimate:
        """Return `numerator` divided by this estimate, which is at least 0. If the interval contains 0, the result has none."""
        value = numerator / self.value if self.value else math.inf
        if not self.low or not self.high or self.low <= 0:
            return Estimate(value)
        return Estimate(value, numerator / self.high, numerator / self.low)


def student_quantile(share: float, degrees: float) -> float:
    """Return a quantile of Student's t by an expansion around the normal quantile (Abramowitz and Stegun, 26.7.5).

    The error at 0.975 is below 1 % for 2 degrees and below 0.1 % from 5 on.
    """
    z = NormalDist().inv_cdf(share)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / degrees**power for power, term in enumerate(terms, start=1))


def student_tail(distance: float, degrees: float) -> float:
    """Return the probability that |t| >= |distance| for Student's t, by numerical integration."""
    if degrees > _ALMOST_NORMAL:
        return 2 * NormalDist().cdf(-abs(distance))
    begin = math.atan(abs(distance) / math.sqrt(degrees))
    middles = (np.arange(_NUM_SLICES) + 0.5) / _NUM_SLICES
    within = begin * float((np.cos(begin * middles) ** (degrees - 1)).mean())
    rest = math.pi / 2 - begin
    beyond = rest * float((np.cos(begin + rest * middles) ** (degrees - 1)).mean())
    return beyond / (within + beyond)


@dataclass(frozen=True, slots=True)
class Draws:
    """Effective sample size of a series, in equivalent independent samples, with its degrees of freedom."""

    count: float
    degrees: float

    @property
    def is_enough(self) -> bool:
        return self.count >= MIN_DRAWS and self.degrees >= 2


def effective_draws(series: Floats) -> Draws:
    """Return the effective sample size of a non-empty series in time order; at most its length."""
    length = len(series)
    centred = series - series.mean()
    if length < 2 or not centred.any():
        return Draws(float(length), float(max(1, length - 1)))
    padded = 1 << (2 * length - 1).bit_length()
    covariance = np.fft.irfft(np.abs(np.fft.rfft(centred, padded)) ** 2, padded)[:length]
    times = 2 * np.cumsum(covariance / covariance[0]) - 1
    long_enough = np.flatnonzero(np.arange(length) >= 5 * times)
    width = 2 * int(long_enough[0]) + 1 if len(long_enough) else length
    time, own_error = float(times[(width - 1) // 2]), math.sqrt(2 * width / length)
    if time < 1 + own_error:  # Independent values look like that.
        return Draws(float(length), float(length - 1))
    return Draws(length / time / (1 + width / length), length / width)


def mean_estimate(series: Floats) -> Estimate:
    mean, draws = float(series.mean()), effective_draws(series)
    if not draws.is_enough:
        return Estimate(mean)
    half = student_quantile((1 + LEVEL) / 2, draws.degrees) * float(series.std(ddof=1)) / math.sqrt(draws.count)
    return Estimate(mean, mean - half, mean + half)


def nearest_rank(values: Floats, share: float) -> float:
    """Return the smallest of the values that the share `share` of them does not exceed."""
    return float(np.sort(values)[max(0, math.ceil(share * len(values) - 1e-9) - 1)])


def quantile_estimate(series: Floats, share: float) -> Estimate:
    """Return a quantile of a non-empty series in time order. Its interval is two order statistics (David and Nagaraja, 7.1)."""
    value = float(np.quantile(series, share))
    draws = effective_draws((series <= value).astype(np.float64))
    if not draws.is_enough:
        return Estimate(value)
    count = math.floor(draws.count * _shrink(draws.degrees))
    if (ranks := binomial_ranks(count, share)) is None:
        return Estimate(value)
    ordered, stretch = np.sort(series), len(series) / count
    low, high = max(1, math.floor(ranks[0] * stretch + 1e-9)), min(len(series), math.ceil(ranks[1] * stretch - 1e-9))
    return Estimate(value, min(value, float(ordered[low - 1])), max(value, float(ordered[high - 1])))


def _shrink(degrees: float) -> float:
    return (NormalDist().inv_cdf((1 + LEVEL) / 2) / student_quantile((1 + LEVEL) / 2, degrees)) ** 2


def binomial_ranks(count: int, share: float) -> tuple[int, int] | None:
    """Return the ranks, from 1, of two sorted values that enclose the quantile `share` of `count` values. None for too few."""
    if count < 1:
        return None
    spread = 10 * math.sqrt(count * share * (1 - share)) + 30
    first, last = max(0, math.floor(count * share - spread)), min(count, math.ceil(count * share + spread))
    below = np.arange(first, last, dtype=np.float64)
    ratios = np.log((count - below) / (below + 1)) + math.log(share / (1 - share))
    logs = np.concatenate([[0.0], np.cumsum(ratios)])
    chances = np.exp(logs - logs.max())
    at_most = np.cumsum(chances) / chances.sum()
    tail = (1 - LEVEL) / 2
    low = first + int(np.searchsorted(at_most, tail, side="right"))
    high = first + int(np.searchsorted(at_most, 1 - tail, side="left")) + 1
    return (low, high) if low >= 1 and high <= count else None


def grouped_quantile(values: Floats, counts: Ints, share: float) -> Estimate:
    """Return a quantile of values in groups, such as one histogram per stretch of time (Korn and Graubard, 1998).

    The effective sample size comes from how the share below the quantile varies between groups. `values`: [buckets],
    ascending; `counts`: [groups, buckets].
    """
    totals = counts.sum(axis=0)
    value = float(values[_bucket_at(totals, share)])
    sizes = counts.sum(axis=1)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    groups = len(sizes)
    if groups < MIN_DRAWS:
        return Estimate(value)
    below, everything = counts[:, values <= value].sum(axis=1), float(sizes.sum())
    strayed = below - sizes * below.sum() / everything
    error = math.sqrt(groups / (groups - 1) * float((strayed**2).sum())) / everything
    error = max(error, math.sqrt(share * (1 - share) / everything))
    independent = effective_draws(below / sizes)
    if not independent.is_enough:
        return Estimate(value)
    shrunk = independent.count / groups * _shrink(min(groups - 1, independent.degrees))
    draws = math.floor(share * (1 - share) / error**2 * shrunk + 1e-9)
    if (ranks := binomial_ranks(draws, share)) is None:
        return Estimate(value)
    low, high = (float(values[_bucket_at(totals, rank / draws)]) for rank in ranks)
    return Estimate(value, min(low, value), max(high, value))


def _bucket_at(totals: Ints, share: float) -> int:
    upto = np.cumsum(totals)
    return min(len(totals) - 1, int(np.searchsorted(upto, share * float(upto[-1]) - 1e-9, side="left")))


def rate_estimate(total: float, batches: Floats, duration_s: float) -> Estimate:
    """Return the rate `total` / `duration_s`, with an interval by batch means (Schmeiser, 1982).

    `batches`: `total` divided among equal parts of the time.
    """
    rate = total / duration_s if duration_s > 0 else 0.0
    count = len(batches)
    if count < MIN_DRAWS or duration_s <= 0:
        return Estimate(rate)
    error = float(batches.std(ddof=1)) * math.sqrt(count) / duration_s
    half = student_quantile((1 + LEVEL) / 2, count - 1) * error
    return Estimate(rate, max(0.0, rate - half), rate + half)


def share_estimate(holds: Bools, values: Floats) -> Estimate:
    """Return the share of requests where `holds` is true, with Wilson's interval. Both arrays are in time order.

    `values` are latencies. They give the effective sample size if `holds` is the same for all requests.
    """
    share, z = float(holds.mean()), NormalDist().inv_cdf((1 + LEVEL) / 2)
    draws = effective_draws(values if share in (0, 1) else holds.astype(np.float64))
    if not draws.is_enough:
        return Estimate(share)
    of = draws.count * _shrink(draws.degrees)
    middle = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    # At the ends, rounding would leave 1e-17.
    return Estimate(share, middle - half if share > 0 else 0.0, middle + half if share < 1 else 1.0)
