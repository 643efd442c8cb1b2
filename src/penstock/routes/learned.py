"""A learned route: it foretells how likely the weak and the strong model answer a question rightly.

Two logistic regressions over the vector of an embedding model, two counts (the question's characters and digits) and, in a
cascade, three signs in the first tokens of the weak model's answer. Their difference is what the strong model is expected to
gain. (RouteLLM, arXiv 2406.18665, learns which answer a judge prefers; FrugalGPT, arXiv 2305.05176, scores whole answers.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.routes.answers import F64, Answers
from penstock.routes.questions import MAX_QUESTION_CHARS
from penstock.types.errors import ConfigError

FORMAT = 2
MAX_ROUNDS = 50
SHARES = tuple(number / 20 for number in range(21))
"""Shares of the questions for which a route has thresholds."""
NUM_COUNTS, NUM_SIGNS = 2, 3
LEAST_SCALE = 1e-6
MAX_WINDOW = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """The models whose numbers a route reads, as they were named."""

    embedder: str
    starter: str = ""
    """The weak model, if the first tokens of its answer count."""
    window: int = 0
    """How many tokens those are."""

    @property
    def num_extras(self) -> int:
        return NUM_COUNTS + (NUM_SIGNS if self.window else 0)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LearnedRoute:
    sources: Sources
    mean: F64
    """Mean of each count and sign."""
    scale: F64
    weak: F64
    """Weights of the vector, of the counts and signs, and of 1."""
    strong: F64
    thresholds: tuple[float, ...] = ()
    """Least gain with which the strong model answers, so that it answers each of `SHARES`. Empty: they are not known."""

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return len(self.weak) - 1 - len(self.mean)

    def gains(self, inputs: F64) -> F64:
        """Return what the strong model is expected to gain on each question, from -1 to 1. `inputs`: from `inputs_of`"""
        if inputs.shape[1] != self.width + len(self.mean):
            raise ConfigError(
                f"The vectors have {inputs.shape[1] - len(self.mean)} numbers, and the route was fitted to {self.width}.",
                remedy=f"Embed with {self.sources.embedder}.",
            )
        rows = _rows(inputs, self.mean, self.scale)
        return _logistic(rows @ self.strong) - _logistic(rows @ self.weak)

    def threshold(self, share: float) -> float:
        """Return the least gain with which the strong model should answer, so that it answers this share of the questions."""
        if share in (0.0, 1.0):  # none and all, whatever comes
            return np.inf if share == 0.0 else -np.inf
        return float(np.interp(share, SHARES, self.thresholds))

    def write(self, path: Path) -> None:
        value = {
            "format": FORMAT,
            **{name: getattr(self.sources, name) for name in ("embedder", "starter", "window")},
            **{name: getattr(self, name).tolist() for name in ("mean", "scale", "weak", "strong")},
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
        sources = _sources(value)
        mean, scale = (_numbers(value, name, sources.num_extras) for name in ("mean", "scale"))
        weak = _numbers(value, "weak")
        strong, thresholds = _numbers(value, "strong", len(weak)), _numbers(value, "thresholds", len(SHARES))
        if not (scale >= LEAST_SCALE).all() or len(weak) <= sources.num_extras + 1 or (np.diff(thresholds) > 0).any():
            raise ValueError("its numbers can't have been fitted")
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a route: {error}.", remedy="Fit it anew with `penstock route fit`.") from error
    fitted = tuple(thresholds.tolist())
    return LearnedRoute(sources=sources, mean=mean, scale=scale, weak=weak, strong=strong, thresholds=fitted)


def _sources(value: Mapping[str, Any]) -> Sources:
    embedder, starter, window = value["embedder"], value["starter"], value["window"]
    if not isinstance(embedder, str) or not embedder or not isinstance(starter, str):
        raise ValueError("it does not name its models")
    if not isinstance(window, int) or not 0 <= window <= MAX_WINDOW or bool(window) != bool(starter):
        raise ValueError(f"its window is not a number of tokens up to {MAX_WINDOW}")
    return Sources(embedder=embedder, starter=starter, window=window)


def inputs_of(vectors: F64, prompts: Sequence[str], starts: Sequence[Sequence[float]] | None = None) -> F64:
    """Return what a route reads of questions. [questions, numbers]

    `vectors`: [questions, width], of length 1. `starts`: log-probabilities of the first tokens of the weak model's answers.
    """
    columns = [vectors, _counts(prompts)]
    if starts is not None:
        columns.append(np.array([_signs(start) for start in starts]))
    return np.hstack(columns)


def fit(inputs: F64, answers: Answers, sources: Sources, penalty: float, thresholds: tuple[float, ...] = ()) -> LearnedRoute:
    """Fit a route to questions. `penalty`: of large weights, in questions."""
    extras = inputs[:, -sources.num_extras :]
    mean, scale = extras.mean(axis=0), np.maximum(extras.std(axis=0), LEAST_SCALE)
    rows = _rows(inputs, mean, scale)
    weak, strong = (_regress(rows, results, penalty) for results in (answers.weak, answers.strong))
    return LearnedRoute(sources=sources, mean=mean, scale=scale, weak=weak, strong=strong, thresholds=thresholds)


def thresholds_of(gains: F64) -> tuple[float, ...]:
    """Return the least gain for each of `SHARES`, from the gains of questions that the fit did not see."""
    return tuple(np.quantile(gains, [1 - share for share in SHARES]).tolist())


def _counts(prompts: Sequence[str]) -> F64:
    """Return the logarithms of each question's characters and digits."""
    cut = [prompt[:MAX_QUESTION_CHARS] for prompt in prompts]
    found = [(len(prompt), sum(char.isdigit() for char in prompt)) for prompt in cut]
    return np.log1p(np.array(found, dtype=np.float64))


def _signs(logprobs: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean and the least log-probability of the first tokens, and the logarithm of their number."""
    found = np.maximum(np.array(logprobs, dtype=np.float64), -50.0)
    return (float(found.mean()), float(found.min()), float(np.log1p(len(found)))) if len(found) else (0.0, 0.0, 0.0)


def _rows(inputs: F64, mean: F64, scale: F64) -> F64:
    width = inputs.shape[1] - len(mean)
    return np.hstack([inputs[:, :width], (inputs[:, width:] - mean) / scale, np.ones((len(inputs), 1))])


def _logistic(values: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-np.clip(values, -50.0, 50.0)))


def _regress(rows: F64, results: F64, penalty: float) -> F64:
    """Return the weights that make `results` most likely, by Newton's method."""
    weights = np.zeros(rows.shape[1])
    for _ in range(MAX_ROUNDS):
        shares = _logistic(rows @ weights)
        slope = rows.T @ (shares - results) + penalty * weights
        bend = (rows * (shares * (1 - shares))[:, None]).T @ rows + penalty * np.eye(len(weights))
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
