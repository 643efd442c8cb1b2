"""Counts of a step: what a cost model reads instead of the step's rows."""

from __future__ import annotations

from typing import NamedTuple

from penstock.types.plan import StepShape

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
    num_repeated: int = 0
    """KV positions that several requests hold, counted for each but one."""

    @property
    def num_narrow_reads(self) -> int:
        """Positions read by rows of one token in a step of few tokens."""
        return self.num_decode_reads if self.num_tokens < NARROW_TOKENS else 0

    @property
    def num_repeated_reads(self) -> int:
        """Positions that rows of one token read again, at most: what prompts and requests without a row hold counts, too."""
        return min(self.num_repeated, self.num_decode_reads - self.max_decode_reads)

    @property
    def has_prompts(self) -> bool:
        """Whether some tokens have no sample after them. A row with guesses samples after each token."""
        return self.num_tokens > self.num_samples


def counts_of(shape: StepShape) -> Counts:
    decode_reads = [context_len + 1 for query_len, context_len in shape.rows if query_len == 1]
    prefills = [row for row in shape.rows if row[0] != 1]
    num_prefill_tokens = sum(query_len for query_len, _ in prefills)
    return Counts(
        num_tokens=len(decode_reads) + num_prefill_tokens,
        num_decodes=len(decode_reads),
        num_prefill_tokens=num_prefill_tokens,
        num_decode_reads=sum(decode_reads),
        num_prefill_reads=sum(query_len * (2 * context_len + query_len + 1) // 2 for query_len, context_len in prefills),
        num_prefill_context=sum(context_len for _, context_len in prefills),
        num_samples=shape.num_samples,
        num_rows=len(shape.rows),
        max_context_len=max(map(sum, shape.rows), default=0),
        max_decode_reads=max(decode_reads, default=0),
        min_decode_reads=min(decode_reads, default=0),
        num_repeated=shape.num_repeated,
    )
