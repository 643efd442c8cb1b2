"""Log-probabilities in the two forms of OpenAI's API. Each choice has its own writer."""

from __future__ import annotations

import codecs
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence

from typing_extensions import TypedDict

from penstock.calls.in_flight import RunningCall
from penstock.serve.shapes import Count
from penstock.text.tokenizer import Tokenizer
from penstock.text.vocabulary import ByteTable
from penstock.types.result import TokenLogprobs
from penstock.types.sampling import MAX_LOGPROBS


class CompletionTokens(TypedDict):
    """Log-probabilities of a completion."""

    text_offset: list[Count]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


def joined(first: CompletionTokens, second: CompletionTokens) -> CompletionTokens:
    """Return the log-probabilities of a prompt and of its completion as one."""
    return {
        "text_offset": first["text_offset"] + second["text_offset"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "tokens": first["tokens"] + second["tokens"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
    }


Token = TypedDict("Token", {"token": str, "logprob": float, "bytes": list[Count]})


class ChatToken(Token):
    top_logprobs: list[Token]


class ChatTokens(TypedDict):
    """Log-probabilities of a chat's answer."""

    content: list[ChatToken]
    refusal: None


PromptToken = TypedDict("PromptToken", {"logprob": float, "rank": Count, "decoded_token": str})


PromptTokens = list[dict[str, PromptToken] | None]


class CompletionLogprobs:
    """Log-probabilities of completions.

    `text_offset` is each token's position in the answer's text, in characters. A token that starts within a character has the
    position of that character.
    """

    def __init__(self, tokenizer: Tokenizer, bytes_in_text: ByteTable) -> None:
        self._tokenizer = tokenizer
        self._bytes_in_text = bytes_in_text
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def write(self, entries: Sequence[TokenLogprobs]) -> CompletionTokens:
        return {
            "text_offset": [self._advance(self._bytes_in_text[entry.token_id]) for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "tokens": [_legacy_text(self._tokenizer, entry.token_id) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
        }

    def _num_hidden(self, token_ids: Sequence[int], begins: Sequence[int], num_chars: int) -> int:
        """Return the number of characters at the start of the decoded tokens that the prompt's text lacks.

        These come from special tokens, from an added space, or from a normaliser. `begins`: where each token begins, and where
        the last one ends. `num_chars`: length of the text.
        """
        is_special, num_tokens = self._tokenizer.is_special, len(token_ids)
        most = min(num_tokens, 4)  # no model adds more special tokens at an end
        for first in range(most + 1):
            for last in range(num_tokens, max(first, num_tokens - most) - 1, -1):
                if begins[last] - begins[first] == num_chars and all(map(is_special, (*token_ids[:first], *token_ids[last:]))):
                    return begins[first]
        return begins[-1] - num_chars

    def _advance(self, data: bytes) -> int:
        """Move past a token's bytes in the text, and return their position."""
        begin = self._offset
        was_within = self._is_within_character()
        first = self._decoder.decode(data[:1])
        if was_within and first[:1] == "\ufffd" and (len(first) > 1 or self._is_within_character()):
            begin += 1  # The character before was never completed.
        self._offset += len(first) + len(self._decoder.decode(data[1:]))
        return begin

    def _is_within_character(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def _top(self, entry: TokenLogprobs, num_top: int = MAX_LOGPROBS) -> dict[str, float]:
        # The sampled token is always there, so k alternatives may make k + 1 entries.
        pairs = [*entry.top[:num_top], (entry.token_id, entry.logprob)]
        return {_legacy_text(self._tokenizer, token_id): _finite(logprob) for token_id, logprob in reversed(pairs)}

    def write_prompt(
        self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], num_top: int, text: str
    ) -> CompletionTokens:
        """Return the log-probabilities of a prompt; null for its first token. Call this before `write`.

        `text`: the prompt as the answer shows it. Tokens before it, such as a start token, get the offset 0.
        """
        # A client's own text has the special tokens between its ends, and so has an echo of tokens if they are not skipped.
        shown = () if text == self._tokenizer.decode(token_ids) else None
        bytes_in_text = self._tokenizer.bytes_showing(shown)
        begins = [self._advance(bytes_in_text[token_id]) for token_id in token_ids]
        end = self._offset + len(self._decoder.decode(b"", final=True))  # The answer is decoded apart.
        num_hidden = self._num_hidden(token_ids, [*begins, end], len(text))
        self._offset = len(text)
        told = [None, *entries]
        return {
            "text_offset": [min(max(0, begin - num_hidden), len(text)) for begin in begins],
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in told],
            "tokens": [_legacy_text(self._tokenizer, token_id) for token_id in token_ids],
            "top_logprobs": [None if entry is None else self._top(entry, num_top) for entry in told],
        }


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> PromptTokens:
    """Return vLLM's `prompt_logprobs`: for each token, it and its likeliest alternatives by token id. The first is null."""
    return [None, *[_of_prompt(tokenizer, entry, num_top) for entry in entries]]


def _of_prompt(tokenizer: Tokenizer, entry: TokenLogprobs, num_top: int) -> dict[str, PromptToken]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)]
    told = {token_id: (logprob, rank) for token_id, logprob, rank in ranked} | {entry.token_id: (entry.logprob, entry.rank)}
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, (logprob, rank) in told.items()
    }


class ChatLogprobs:
    """Log-probabilities of chats: each shown token with its text, bytes and likeliest alternatives.

    The bytes of all entries together are the text that the model wrote, reasoning and calls included, where invalid UTF-8
    becomes U+FFFD. End tokens, skipped special tokens, and tokens in or after a stop string have no entry. A token that is
    partly shown has only the bytes of that part.
    """

    def __init__(self, tokenizer: Tokenizer, shown_bytes: ByteTable, bytes_in_text: ByteTable) -> None:
        """`shown_bytes`: the bytes that the client sees of each token. `bytes_in_text`: also those of marks in the text."""
        self._tokenizer = tokenizer
        self._shown_bytes = shown_bytes
        self._bytes_in_text = bytes_in_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_decoded = 0
        """Number of complete characters in all tokens so far."""
        self._num_shown = 0
        """Number of characters of text so far. Text that may begin a stop string is held back."""
        self._waiting: deque[tuple[TokenLogprobs, bytes, list[int]]] = deque()
        """Tokens not completely shown: (entry, bytes, characters that must be shown for each byte)."""

    @classmethod
    def of(cls, call: RunningCall) -> ChatLogprobs:
        tokenizer, in_text = call.running.tokenizer, call.requests[0].sampling.shown_special_ids
        return cls(tokenizer, tokenizer.bytes_showing(call.answer.shown_special_ids), tokenizer.bytes_showing(in_text))

    def write(self, entries: Sequence[TokenLogprobs], text: str, *, is_last: bool) -> ChatTokens:
        """Return the entries of tokens that are now shown. `text`: the answer's next piece; `entries`: its tokens."""
        self._num_shown += len(text)
        waiting = self._waiting
        for entry in entries:
            ends = self._advance(self._bytes_in_text[entry.token_id])
            if data := self._shown_bytes[entry.token_id]:
                waiting.append((entry, data, ends))
        content: list[ChatToken] = []
        while waiting and waiting[0][2][-1] <= self._num_shown:
            entry, data, _ = waiting.popleft()
            content.append(self._entry(entry, data))
        if is_last and waiting:
            entry, data, ends = waiting[0]
            if num_bytes := bisect_right(ends, self._num_shown):
                content.append(self._entry(entry, data[:num_bytes]))
        return {"content": content, "refusal": None}

    def _advance(self, data: bytes) -> list[int]:
        ends: list[int] = []
        for value in data:
            self._num_decoded += len(self._decoder.decode(bytes([value])))
            # An incomplete character will become one character, or one U+FFFD.
            ends.append(self._num_decoded + bool(self._decoder.getstate()[0]))
        return ends

    def _entry(self, entry: TokenLogprobs, data: bytes) -> ChatToken:
        token_bytes = self._tokenizer.token_bytes
        top = [_chat_token(token_bytes(token_id), logprob) for token_id, logprob in entry.top]
        return {**_chat_token(data, entry.logprob), "top_logprobs": top}


def _chat_token(data: bytes, logprob: float) -> Token:
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _legacy_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Return the token's text or, for a part of a character, its bytes as OpenAI writes them (`bytes:\\xe2\\x82`)."""
    token_bytes = tokenizer.token_bytes(token_id)
    try:
        return token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no infinity: OpenAI writes this for a probability of zero
