"""Figures of a route: the quality of its answers at each share of questions that the strong model gets.

The gain at a share is that part of the difference between the two models' quality which the route gets. Its mean over all
shares is APGR (RouteLLM, arXiv 2406.18665): 0.5 for a route that draws lots.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.routes.answers import F64, Answers

NUM_DRAWS = 1_000
"""Samples of questions from which intervals are made."""
INTERVAL = (2.5, 97.5)
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    num_questions: int
    weak: float
    """Quality of the weak model alone."""
    strong: float
    apgr: float
    apgr_interval: Interval
    """95 %, as the next ones, from samples of the questions."""
    half: float
    """Quality when the strong model gets half of the questions."""
    share_for_80: float
    """Least share of questions for the strong model with 80 % of the gain."""
    share_for_80_interval: Interval


def figures_of(answers: Answers, gains: F64, *, seed: int = 0) -> Figures:
    """Return the figures of a route that expects these gains. NaN stands for those of a gain that is none."""
    rng, count = np.random.default_rng(seed), len(answers)
    mixed = rng.permutation(count)  # of equal gains, none comes first by its place in the file
    order = mixed[np.argsort(-gains[mixed], kind="stable")]
    weak, differences = answers.weak[order], (answers.strong - answers.weak)[order]
    apgr, share = _of(differences)
    drawn = np.array([_of(differences[np.sort(rng.integers(count, size=count))]) for _ in range(NUM_DRAWS)])
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    bounds = np.percentile(drawn, INTERVAL, axis=0) if len(drawn) else np.full((2, 2), np.nan)
    half = float(weak.mean() + differences[: count // 2].sum() / count)
    return Figures(
        count,
        float(weak.mean()),
        float(answers.strong.mean()),
        apgr,
        (float(bounds[0, 0]), float(bounds[1, 0])),
        half,
        share,
        (float(bounds[0, 1]), float(bounds[1, 1])),
    )


def _of(differences: F64) -> tuple[float, float]:
    """Return (APGR, least share for 80 % of the gain) for differences of quality, the most promising question first."""
    total = differences.sum()
    if total <= 0:
        return np.nan, np.nan
    gained = np.concatenate([[0.0], np.cumsum(differences)]) / total
    return float(gained.mean()), float(np.argmax(gained >= 0.8)) / len(differences)
