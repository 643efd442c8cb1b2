"""A tokenizer as a GGUF file describes it: plain data, between the loader and `text.tokenizer`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufVocab:
    """The `tokenizer.ggml.*` keys. Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    model: str
    """`gpt2` (byte-level BPE) or `llama` (SentencePiece-style)."""
    pre: str
    """Name of the pre-tokeniser, e.g. `smollm`, `llama-bpe`, `qwen2`; empty if the file names none."""
    tokens: Sequence[str]
    token_types: Sequence[int]
    """1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    merges: Sequence[str]
    scores: Sequence[float]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    add_bos_token: bool
    add_eos_token: bool
    add_space_prefix: bool
