"""Judges fits by questions that they have not seen."""

from __future__ import annotations

import numpy as np

from penstock.routes.answers import F64, Answers, Rows
from penstock.routes.curve import apgr
from penstock.routes.learned import Sources, fit

NUM_FOLDS, SEED = 5, 0
PENALTIES = (0.1, 1.0, 10.0)
"""A fit takes the best of these. As `penalty` of `fit`."""


def best_penalty(inputs: F64, answers: Answers, sources: Sources) -> float:
    """Return the penalty with the highest APGR on questions that the fit has not seen."""
    return max(PENALTIES, key=lambda penalty: apgr(answers, gains_unseen(inputs, answers, sources, penalty)))


def gains_unseen(inputs: F64, answers: Answers, sources: Sources, penalty: float) -> F64:
    """Return the gain of each question, by a fit that saw none with the same text."""
    gains = np.empty(len(answers))
    folds = _folds(answers)
    for fold in range(NUM_FOLDS):
        unseen, seen = np.flatnonzero(folds == fold), np.flatnonzero(folds != fold)
        fitted = fit(inputs[seen], answers.part(seen), sources, penalty)
        gains[unseen] = fitted.gains(inputs[unseen])
    return gains


def _folds(answers: Answers) -> Rows:
    numbers: dict[str, int] = {}
    texts = np.array([numbers.setdefault(prompt, len(numbers)) for prompt in answers.prompts])
    found: Rows = np.random.default_rng(SEED).permutation(len(numbers))[texts] % NUM_FOLDS
    return found
