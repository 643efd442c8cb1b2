"""Log-probabilities in the two shapes of the OpenAI API. One writer per choice; called by `completions` and `chat`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from penstock.text.tokenizer import Tokenizer
from penstock.types.result import TokenLogprobs

_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; OpenAI writes this for a probability of zero."""


class CompletionLogprobs:
    """`tokens`, `token_logprobs`, `top_logprobs` and `text_offset`: where in the answer's text each token begins.

    An offset counts characters; a token that ends in the middle of a character begins where that character does.
    """

    def __init__(self, tokenizer: Tokenizer, *, skips_special_tokens: bool, text_offset: int) -> None:
        self._tokenizer = tokenizer
        self._skips_special_tokens = skips_special_tokens
        self._offset = text_offset
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._advance(entry.token_id))
        return {
            "text_offset": offsets,
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": [_legacy_text(self._tokenizer, entry.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _advance(self, token_id: int) -> int:
        """Where this token begins."""
        begin = self._offset
        if self._skips_special_tokens and self._tokenizer.is_special(token_id):
            return begin
        data = self._tokenizer.token_bytes(token_id)
        was_within = self._is_within_character()
        first = self._decoder.decode(data[:1])
        if was_within and first[:1] == "\ufffd" and (len(first) > 1 or self._is_within_character()):
            begin += 1  # The character before was never completed.
        self._offset += len(first) + len(self._decoder.decode(data[1:]))
        return begin

    def _is_within_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The sampled token is always there, so k alternatives may make k + 1 entries.
        pairs = [*entry.top, (entry.token_id, entry.logprob)]
        return {_legacy_text(self._tokenizer, token_id): _finite(logprob) for token_id, logprob in reversed(pairs)}


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`content`: per token its text, bytes and log-probability, and the same of the most likely ones."""
    return {
        "content": [
            {
                **_chat_token(tokenizer, entry.token_id, entry.logprob),
                "top_logprobs": [_chat_token(tokenizer, token_id, logprob) for token_id, logprob in entry.top],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {"token": token_bytes.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(token_bytes)}


def _legacy_text(tokenizer: Tokenizer, token_id: int) -> str:
    """The token's text; for part of a character its bytes, as OpenAI writes them (`bytes:\\xe2\\x82`)."""
    token_bytes = tokenizer.token_bytes(token_id)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float) -> float:
    return max(logprob, _LEAST_LOGPROB)
