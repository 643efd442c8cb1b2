"""A made-up grammar for the hash executor."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Self

from penstock.testing.hash_executor import ROOT, mix
from penstock.types.errors import GrammarFailure


class HashMatcher:
    """A grammar that allows a third of the vocabulary, and after `max_tokens` only `end_token_id`, if these are given.

    With `num_forced`, that many of 8 positions, and the end, allow a single token. `forced` returns some of these tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        end_token_id: int | None = None,
        fails_after: int | None = None,
        num_forced: int = 0,
    ) -> None:
        self.token_ids: list[int] = []
        self._vocab_size = vocab_size
        self._seed = seed
        self._state = mix(ROOT, seed)
        self._max_tokens = max_tokens
        self._end_token_id = end_token_id
        self._fails_after = fails_after
        self._num_forced = num_forced

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.allowed():
                raise GrammarFailure(f"token {token_id} is not allowed after {self.token_ids}")
            self.token_ids.append(token_id)
            self._state = mix(self._state, token_id)
            if len(self.token_ids) == self._fails_after:
                raise GrammarFailure("the grammar can't be followed any further, as it was told")

    def copy(self) -> Self:
        other = copy(self)
        other.token_ids = [*self.token_ids]
        return other

    def anew(self) -> Self:
        """Return the same grammar before its first token."""
        other = copy(self)
        other.token_ids, other._state = [], mix(ROOT, self._seed)
        return other

    def forced(self) -> Sequence[int]:
        state, num_tokens = self._state, len(self.token_ids)
        forced: list[int] = []
        while self._is_forced(state, num_tokens) and len(forced) <= state % 4:
            (token_id,) = self._allowed(state, num_tokens)
            forced.append(token_id)
            state, num_tokens = mix(state, token_id), num_tokens + 1
        return forced

    def mask(self) -> bytes:
        bits = sum(1 << token_id for token_id in self.allowed())
        return bits.to_bytes(-(-self._vocab_size // 32) * 4, "little")

    def allowed(self) -> list[int]:
        """Return the allowed token ids, ascending; at least one."""
        return self._allowed(self._state, len(self.token_ids))

    def _allowed(self, state: int, num_tokens: int) -> list[int]:
        if num_tokens == self._max_tokens and self._end_token_id is not None:
            return [self._end_token_id]
        if self._is_forced(state, num_tokens):
            return [state % self._vocab_size]
        found = [token_id for token_id in range(self._vocab_size) if mix(state, token_id) % 3 == 0]
        return found or [state % self._vocab_size]

    def _is_forced(self, state: int, num_tokens: int) -> bool:
        is_at_end = num_tokens == self._max_tokens and self._end_token_id is not None
        return self._num_forced > 0 and (is_at_end or (state >> 8) % 8 < self._num_forced)
