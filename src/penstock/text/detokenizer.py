"""Text of one request's output, token by token. Driven by the output stage; never decodes a token twice.

An output continues its prompt, so a SentencePiece model's first space is kept, as vLLM and llama.cpp do:
"The capital is" + " Paris". What the pieces add up to is `Tokenizer.decode(..., is_continuation=True)`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from penstock.text.pieces import ByteTable
from penstock.text.tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Holds at most the three bytes of an incomplete character. Implements `engine.ports.Detokenizer`."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decode = _Utf8Decoder("replace").decode

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; incomplete UTF-8 is held back, invalid UTF-8 becomes U+FFFD."""
        table = self._table
        return self._decode(b"".join([table[token_id] for token_id in token_ids]))

    def flush(self) -> str:
        """What is still held: U+FFFD for an incomplete character, else nothing."""
        return self._decode(b"", True)


def detokenizer_factory(tokenizer: Tokenizer) -> Callable[[bool], IncrementalDetokenizer]:
    """Makes one detokenizer per request; its argument is `skip_special_tokens`."""

    def make(skip_special_tokens: bool, /) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(tokenizer.bytes_without_special if skip_special_tokens else tokenizer.bytes_with_special)

    return make
