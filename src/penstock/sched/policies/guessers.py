"""Guessers: which tokens may follow a request's last one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.sched.policies.base import Guess, Guesser
from penstock.types.request import Request

MOST_PLACES = 8
"""Places looked at for the longest match, the newest first."""
LONGEST_MATCH = 32
"""A longer match is no more likely to go on."""
RECENT_TOKENS = 1 << 16
"""Tokens of recent answers, of all tenants together. A tenant has at most an eighth."""
MOST_PROMPT_TOKENS = 1 << 13
"""Only this many last tokens of a prompt are searched, so that indexing a long prompt delays nobody."""
_END = -1
"""Between two answers."""


class NoGuesses(Guesser):
    is_on = False

    def guess(self, request: Request, most: int) -> Guess | None:
        del request, most
        return None


class _Text:
    """Tokens, and for each pair of them where it was seen before: hash chains, as LZ77 compressors have them.

    A place is the index of the token after a pair.
    """

    __slots__ = ("_before", "_newest", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._newest: dict[int, int] = {}
        """Pair -> its newest place."""
        self._before = [0, 0]
        """Place -> the place before it with the same pair; 0: there is none."""
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        place = max(1, len(self.tokens))
        self.tokens += tokens
        newest, add = self._newest, self._before.append
        for one, other in pairwise(self.tokens[place - 1 :]):
            place += 1
            pair = one << 32 ^ other
            add(newest.get(pair, 0))
            newest[pair] = place

    def find(self, last: Sequence[int], *, is_own: bool) -> tuple[int, int]:
        """Return (the place after the longest match with the end of `last`, the length of the match), or (0, 0).

        `is_own`: `last` are the tokens of this text itself, so that their end does not count as a match.
        """
        tokens, before, num_last = self.tokens, self._before, len(last)
        if num_last < 2:
            return 0, 0
        place = before[num_last] if is_own else self._newest.get(last[-2] << 32 ^ last[-1], 0)
        best, longest = 0, 0
        for _ in range(MOST_PLACES):
            if not place:
                break
            length, most = 2, min(LONGEST_MATCH, place, num_last)
            while length < most and tokens[place - 1 - length] == last[-1 - length]:
                length += 1
            if length > longest:
                best, longest = place, length
            place = before[place]
        return best, longest


@dataclass(slots=True)
class _Reader:
    """A request's text, and its current match: a source text, and the place after the matched tokens."""

    text: _Text
    num_output: int = 0
    source: _Text | None = None
    place: int = 0
    num_matched: int = 0


@dataclass(slots=True)
class Suffix(Guesser):
    """Guesses the tokens that followed the longest earlier match of the last tokens: in the request's prompt, in its answer,
    or in recent answers to its tenant (after Oliaro et al., SuffixDecoding, 2024).

    Frequencies in a suffix tree predict no better than the newest match (notes/2026-11-26-speculation.md).
    """

    source = "suffix"
    _readers: dict[str, _Reader] = field(default_factory=dict)
    _recent: OrderedDict[str, tuple[bytes, _Text]] = field(default_factory=OrderedDict)
    """Tenant -> (salt of its last request, answers to its requests with that salt), least recent first."""
    _num_recent: int = 0

    def guess(self, request: Request, most: int) -> Guess | None:
        reader, output = self._readers.get(request.request_id), request.output_token_ids
        if reader is None:
            reader = self._readers[request.request_id] = _Reader(_Text(request.prompt_token_ids[-MOST_PROMPT_TOKENS:]))
        new, reader.num_output = output[reader.num_output :], len(output)
        reader.text.extend(new)
        source, end = reader.source, reader.place + len(new)
        if source is not None and source.tokens[reader.place : end] == new:
            reader.place, reader.num_matched = end, min(LONGEST_MATCH, reader.num_matched + len(new))
        else:
            self._search(reader, self._recent_of(request))
            source = reader.source
        if source is None:
            return None
        found = source.tokens[reader.place : reader.place + most]
        if source is not reader.text:
            found = found[: found.index(_END)] if _END in found else found
        elif found and len(found) < most:  # the answer repeats itself
            found = (found * most)[:most]
        return Guess(found, reader.num_matched) if found else None

    def _recent_of(self, request: Request) -> _Text | None:
        salt, text = self._recent.get(request.tenant, (b"", None))
        return text if salt == request.cache_salt else None

    @staticmethod
    def _search(reader: _Reader, recent: _Text | None) -> None:
        text = reader.text
        reader.place, reader.num_matched = text.find(text.tokens, is_own=True)
        reader.source = text if reader.place else None
        if recent is not None and reader.num_matched < LONGEST_MATCH:
            place, num_matched = recent.find(text.tokens, is_own=False)
            num_matched -= 1  # other answers go on in the same way less often
            if num_matched > reader.num_matched:
                reader.source, reader.place, reader.num_matched = recent, place, num_matched

    def ended(self, request: Request) -> None:
        if self._readers.pop(request.request_id, None) is None or request.background:  # jobs would evict all others
            return
        most = RECENT_TOKENS // 8
        answer, recent = [*request.output_token_ids[: most // 2], _END], self._recent_of(request)
        if recent is not None and len(recent.tokens) + len(answer) <= most:
            recent.extend(answer)
            self._num_recent += len(answer)
        else:  # a new text, since readers may still follow the old one
            text = _Text([*([] if recent is None else recent.tokens[1 - most // 2 :]), *answer])
            _, old = self._recent.get(request.tenant, (b"", None))
            self._num_recent += len(text.tokens) - (0 if old is None else len(old.tokens))
            self._recent[request.tenant] = request.cache_salt, text
        self._recent.move_to_end(request.tenant)
        while self._num_recent > RECENT_TOKENS and len(self._recent) > 1:
            _, (_, forgotten) = self._recent.popitem(last=False)
            self._num_recent -= len(forgotten.tokens)


GUESSERS = {
    "off": "penstock.sched.policies.guessers:NoGuesses",
    "suffix": "penstock.sched.policies.guessers:Suffix",
}
