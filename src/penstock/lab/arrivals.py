"""When requests come: instants of an open loop, which do not depend on how fast they are served. Called by benchmarks;
randomness is passed in.
"""

from __future__ import annotations

from itertools import accumulate
from random import Random

NS_PER_S = 1_000_000_000


def poisson(rng: Random, count: int, rate: float) -> list[int]:
    """`count` instants in nanoseconds, `rate` per second, independent of each other."""
    return gamma(rng, count, rate, cv=1.0)


def gamma(rng: Random, count: int, rate: float, cv: float) -> list[int]:
    """As `poisson`, with gaps whose standard deviation is `cv` times their mean: above 1 they come in bursts."""
    shape = 1 / cv**2
    gaps = (rng.gammavariate(shape, 1 / (shape * rate)) for _ in range(count))
    return [round(at_s * NS_PER_S) for at_s in accumulate(gaps)]


def at_rate(times_s: list[float], rate: float) -> list[int]:
    """A trace's instants, stretched so that so many come per second; the first comes at 0."""
    span_s = times_s[-1] - times_s[0]
    stretch = (len(times_s) - 1) / (rate * span_s) if span_s else 0.0
    return [round((at_s - times_s[0]) * stretch * NS_PER_S) for at_s in times_s]
