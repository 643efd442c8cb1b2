"""One answer's way through a grammar: implements `types.matcher.Matcher` with llguidance. Made by `text.grammar`.

Used by one thread at a time. Never logs, as grammars and answers are users' own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.text.grammar_errors import failure, refusal
from penstock.types.errors import GrammarFailure

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from penstock.text.grammar_tokens import GrammarTokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one grammar, in llguidance's own units. Those of `benchmarks/grammar_cases.py` need a tenth of each.

    25,000 states of the lexer take 10 to 45 MB, and 50,000 fuel up to 13 ms; an object of 500 fields that may all be left out
    needs all of the last two.
    """

    initial_lexer_fuel: int = 1_000_000
    step_lexer_fuel: int = 50_000
    max_lexer_states: int = 25_000
    max_grammar_size: int = 100_000
    max_items_in_row: int = 2_000
    step_max_items: int = 100_000


JSON_LIMITS = Limits()
LARK_LIMITS = replace(JSON_LIMITS, max_items_in_row=300, step_max_items=20_000)
"""Ambiguous rules cost the square of the items in a row: a mask takes up to 8 ms so, and 220 with llguidance's own limits."""
MAX_ANSWERS = 64
"""Of one compiled grammar, as its answers share what was found of it, and its limits: the next one starts anew."""


class CompiledGrammar:
    """A grammar at the beginning of an answer. `matcher` may be called from any thread."""

    def __init__(self, start: LLMatcher, usable: NDArray[np.uint8]) -> None:
        """Raises `GrammarFailure` if no answer can begin."""
        self._start = start
        self._usable = usable
        self._num_answers = 0
        self._has_failed = False
        self.first_mask = self.mask_of(start)

    @property
    def is_spent(self) -> bool:
        """The next answer should be of one that was compiled anew."""
        return self._has_failed or self._num_answers >= MAX_ANSWERS

    def matcher(self) -> GrammarMatcher:
        """A new one."""
        self._num_answers += 1  # a lost count does no harm
        return GrammarMatcher(self._start.deep_copy(), self)

    def mask_of(self, matcher: LLMatcher) -> bytes:
        """What may follow. Raises `GrammarFailure`."""
        # There may be a word more than the vocabulary needs.
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8, len(self._usable)) & self._usable
        if matcher.is_error():
            raise self.failure(matcher)
        if not mask.any():
            raise GrammarFailure("No token that an answer may have can continue it.", remedy="Leave special tokens out.")
        return mask.tobytes()

    def failure(self, matcher: LLMatcher) -> GrammarFailure:
        """Of a matcher that can't go on: no new one shares what it leaves behind."""
        self._has_failed = True
        return failure(matcher.get_error())


def compile_grammar(lark: str, name: str, tokens: GrammarTokens, limits: Limits) -> CompiledGrammar:
    """From llguidance's Lark. `name` is what an error calls it. Raises `Rejected`.

    Recurses as deep as the grammar says.
    """
    from llguidance import LLMatcher, LLParserLimits

    vocabulary, usable = tokens.ready()
    all_limits = LLParserLimits(verbose_errors=False, **asdict(limits))
    wrapped = json.dumps({"grammars": [{"lark_grammar": lark}]})  # a text that begins with a brace would be taken for that
    start = LLMatcher(vocabulary, wrapped, log_level=0, limits=all_limits)
    if start.is_error():
        raise refusal(name, failure(start.get_error()))
    try:
        return CompiledGrammar(start, usable)
    except GrammarFailure as error:
        raise refusal(name, error) from error


class GrammarMatcher:
    """The engine thread's, once the request is handed over."""

    __slots__ = ("_compiled", "_inner", "_mask")

    def __init__(self, inner: LLMatcher, compiled: CompiledGrammar) -> None:
        self._inner = inner
        self._compiled = compiled
        self._mask: bytes | None = compiled.first_mask

    def accept(self, token_ids: Sequence[int]) -> None:
        """See `Matcher.accept`. End tokens after the first are no news."""
        self._mask = None
        for token_id in token_ids:
            if not self._inner.consume_token(token_id):
                raise self._compiled.failure(self._inner)

    def mask(self) -> bytes:
        """See `Matcher.mask`."""
        if self._mask is None:
            self._mask = self._compiled.mask_of(self._inner)
        return self._mask
