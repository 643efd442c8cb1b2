"""Counts of a step: what a cost model reads instead of the step's rows."""

from __future__ import annotations

from typing import NamedTuple

NARROW_TOKENS = 16
"""From this many tokens on, products are compute-bound and hide part of the time to fetch weights, keys and values."""


class Counts(NamedTuple):
    num_tokens: int
    """Positions computed in all rows."""
    num_decodes: int
    """Rows that compute one token."""
    num_prefill_tokens: int
    """Tokens in rows that compute several. A row with guesses costs as much as a short prompt."""
    num_decode_reads: int
    """KV positions read by rows of one token."""
    num_prefill_reads: int
    num_prefill_context: int
    num_samples: int
    num_rows: int
    max_context_len: int
    """Context plus new tokens of the longest row."""
    max_decode_reads: int = 0
    """KV positions read by the longest row of one token."""
    min_decode_reads: int = 0

    @property
    def num_narrow_reads(self) -> int:
        """Positions read by rows of one token in a step of few tokens."""
        return self.num_decode_reads if self.num_tokens < NARROW_TOKENS else 0

    @property
    def has_prompts(self) -> bool:
        """Whether some tokens have no sample after them. A row with guesses samples after each token."""
        return self.num_tokens > self.num_samples
