"""Recorded scores: questions with two models' answers and a route's gains, a JSON object per line.

`penstock route eval --scores` writes them, and `penstock simulate --route` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.routes.answers import F64, read_objects
from penstock.types.errors import ConfigError, counted

KINDS = ("weak", "strong")
SCORES = ("gain", "start_gain", "confidence")
MAX_TOKENS = 10_000_000
_HINT = "`penstock route eval --scores` writes such a file."


@dataclass(frozen=True, slots=True)
class Answer:
    num_prompt_tokens: int
    num_tokens: int
    result: float
    """From 0 (wrong) to 1 (right)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    weak: Answer
    """A pipeline has one model: this is then the same as `strong`."""
    strong: Answer
    gain: float | None
    """Expected gain of the strong model, from the question. None: there is no learned route."""
    start_gain: float | None
    """The same, from the weak model's first tokens, too. None: the route is no cascade."""
    prefix: str
    """Prompts of questions with the same prefix share their first `num_prefix_tokens` tokens. Empty: they share none."""
    num_prefix_tokens: int
    confidence: float | None = None
    """Confidence from 0 to 1 in the weak model's answer, by a verifier, agreement or a judge. None: not known."""


def read_scores(path: Path, num: int | None = None) -> list[Question]:
    """Read the first `num` questions, or all. Raises ConfigError, which names the line."""
    found: list[Question] = []
    for number, value in read_objects(path):
        if len(found) == num:
            break
        try:
            found.append(_question(value))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{path}, line {number}: not a question with scores: {error}.", remedy=_HINT) from error
    if not found:
        raise ConfigError(f"{path} has no questions.", remedy=_HINT)
    if num is not None and len(found) < num:
        raise ConfigError(f"{path.name} has {counted(len(found), 'question')}, fewer than {num}.", remedy="Ask for fewer.")
    return found


def read_usage(answers: Path, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Return the `usage` of both answers to each question of a file, and the question's prefix, as `scores_text` takes them.

    `keys`: of the weak and the strong model there. Raises ConfigError, which names the line.
    """
    found = []
    for number, value in read_objects(answers):
        told: dict[str, Any] = {key: value[key] for key in ("prefix", "prefix_tokens") if key in value}
        try:
            usage: Any = value["usage"]
            found.append(told | {kind: _counts(usage[key]) for kind, key in zip(KINDS, keys, strict=True)})
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"{answers}, line {number}: it lacks the tokens of the two answers: {error}.",
                remedy=f'Write the answers\' usage beside their results: "usage": {{"{keys[0]}": {{"prompt_tokens": 9, '
                '"completion_tokens": 4}, ...}.',
            ) from error
    return found


def scores_text(usage: Sequence[Mapping[str, Any]], results: Sequence[F64], scores: Mapping[str, F64]) -> str:
    """Return the content of a file for `read_scores`.

    `usage`: from `read_usage`. `results`: of the weak and the strong model, [questions]. `scores`: `gain`, `start_gain` or
    `confidence` of the route, [questions].
    """
    lines = []
    for idx, told in enumerate(usage):
        of_route = {name: round(float(values[idx]), 6) for name, values in scores.items()}
        answers = {kind: {"result": float(result[idx]), **told[kind]} for kind, result in zip(KINDS, results, strict=True)}
        lines.append(json.dumps({**of_route, **told, **answers}) + "\n")
    return "".join(lines)


def _question(value: Mapping[str, Any]) -> Question:
    strong, prefix = _answer(value["strong"]), value.get("prefix", "")
    gain, start_gain, confidence = (None if key not in value else float(value[key]) for key in SCORES)
    if not isinstance(prefix, str):
        raise TypeError("prefix is not a text")
    return Question(
        weak=_answer(value["weak"]) if "weak" in value else strong,
        strong=strong,
        gain=gain,
        start_gain=start_gain,
        prefix=prefix,
        num_prefix_tokens=_count(value, "prefix_tokens", 0) if prefix else 0,
        confidence=confidence,
    )


def _answer(value: Mapping[str, Any]) -> Answer:
    counts, result = _counts(value), float(value["result"])
    if not 0 <= result <= 1:
        raise ValueError("result is not a number from 0 to 1")
    return Answer(counts["prompt_tokens"], counts["completion_tokens"], result)


def _counts(value: Mapping[str, Any]) -> dict[str, int]:
    return {key: _count(value, key, 1) for key in ("prompt_tokens", "completion_tokens")}


def _count(value: Mapping[str, Any], key: str, least: int) -> int:
    count = value[key]
    if type(count) is not int or not least <= count <= MAX_TOKENS:
        raise ValueError(f"{key} is not a number of tokens from {least} on")
    return count


def shared_blocks(questions: Sequence[Question], block_tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield the ids of the whole blocks that each question's prompt shares with others."""
    ids: dict[tuple[str, int], int] = {}
    for question in questions:
        yield tuple(
            ids.setdefault((question.prefix, position), len(ids))
            for position in range(question.num_prefix_tokens // block_tokens)
        )
