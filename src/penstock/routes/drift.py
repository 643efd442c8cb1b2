"""Drift: how far the gains of a route's last questions are from those of its fit."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from penstock.routes.answers import F64

WINDOW, LEAST = 500, 100
"""Most and fewest questions that are compared with those of the fit."""
MAX_QUANTILES = 200


def quantiles_of(gains: F64, moved: F64 | None = None) -> F64:
    """Return gains at evenly spaced ranks, without and with the first tokens of an answer. [ranks, 2]"""
    pairs = np.stack([gains, gains if moved is None else moved], axis=1)
    ranks = np.linspace(0, len(pairs) - 1, min(len(pairs), MAX_QUANTILES)).round().astype(np.intp)
    found: F64 = pairs[np.argsort(pairs[:, 1], kind="stable")[ranks]]
    return found


def distance(some: F64, others: F64) -> float:
    """Return the Kolmogorov-Smirnov distance, from 0 to 1: the largest difference of two distribution functions.

    So the shares of two sets of questions above any threshold differ by no more. (Massey, The Kolmogorov-Smirnov Test for
    Goodness of Fit, JASA 46, 1951.)
    """
    at = np.concatenate([some, others])
    below = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (some, others)]
    return float(np.abs(below[0] - below[1]).max())


@dataclass(frozen=True, slots=True, eq=False)
class Drift:
    fitted: F64
    """Gains by which the questions of the fit would have been routed."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Gains by which the last questions were routed. Only the event loop may access them."""

    def distance(self) -> float | None:
        """Return the distance between the two, or None before `LEAST` questions."""
        return distance(np.array(self.recent), self.fitted) if len(self.recent) >= LEAST else None
