"""A learned route: it foretells from a question alone how likely the weak and the strong model answer it rightly.

Two logistic regressions over the vector of an embedding model and two counts, its characters and its digits. Their difference
is what the strong model is expected to gain. (RouteLLM, arXiv 2406.18665, learns which answer a judge prefers.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.routes import MAX_QUESTION_CHARS
from penstock.routes.answers import F64, Answers
from penstock.types.errors import ConfigError

FORMAT = 1
RIDGE = 10.0
"""Strength of the penalty for large weights, in questions."""
MAX_ROUNDS = 50
SHARES = tuple(number / 20 for number in range(21))
"""Shares of the questions for which a route has thresholds."""
NUM_COUNTS = 2
LEAST_SCALE = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class LearnedRoute:
    embedder: str
    """The embedding model, as it was named."""
    count_mean: F64
    count_scale: F64
    weak: F64
    """Weights of the vector, of the counts and of 1. [width + 3]"""
    strong: F64
    thresholds: tuple[float, ...] = ()
    """Least gain with which the strong model answers, so that it answers each of `SHARES`. Empty: they are not known."""

    def gains(self, vectors: F64, prompts: Sequence[str]) -> F64:
        """Return what the strong model is expected to gain on each question, from -1 to 1. `vectors`: [questions, width]"""
        if vectors.shape[1] + NUM_COUNTS + 1 != len(self.weak):
            raise ConfigError(
                f"The vectors have {vectors.shape[1]} numbers, and the route was fitted to {len(self.weak) - NUM_COUNTS - 1}.",
                remedy=f"Embed with {self.embedder}.",
            )
        inputs = _inputs(vectors, (counts_of(prompts) - self.count_mean) / self.count_scale)
        return _logistic(inputs @ self.strong) - _logistic(inputs @ self.weak)

    def threshold(self, share: float) -> float:
        """Return the least gain with which the strong model should answer, so that it answers this share of the questions."""
        if share in (0.0, 1.0):  # none and all, whatever comes
            return np.inf if share == 0.0 else -np.inf
        return float(np.interp(share, SHARES, self.thresholds))

    def write(self, path: Path) -> None:
        value = {
            "format": FORMAT,
            "embedder": self.embedder,
            **{name: getattr(self, name).tolist() for name in ("count_mean", "count_scale", "weak", "strong")},
            "thresholds": self.thresholds,
        }
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")


def read_route(path: Path) -> LearnedRoute:
    """Read what `write` wrote. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}.", remedy="`penstock route fit` writes such a file.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a route of format {FORMAT}.", remedy="Fit it anew with `penstock route fit`.")
    try:
        count_mean, count_scale = (_numbers(value, name, NUM_COUNTS) for name in ("count_mean", "count_scale"))
        weak = _numbers(value, "weak")
        strong, thresholds = _numbers(value, "strong", len(weak)), _numbers(value, "thresholds", len(SHARES))
        embedder = value["embedder"]
        if not (count_scale >= LEAST_SCALE).all() or len(weak) <= NUM_COUNTS + 1 or (np.diff(thresholds) > 0).any():
            raise ValueError("its numbers can't have been fitted")
        if not isinstance(embedder, str) or not embedder:
            raise ValueError("it names no embedder")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a route: {error}.", remedy="Fit it anew with `penstock route fit`.") from error
    return LearnedRoute(embedder, count_mean, count_scale, weak, strong, tuple(thresholds.tolist()))


def fit(vectors: F64, answers: Answers, embedder: str, thresholds: tuple[float, ...] = ()) -> LearnedRoute:
    """Fit a route to questions and their vectors, of length 1. [questions, width]"""
    counts = counts_of(answers.prompts)
    mean, scale = counts.mean(axis=0), np.maximum(counts.std(axis=0), LEAST_SCALE)
    inputs = _inputs(vectors, (counts - mean) / scale)
    return LearnedRoute(embedder, mean, scale, _regress(inputs, answers.weak), _regress(inputs, answers.strong), thresholds)


def thresholds_of(gains: F64) -> tuple[float, ...]:
    """Return the least gain for each of `SHARES`, from the gains of questions that the fit did not see."""
    return tuple(np.quantile(gains, [1 - share for share in SHARES]).tolist())


def counts_of(prompts: Sequence[str]) -> F64:
    """Return the logarithms of each question's characters and digits. [questions, 2]"""
    cut = [prompt[:MAX_QUESTION_CHARS] for prompt in prompts]
    found = [(len(prompt), sum(char.isdigit() for char in prompt)) for prompt in cut]
    return np.log1p(np.array(found, dtype=np.float64))


def _inputs(vectors: F64, counts: F64) -> F64:
    return np.hstack([vectors, counts, np.ones((len(vectors), 1))])


def _logistic(values: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -50.0, 50.0)))


def _regress(inputs: F64, results: F64) -> F64:
    """Return the weights that make `results` most likely, by Newton's method."""
    weights = np.zeros(inputs.shape[1])
    for _ in range(MAX_ROUNDS):
        shares = _logistic(inputs @ weights)
        slope = inputs.T @ (shares - results) + RIDGE * weights
        bend = (inputs * (shares * (1 - shares))[:, None]).T @ inputs + RIDGE * np.eye(len(weights))
        step = np.linalg.solve(bend, slope)
        weights = weights - step
        if np.abs(step).max() < 1e-6:
            break
    return weights


def _numbers(value: Mapping[str, Any], name: str, num: int | None = None) -> F64:
    found = np.array(value[name], dtype=np.float64)
    if found.ndim != 1 or num not in (None, len(found)) or not np.isfinite(found).all():
        raise ValueError(f"{name} is not a list of {num or 'finite'} numbers")
    return found
