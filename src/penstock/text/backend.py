"""A vocabulary ready for use: the `tokenizers` object plus what it can't tell. Made by a loader, owned by one `Tokenizer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tokenizers

from penstock.text.pieces import Spelling

MAX_EXPANDED_BYTES = 8 << 20
"""Of one text, as it is cut into tokens: twice the longest that a request holds."""


class Expansion(NamedTuple):
    """How much longer a text can become before it is cut into tokens: n bytes become `n * factor + extra_bytes` at most."""

    factor: float
    extra_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backend:
    encoder: tokenizers.Tokenizer
    vocab_size: int
    """Number of ids, unused ones included."""
    piece: Callable[[int], str | None]
    """Piece of an id; None if the vocabulary has no such id (models pad their matrices)."""
    spelling: Spelling
    literal_ids: frozenset[int]
    """Added tokens: their piece is their text, whatever the spelling."""
    special_ids: frozenset[int]
    """Control tokens: part of the protocol, not of the text."""
    silent_ids: frozenset[int]
    """Ids that stand for nothing (padding of the vocabulary)."""
    starts_with_space: bool
    """Encoding puts a space before the text, so decoding a whole text takes it away."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    unknown_token_id: int | None
    padding_token_id: int | None
    expansion: Expansion | None = None
    """What a file's own steps can do. None: two bytes of one at most, as every byte-level vocabulary makes."""
