"""Fits a route, and evaluates it by cross-validation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.routes.answers import F64, Answers, Rows
from penstock.routes.curve import apgr
from penstock.routes.drift import quantiles_of
from penstock.routes.learned import Cascade, Fit, LearnedRoute, fit, inputs_of, thresholds_of

NUM_FOLDS, SEED = 5, 0
PENALTIES = (0.1, 1.0, 10.0)
"""Candidates for `penalty` of `fit`, chosen by cross-validation."""
MARGIN_SHARE = 0.95
Starts = Sequence[Sequence[float]]


def fit_route(
    answers: Answers, vectors: F64, embedder: str, starts: Starts | None = None, *, starter: str = "", window: int = 0
) -> tuple[LearnedRoute, F64]:
    """Return a route, and the gains of its questions by fits that did not see them.

    `vectors`, `starts`: as for `inputs_of`; with starts it is a cascade.
    """
    by_question, gains = _best(inputs_of(vectors, answers.prompts), answers, has_starts=False)
    if starts is None:
        thresholds, quantiles = thresholds_of(gains), quantiles_of(gains)
        return LearnedRoute(embedder=embedder, by_question=by_question, thresholds=thresholds, quantiles=quantiles), gains
    by_start, moved = _best(inputs_of(vectors, answers.prompts, starts), answers, has_starts=True)
    margin = float(np.quantile(np.abs(moved - gains), MARGIN_SHARE))
    cascade, thresholds = Cascade(starter, window, margin, by_start), thresholds_of(gains, moved, margin)
    route = LearnedRoute(
        embedder=embedder,
        by_question=by_question,
        cascade=cascade,
        thresholds=thresholds,
        quantiles=quantiles_of(gains, moved),
    )
    return route, moved


def _best(inputs: F64, answers: Answers, *, has_starts: bool) -> tuple[Fit, F64]:
    """Fit with the penalty that has the highest cross-validated APGR. Return the fit, and the held-out gains."""
    unseen = {penalty: gains_unseen(inputs, answers, penalty, has_starts=has_starts) for penalty in PENALTIES}
    best = max(unseen, key=lambda penalty: apgr(answers, unseen[penalty]))
    return fit(inputs, answers, best, has_starts=has_starts), unseen[best]


def gains_unseen(inputs: F64, answers: Answers, penalty: float, *, has_starts: bool = False) -> F64:
    """Return the gain of each question, by a fit that saw none with the same text."""
    gains = np.empty(len(answers))
    folds = _folds(answers)
    for fold in range(NUM_FOLDS):
        unseen, seen = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        gains[unseen] = fit(inputs[seen], answers.part(seen), penalty, has_starts=has_starts).gains(inputs[unseen])
    return gains


def _folds(answers: Answers) -> Rows:
    numbers: dict[str, int] = {}
    texts = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in answers.prompts])
    found: Rows = np.random.default_rng(SEED).permutation(len(numbers))[texts] % NUM_FOLDS
    return found
