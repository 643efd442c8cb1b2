"""An encoder is a model that answers a text with numbers, and not with more text. This file has the facts of one that its
clients may know.

The loader makes an `EncoderInfo` of the model's files, `deploy` puts it into `ModelInfo`, and `serve.texts` reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple

TruncationSide = Literal["left", "right"]
"""Side of a text at which tokens are cut off."""


class Task(StrEnum):
    """The use of a model's numbers."""

    EMBED = "embed"
    """They are a vector; of two texts, the angle between their vectors tells how alike they are."""
    RERANK = "rerank"
    """They are one score: how well the second text of a pair answers the first."""
    CLASSIFY = "classify"
    """They are a score for each label."""


class ScoreFunction(StrEnum):
    """The function that turns the numbers of a head into scores, as the model's files say."""

    NONE = "none"
    SIGMOID = "sigmoid"
    SOFTMAX = "softmax"


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderInfo:
    width: int
    """Numbers of one row of a result."""
    pooling: str
    """The pooling of `TextEnding`: `first`, `last`, `mean`, or `each` for a row for each token of a text."""
    max_tokens: int
    """Longest text in tokens, special ones included: the files' `max_seq_length`, or else the model's positions."""
    is_normalised: bool = False
    """The model's vectors have length 1 already."""
    has_own_lengths: bool = False
    """The files list the model's modules, without a `Normalize`: vectors keep their lengths where the API lets them."""
    labels: tuple[str, ...] = ()
    """Names of the columns if there is a head, `width` of them."""
    scores: ScoreFunction = ScoreFunction.NONE
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Name -> text that is put before each text of this use: `query` -> `query: `."""
    default_prompt: str = ""
    """Name of the prompt of a text that names none; empty: none."""

    @property
    def task(self) -> Task:
        if not self.labels:
            return Task.EMBED
        return Task.RERANK if len(self.labels) == 1 else Task.CLASSIFY

    @property
    def is_per_token(self) -> bool:
        """The result of a text is a matrix with a row for each of its tokens."""
        return self.pooling == "each"


class TextTokens(NamedTuple):
    """A text, or a pair of texts, as the model reads it."""

    token_ids: tuple[int, ...]
    """With the special tokens around and between."""
    second_at: int
    """Position where the token type of a pair's second text begins; 0: one text, or a model without token types."""
