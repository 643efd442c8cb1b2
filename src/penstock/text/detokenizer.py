"""Text of one request's output, token by token. Driven by the output stage; never decodes a token twice.

An output continues its prompt, so a SentencePiece model's first space is kept, as vLLM and llama.cpp do:
"The capital is" + " Paris". What the pieces add up to is `Tokenizer.decode(..., is_continuation=True)`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from penstock.text.pieces import ByteTable, TextTable
from penstock.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Holds at most the three bytes of an incomplete character. Implements `engine.ports.Detokenizer`."""

    __slots__ = ("_bytes", "_decoder", "_is_within_character", "_texts")

    def __init__(self, table: ByteTable, texts: TextTable) -> None:
        """`texts` is of the same tokens."""
        self._bytes = table
        self._texts = texts
        self._decoder = _Utf8Decoder("replace")
        self._is_within_character = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; incomplete UTF-8 is held back, invalid UTF-8 becomes U+FFFD."""
        if len(token_ids) == 1 and not self._is_within_character:
            text = self._texts[token_ids[0]]
            if text is not None:  # nearly every token of nearly every text
                return text
        table, decoder = self._bytes, self._decoder
        text = decoder.decode(b"".join([table[token_id] for token_id in token_ids]))
        self._is_within_character = bool(decoder.getstate()[0])
        return text

    def flush(self) -> str:
        """What is still held: U+FFFD for an incomplete character, else nothing."""
        self._is_within_character = False
        return self._decoder.decode(b"", True)


def detokenizer_factory(tokenizer: Tokenizer) -> Callable[[bool], IncrementalDetokenizer]:
    """Makes one detokenizer per request; its argument is `skip_special_tokens`."""

    def make(skip_special_tokens: bool, /) -> IncrementalDetokenizer:
        if skip_special_tokens:
            return IncrementalDetokenizer(tokenizer.bytes_without_special, tokenizer.text_without_special)
        return IncrementalDetokenizer(tokenizer.bytes_with_special, tokenizer.text_with_special)

    return make
