"""Facts about an encoder (a model that answers a text with numbers) that clients may know. The loader makes an
`EncoderInfo`; `serve.texts` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

TruncationSide = Literal["left", "right"]


class Task(StrEnum):
    EMBED = "embed"
    """A vector: the angle between two texts' vectors measures how alike they are."""
    RERANK = "rerank"
    """One score: how well the second text of a pair answers the first."""
    CLASSIFY = "classify"
    """One score per label."""


class ScoreFunction(StrEnum):
    """How a head's outputs become scores, as the model's files say."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    width: int
    """Numbers in one row of a result."""
    pooling: str
    """`first`, `last`, `mean`, or `each` for one row per token (`TextEnding`)."""
    max_tokens: int
    """Longest text in tokens, special ones included: the files' `max_seq_length`, else the model's positions."""
    is_normalised: bool = False
    """The model's vectors already have length 1."""
    has_own_lengths: bool = False
    """The files list modules without a `Normalize`, so vectors keep their lengths where the API allows it."""
    labels: tuple[str, ...] = ()
    """Names of the `width` columns, if there is a head."""
    scores: ScoreFunction = ScoreFunction.NONE
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text put before each input of that use: `query` -> `query: `."""
    default_prompt: str = ""
    """Name of the prompt for texts that name none; empty: no prompt."""

    @property
    def task(self) -> Task:
        if not self.labels:
            return Task.EMBED
        return Task.RERANK if len(self.labels) == 1 else Task.CLASSIFY

    @property
    def is_per_token(self) -> bool:
        return self.pooling == "each"


class TextTokens(NamedTuple):
    token_ids: tuple[int, ...]
    """Special tokens included."""
    second_at: int
    """Position of the second text's first token; 0: one text, or a model without token types."""
