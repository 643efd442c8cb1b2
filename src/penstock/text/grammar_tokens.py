"""A model's vocabulary as llguidance wants it. Made at the first grammar, as that takes a moment; read by every grammar after.

Special tokens and ids without a token spell nothing there, so that no grammar can allow them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.types.errors import Rejected, RejectReason

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from penstock.text.tokenizer import Tokenizer


class GrammarTokens:
    """Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: rows of the model's logits."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._end_ids = tuple(token_id for token_id in tokenizer.eos_token_ids if token_id < vocab_size)
        self._lock = threading.Lock()
        self._ready: tuple[LLTokenizer, NDArray[np.uint8]] | None = None

    def ready(self) -> tuple[LLTokenizer, NDArray[np.uint8]]:
        """The vocabulary, and the mask of all tokens that any answer may have: [ceil(vocab / 32) * 4].

        Raises `Rejected` for a model that has no end token: its answers could not end.
        """
        with self._lock:
            if self._ready is None:
                self._ready = self._build()
            return self._ready

    def _build(self) -> tuple[LLTokenizer, NDArray[np.uint8]]:
        from llguidance import LLTokenizer, TokenizerWrapper

        if not self._end_ids:
            raise Rejected(
                RejectReason.INVALID,
                "This model has no end token, so an answer that follows a grammar could not end. Ask without one.",
            )
        tokens = [self._bytes_of(token_id) for token_id in range(self._vocab_size)]
        usable = np.zeros((self._vocab_size + 31) // 32 * 32, np.bool_)
        usable[: self._vocab_size] = [bool(token) for token in tokens]
        usable[list(self._end_ids)] = True
        # General slices: what strings of JSON are made of is walked once, not for each mask.
        vocabulary = LLTokenizer(TokenizerWrapper(_Vocabulary(tokens, self._end_ids[0])), eos_token=list(self._end_ids))
        return vocabulary, np.packbits(usable, bitorder="little")

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id >= self._tokenizer.vocab_size or self._tokenizer.is_special(token_id):
            return b""
        return self._tokenizer.token_bytes(token_id)


class _Vocabulary:
    """What llguidance asks a tokenizer for."""

    bos_token_id = None
    special_token_ids = ()

    def __init__(self, tokens: Sequence[bytes], eos_token_id: int) -> None:
        self.tokens = tokens
        self.eos_token_id = eos_token_id

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only where text is forced, which no grammar here does")
