"""The facts that clients may know of an encoder, a model that answers an input text with numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

TruncationSide = Literal["left", "right"]


class Task(StrEnum):
    EMBED = "embed"
    RERANK = "rerank"  # one score: how well the second text of a pair answers the first
    CLASSIFY = "classify"


class ScoreFunction(StrEnum):
    """How a head's outputs become scores, as the model's files say."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    width: int
    pooling: str  # as in `TextEnding`
    max_tokens: int  # longest text in tokens, special ones included
    is_normalised: bool = False  # the model's vectors already have length 1
    has_own_lengths: bool = False
    """The files list modules without a `Normalize`, or cut vectors after it, so vectors keep their lengths where the API allows
    it."""
    labels: tuple[str, ...] = ()  # names of the `width` columns, if there is a head
    scores: ScoreFunction = ScoreFunction.NONE
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text put before each input of that use: `query` -> `query: `."""
    default_prompt: str = ""

    @property
    def task(self) -> Task:
        if not self.labels:
            return Task.EMBED
        return Task.RERANK if len(self.labels) == 1 else Task.CLASSIFY

    @property
    def is_per_token(self) -> bool:
        return self.pooling == "each"

    @property
    def is_sparse(self) -> bool:
        """The model's vectors have a number for each token of the vocabulary, mostly 0."""
        return self.pooling == "sparse"

    def kept(self, states: bytes) -> bytes:
        """Return the engine's output for a text, float32, without the numbers behind `width`."""
        return states if self.is_per_token else states[: 4 * self.width]


class TextTokens(NamedTuple):
    token_ids: tuple[int, ...]
    second_at: int  # position of the second text's first token; 0: one text
