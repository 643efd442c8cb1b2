"""Counts of observations per bucket, in plain integers. Filled by `metrics`; knows nothing of Prometheus, and never locks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Histogram:
    """Observations of one quantity, in the unit that its bounds are in."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds`: the upper edges of the buckets, ascending; one for everything above is added."""
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_many(self, values: Iterable[float]) -> None:
        """All values of a step in one go."""
        bounds, counts, total = self._bounds, self._counts, 0.0
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            total += value
        self._sum += total

    def snapshot(self, unit: float = 1.0) -> tuple[list[tuple[str, float]], float]:
        """([(upper edge as Prometheus writes it, observations at or below it)], sum), both in multiples of `unit`."""
        edges = [*(repr(float(bound / unit)) for bound in self._bounds), "+Inf"]
        buckets: list[tuple[str, float]] = []
        num_below = 0
        for edge, count in zip(edges, self._counts, strict=True):
            num_below += count
            buckets.append((edge, float(num_below)))
        return buckets, self._sum / unit
