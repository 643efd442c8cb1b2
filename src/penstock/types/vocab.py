"""A tokenizer as a model's files describe it: plain data, between the loaders and `text.tokenizer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SpecialTokens = Mapping[str, str | tuple[str, ...] | None]
"""By the name that chat templates use, such as `eos_token`. A name may stand for several; None: there is no such token."""

MARKERS = "markers"
"""The name of tokens that mark a text as a question or as a document."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GgufVocab:
    """A GGUF file's vocabulary: `tokenizer.ggml.*`. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md."""

    model: str
    """`gpt2` and `gemma4` (BPE), `llama` (SentencePiece BPE), `t5` (SentencePiece unigram) or `bert` (WordPiece)."""
    pre: str  # the pre-tokeniser, such as `llama-bpe`; may be empty
    tokens: Sequence[str]
    token_types: Sequence[int]  # 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte
    merges: Sequence[str]
    scores: Sequence[float]
    bos_token_id: int | None
    eos_token_id: int | None
    unknown_token_id: int | None
    padding_token_id: int | None = None
    add_bos_token: bool
    add_eos_token: bool
    add_space_prefix: bool  # sentencePiece only: put a space before a text, and after a special token
    strips_after_added: bool = False  # sentencePiece only: special and user-defined tokens take the white space behind them
    remove_extra_whitespaces: bool = False  # sentencePiece only: strip spaces at both ends and collapse runs to one
    charsmap: bytes = b""  # unigram only: SentencePiece's compiled character replacements
    lowercase: bool = True
    strip_accents: bool = True  # wordPiece only, with `lowercase`
