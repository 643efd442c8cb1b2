"""Reads questions, and the quality of a weak and a strong model's answers to them, from JSON lines."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from penstock.routes.questions import question_in
from penstock.types.errors import ConfigError

F64 = NDArray[np.float64]
Rows = NDArray[np.intp]
"""Indices of questions."""
Chat = Sequence[Mapping[str, Any]]
"""Messages, as in a request."""
MAX_LINE_CHARS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Questions, and the quality of two answers to each, from 0 (wrong) to 1 (right)."""

    prompts: Sequence[str]
    """The text of each question."""
    chats: Sequence[Chat]
    groups: Sequence[str]
    """The group of each question, such as its benchmark. Empty: none."""
    weak: F64
    strong: F64
    confidence: F64 | None = None
    """Confidence in each of the weak model's answers, from 0 to 1."""

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, rows: Rows) -> Answers:
        prompts, groups = [[values[row] for row in rows] for values in (self.prompts, self.groups)]
        confidence = None if self.confidence is None else self.confidence[rows]
        return Answers(prompts, [self.chats[row] for row in rows], groups, self.weak[rows], self.strong[rows], confidence)


def read_answers(path: Path, *, weak: str, strong: str, confidence: str | None = None, group: str | None = None) -> Answers:
    """Read a .jsonl file, or one in .gz. `weak`, `strong`, `confidence`: keys of true or false, or a number from 0 to 1.

    `group`: key of a text; what stands before its first `/` is the group. Raises ConfigError, which names the line.
    """
    prompts: list[str] = []
    chats: list[Chat] = []
    groups: list[str] = []
    scores: list[list[float]] = []
    keys = [weak, strong] if confidence is None else [weak, strong, confidence]
    for number, value in read_objects(path):
        chat = value.get("messages") or [{"role": "user", "content": value.get("prompt")}]
        question = question_in(chat)
        if not question or not isinstance(chat, list) or not all(isinstance(message, dict) for message in chat):
            raise ConfigError(f"{path}, line {number}: it has no text `prompt`, nor `messages` with a question.")
        prompts.append(question)
        chats.append(chat)
        scores.append([_score(value, key, path, number) for key in keys])
        groups.append("" if group is None else str(value.get(group, "")).partition("/")[0])
    if not prompts:
        raise ConfigError(f"{path} has no questions.")
    if group is not None and not any(groups):
        raise ConfigError(f"{path}: no question has the key {group!r}.", remedy="Name another key with --group, or none.")
    found = np.array(scores)
    return Answers(prompts, chats, groups, found[:, 0], found[:, 1], None if confidence is None else found[:, 2])


def _opened(path: Path) -> IO[str]:
    return gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8")


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, object]]]:
    """Yield (line, object) of a .jsonl file, or of one in .gz. Raises ConfigError, which names the line."""
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(MAX_LINE_CHARS):
                number += 1
                if len(line) == MAX_LINE_CHARS:
                    raise ConfigError(f"{path}, line {number}: it has more than {MAX_LINE_CHARS} characters.")
                if line.strip():
                    value = json.loads(line)
                    if not isinstance(value, dict):
                        raise ConfigError(f"{path}, line {number}: it is not a JSON object.")
                    yield number, value
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:  # gzip's, and those of encodings and JSON
        raise ConfigError(f"{path}, line {number}: {error}.") from error


def _score(value: dict[str, object], key: str, path: Path, number: int) -> float:
    score = value.get(key)
    if not isinstance(score, bool | int | float) or not 0 <= score <= 1:
        raise ConfigError(
            f"{path}, line {number}: {key!r} is not true, false or a number from 0 to 1.",
            remedy="Name the keys of the two models' results with --weak and --strong, and that of a --confidence.",
        )
    return float(score)
