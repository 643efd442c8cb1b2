"""Figures of a route: the quality of its answers at each share of questions that the strong model gets.

The gain at a share is the fraction of the quality gap between the two models that the route recovers. Its mean over all
shares is APGR (RouteLLM, arXiv 2406.18665): 0.5 for random routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from penstock.routes.answers import F64, Answers

NUM_DRAWS = 1_000
"""Bootstrap samples for the intervals."""
INTERVAL = (2.5, 97.5)
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Figures:
    num_questions: int
    weak: float
    """Quality of the weak model alone."""
    strong: float
    half: float
    """Quality when the strong model gets half of the questions."""
    apgr: float
    share_for_80: float
    """Least share of questions for the strong model with 80 % of the gain."""
    share_for_point: float
    """Least share whose quality is within one point of the strong model's."""
    apgr_interval: Interval
    """95 % interval, bootstrapped over questions, as are the next two. NaN if the strong model is not better in more than 2.5 %
    of the samples."""
    share_for_80_interval: Interval
    share_for_point_interval: Interval


def figures_of(answers: Answers, gains: F64) -> Figures:
    """Return the figures of a route with these expected gains. APGR and shares are NaN without a better strong model."""
    rng, count = np.random.default_rng(0), len(answers)
    differences = _differences(answers, gains, rng)
    half = float(answers.weak.mean() + differences[: count // 2].sum() / count)
    drawn = np.array([_of(differences[np.sort(rng.integers(count, size=count))]) for _ in range(NUM_DRAWS)])
    drawn = drawn[np.isfinite(drawn).all(axis=1)]
    is_known = len(drawn) >= 0.975 * NUM_DRAWS
    bounds = np.percentile(drawn, INTERVAL, axis=0).T.tolist() if is_known else [(np.nan, np.nan)] * 3
    intervals = [(low, high) for low, high in bounds]
    return Figures(count, float(answers.weak.mean()), float(answers.strong.mean()), half, *_of(differences), *intervals)


def apgr(answers: Answers, gains: F64) -> float:
    return _of(_differences(answers, gains, np.random.default_rng(0)))[0]


def _differences(answers: Answers, gains: F64, rng: np.random.Generator) -> F64:
    """Return what the strong model gains, the most promising question first."""
    mixed = rng.permutation(len(answers))  # ties must not depend on the order in the file
    found: F64 = (answers.strong - answers.weak)[mixed[np.argsort(-gains[mixed], kind="stable")]]
    return found


def _of(differences: F64) -> tuple[float, float, float]:
    """Return (APGR, least share for 80 % of the gain, and for all but a point) for differences of quality."""
    count, total = len(differences), differences.sum()
    if total <= 0:
        return np.nan, np.nan, np.nan
    gained = np.concatenate([[0.0], np.cumsum(differences)])
    shares = [float(np.argmax(gained >= enough)) / count for enough in (0.8 * total, total - 0.01 * count)]
    return float(gained.mean() / total), shares[0], shares[1]


MOST_LEVELS = 10


@dataclass(frozen=True, slots=True)
class Kept:
    """A route's answers if it keeps weak answers with a confidence of at least `least`."""

    least: float
    share: float
    """Share of the answers that are kept."""
    quality_of_kept: float
    quality: float
    """The mean over all questions; the strong model answers where the weak one is not kept."""


def kept_from(answers: Answers, confidence: F64) -> list[Kept]:
    """Return the effect of thresholds of confidence: all values that occur, or ten quantiles if there are more."""
    levels = np.unique(confidence)
    if len(levels) > MOST_LEVELS:
        levels = np.unique(np.quantile(confidence, np.arange(MOST_LEVELS) / MOST_LEVELS))
    found = []
    for least in levels:
        kept = confidence >= least
        quality = np.where(kept, answers.weak, answers.strong).mean()
        found.append(Kept(float(least), float(kept.mean()), float(answers.weak[kept].mean()), float(quality)))
    return found
