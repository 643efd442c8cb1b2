"""A learned route: it predicts each model's probability of a correct answer to a question.

Two logistic regressions over the vector of an embedding model, two counts (the question's characters and digits) and, in a
cascade, three signs in the first tokens of the weak model's answer. Their difference is what the strong model is expected to
gain. (RouteLLM, arXiv 2406.18665, learns which answer a judge prefers; FrugalGPT, arXiv 2305.05176, scores whole answers.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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


@dataclass(frozen=True, slots=True, eq=False)
class Fit:
    mean: F64
    """Mean of each count and sign."""
    scale: F64
    weak: F64
    """Weights of the vector, of the counts and signs, and of 1."""
    strong: F64

    @property
    def width(self) -> int:
        """Length of an embedding vector."""
        return len(self.weak) - 1 - len(self.mean)

    def gains(self, inputs: F64) -> F64:
        """Return what the strong model is expected to gain on each question, from -1 to 1. `inputs`: from `inputs_of`"""
        if (width := inputs.shape[1] - len(self.mean)) != self.width:
            raise ConfigError(
                f"The vectors have {width} numbers, and the route was fitted to {self.width}.",
                remedy="Embed with the model of the fit.",
            )
        rows = _rows(inputs, self.mean, self.scale)
        return _logistic(rows @ self.strong) - _logistic(rows @ self.weak)


@dataclass(frozen=True, slots=True, eq=False)
class Cascade:
    """The weak model begins an answer, and its first tokens count too."""

    starter: str
    """The weak model, as it was named."""
    window: int
    """How many first tokens count."""
    margin: float
    """The first tokens change the expected gain of 19 in 20 questions by less than this."""
    fit: Fit


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LearnedRoute:
    embedder: str
    """The embedding model, as it was named."""
    by_question: Fit
    cascade: Cascade | None = None
    thresholds: tuple[float, ...]
    """Least gain for which the strong model is asked, one for each of `SHARES`."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Model, as it was named -> hash of the files that it had at the fit. Empty in files of older versions."""
    quantiles: F64 | None = None
    """Gains of questions that the fit did not see, from `drift.quantiles_of`. None in files of older versions."""

    def tries(self, gain: float, threshold: float) -> bool:
        """Return whether the weak model's first tokens could change the decision."""
        return self.cascade is not None and abs(gain - threshold) < self.cascade.margin

    def fitted_gains(self, threshold: float) -> F64 | None:
        """Return the gains that would have decided the questions of the fit, at even ranks, or None if they are not known."""
        if self.quantiles is None:
            return None
        gains, moved = self.quantiles.T
        found: F64 = np.where([self.tries(gain, threshold) for gain in gains], moved, gains)
        return found

    def threshold(self, share: float) -> float:
        """Return the least gain with which the strong model should answer, so that it answers this share of the questions."""
        if share in (0.0, 1.0):  # none and all, whatever comes
            return np.inf if share == 0.0 else -np.inf
        return float(np.interp(share, SHARES, self.thresholds))

    def write(self, path: Path) -> None:
        """Write what `read_route` reads. Raises ConfigError."""
        value: dict[str, Any] = {"format": FORMAT, "embedder": self.embedder, "thresholds": self.thresholds}
        value["digests"] = {**self.digests}
        if self.quantiles is not None:
            value["quantiles"] = self.quantiles.tolist()
        value["by_question"] = _told(self.by_question)
        if (cascade := self.cascade) is not None:
            about = {name: getattr(cascade, name) for name in ("starter", "window", "margin")}
            value["cascade"] = about | _told(cascade.fit)
        try:
            path.write_text(json.dumps(value) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{path} can't be written: {error.strerror}.", remedy="Name another file.") from error


def read_route(path: Path) -> LearnedRoute:
    """Read what `write` wrote. Raises ConfigError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} can't be read: {error}.", remedy="`penstock route fit` writes such a file.") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a route of format {FORMAT}.", remedy="Fit it anew with `penstock route fit`.")
    try:
        embedder, thresholds = value["embedder"], _numbers(value, "thresholds", len(SHARES))
        if not isinstance(embedder, str) or not embedder:
            raise ValueError("it names no embedder")
        if (np.diff(thresholds) > 0).any():
            raise ValueError("its thresholds can't have been fitted")
        digests = value.get("digests", {})
        if not isinstance(digests, dict) or not all(isinstance(one, str) for one in digests.values()):
            raise ValueError("its digests are not texts")
        quantiles = None if "quantiles" not in value else np.array(value["quantiles"], dtype=np.float64)
        if quantiles is not None and (quantiles.shape[1:] != (2,) or not np.isfinite(quantiles).all() or not len(quantiles)):
            raise ValueError("its quantiles are not pairs of numbers")
        by_question = _read_fit(value["by_question"], NUM_COUNTS)
        cascade = _read_cascade(value["cascade"], by_question.width) if "cascade" in value else None
    except (LookupError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{path} is not a route: {error}.", remedy="Fit it anew with `penstock route fit`.") from error
    fitted = tuple(thresholds.tolist())
    return LearnedRoute(
        embedder=embedder,
        by_question=by_question,
        cascade=cascade,
        thresholds=fitted,
        digests=digests,
        quantiles=quantiles,
    )


def _told(fit: Fit) -> dict[str, Any]:
    return {name: getattr(fit, name).tolist() for name in ("mean", "scale", "weak", "strong")}


def _read_fit(value: Mapping[str, Any], num_extras: int) -> Fit:
    mean, scale, weak = _numbers(value, "mean", num_extras), _numbers(value, "scale", num_extras), _numbers(value, "weak")
    if not (scale >= LEAST_SCALE).all() or len(weak) <= num_extras + 1:
        raise ValueError("its numbers can't have been fitted")
    return Fit(mean, scale, weak, _numbers(value, "strong", len(weak)))


def _read_cascade(value: Mapping[str, Any], width: int) -> Cascade:
    starter, window, margin = value["starter"], value["window"], value["margin"]
    if not isinstance(starter, str) or not starter:
        raise ValueError("it names no small model")
    if type(window) is not int or not 0 < window <= MAX_WINDOW:
        raise ValueError(f"its window is not a number of tokens up to {MAX_WINDOW}")
    if not isinstance(margin, float) or not margin >= 0:
        raise ValueError("its margin can't have been fitted")
    fit = _read_fit(value, NUM_COUNTS + NUM_SIGNS)
    if fit.width != width:
        raise ValueError("its two fits are of different vectors")
    return Cascade(starter, window, margin, fit)


def inputs_of(vectors: F64, prompts: Sequence[str], starts: Sequence[Sequence[float]] | None = None) -> F64:
    """Return what a route reads of questions. [questions, numbers]

    `vectors`: [questions, width], of length 1. `starts`: log-probabilities of the first tokens of the weak model's answers.
    """
    columns = [vectors, _counts(prompts)]
    if starts is not None:
        columns.append(np.array([_signs(start) for start in starts]))
    return np.hstack(columns)


def fit(inputs: F64, answers: Answers, penalty: float, *, has_starts: bool = False) -> Fit:
    """Fit to questions. `inputs`: from `inputs_of`, with or without starts. `penalty`: strength of the L2 regularisation."""
    extras = inputs[:, -(NUM_COUNTS + NUM_SIGNS if has_starts else NUM_COUNTS) :]
    mean, scale = extras.mean(axis=0), np.maximum(extras.std(axis=0), LEAST_SCALE)
    rows = _rows(inputs, mean, scale)
    return Fit(mean, scale, *(_regress(rows, results, penalty) for results in (answers.weak, answers.strong)))


def thresholds_of(gains: F64, moved: F64 | None = None, margin: float = 0.0) -> tuple[float, ...]:
    """Return the least gain for each of `SHARES`, from the gains of questions that the fit did not see.

    `moved`: in a cascade, the gains with the first tokens, used within `margin` of the threshold.
    """
    if moved is None:
        return tuple(np.quantile(gains, [1 - share for share in SHARES]).tolist())
    found = np.unique(np.concatenate([gains, moved]))
    sent = np.array([(np.where(np.abs(gains - at) < margin, moved, gains) >= at).mean() for at in found])
    sent = np.minimum.accumulate(sent)
    best = [found[int(np.argmin(np.abs(sent - share)))] for share in SHARES]
    return tuple(np.minimum.accumulate(best).tolist())


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
    weights, penalties = np.zeros(rows.shape[1]), np.full(rows.shape[1], penalty)
    penalties[-1] = LEAST_SCALE  # the constant only says how often the model is right
    for _ in range(MAX_ROUNDS):
        shares = _logistic(rows @ weights)
        slope = rows.T @ (shares - results) + penalties * weights
        bend = (rows * (shares * (1 - shares))[:, None]).T @ rows + np.diag(penalties)
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
