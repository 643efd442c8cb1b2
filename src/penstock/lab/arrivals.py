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
