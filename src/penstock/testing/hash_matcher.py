"""A made-up grammar: which tokens may come next is a hash of those before. Called by tests, through the `Matcher` protocol.

A mask that is used one token too early or too late, or of another request, allows other tokens, so it changes the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.testing.hashing import ROOT, mix
from penstock.types.errors import GrammarFailure

SHARE = 3
"""One in so many tokens is allowed."""


class HashMatcher:
    """Allows a third of the vocabulary, and nothing but `end_token_id` after `max_tokens` tokens, if these are given."""

    def __init__(
        self,
        vocab_size: int,
        *,
        seed: int = 0,
        max_tokens: int | None = None,
        end_token_id: int | None = None,
        fails_after: int | None = None,
    ) -> None:
        """It can't be followed further than `fails_after` tokens."""
        self.token_ids: list[int] = []
        """Accepted so far."""
        self._vocab_size = vocab_size
        self._state = mix(ROOT, seed)
        self._max_tokens = max_tokens
        self._end_token_id = end_token_id
        self._fails_after = fails_after

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            if token_id not in self.allowed():
                raise GrammarFailure(f"token {token_id} is not allowed after {self.token_ids}")
            self.token_ids.append(token_id)
            self._state = mix(self._state, token_id)
            if len(self.token_ids) == self._fails_after:
                raise GrammarFailure("the grammar can't be followed any further, as it was told")

    def mask(self) -> bytes:
        bits = sum(1 << token_id for token_id in self.allowed())
        return bits.to_bytes(-(-self._vocab_size // 32) * 4, "little")

    def allowed(self) -> list[int]:
        """Token ids, ascending; at least one."""
        if self._end_token_id is not None and len(self.token_ids) == self._max_tokens:
            return [self._end_token_id]
        found = [token_id for token_id in range(self._vocab_size) if mix(self._state, token_id) % SHARE == 0]
        return found or [self._state % self._vocab_size]
