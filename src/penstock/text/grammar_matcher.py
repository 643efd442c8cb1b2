"""One answer's way through a grammar: implements `types.matcher.Matcher` with llguidance. Made by `text.grammar`.

Used by one thread at a time. Never logs, as grammars and answers are users' own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.types.errors import GrammarFailure, Rejected, RejectReason

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits

    from penstock.text.grammar_tokens import GrammarTokens

MAX_DETAIL_CHARS = 300


class CompiledGrammar:
    """A grammar at the beginning of an answer. `matcher` may be called from any thread."""

    def __init__(self, start: LLMatcher, first_mask: bytes, usable: NDArray[np.uint8]) -> None:
        self._start = start
        self._first_mask = first_mask
        self._usable = usable

    def matcher(self) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._first_mask, self._usable)


def compile_grammar(lark: str, name: str, tokens: GrammarTokens) -> CompiledGrammar:
    """From llguidance's Lark. `name` is what an error calls it. Raises `Rejected`."""
    from llguidance import LLMatcher

    vocabulary, usable = tokens.ready()
    start = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_limits())
    try:
        if start.is_error():
            raise GrammarFailure(_detail(start))
        first_mask = _compute_mask(start, usable)
    except GrammarFailure as error:
        raise Rejected(RejectReason.INVALID, f"The {name} can't be followed: {error}") from error
    return CompiledGrammar(start, first_mask, usable)


class GrammarMatcher:
    """The engine thread's, once the request is handed over."""

    __slots__ = ("_inner", "_mask", "_usable")

    def __init__(self, inner: LLMatcher, first_mask: bytes, usable: NDArray[np.uint8]) -> None:
        self._inner = inner
        self._mask: bytes | None = first_mask
        self._usable = usable

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept`. End tokens after the first are no news."""
        self._mask = None
        for token_id in token_ids:
            if not self._inner.consume_token(token_id):
                raise GrammarFailure(_detail(self._inner))

    def mask(self) -> bytes:
        """See `Matcher.mask`."""
        if self._mask is None:
            self._mask = _compute_mask(self._inner, self._usable)
        return self._mask


def _compute_mask(matcher: LLMatcher, usable: NDArray[np.uint8]) -> bytes:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8, len(usable)) & usable  # there may be a word more
    if matcher.is_error():
        raise GrammarFailure(_detail(matcher))
    if not mask.any():
        raise GrammarFailure("No token of this model's vocabulary can continue the answer.")
    return mask.tobytes()


def _detail(matcher: LLMatcher) -> str:
    return matcher.get_error().split("\n<", 1)[0][:MAX_DETAIL_CHARS]


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(verbose_errors=False)
