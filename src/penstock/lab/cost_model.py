"""How long a step takes, from its shape alone. Called by the simulated executor; measures nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from penstock.types.plan import StepPlan, StepShape


@dataclass(frozen=True, slots=True)
class CostModel:
    """A sum of named parts, each a number of something times its cost. Nanoseconds.

    The defaults are SmolLM2-135M (Q4_1, keys and values of 8 bits) on one thread with AVX-512, fitted to 36 shapes with a
    mean error of 5 % (`benchmarks/step_costs.py --cpu-time`, 2026-11-20).
    """

    step_ns: float = 2_680_000.0
    """Each step, of any shape: the weights are read, threads start and meet."""
    decode_row_ns: float = 391_000.0
    """Each row of one token."""
    prefill_token_ns: float = 326_000.0
    """Each token of longer rows."""
    decode_read_ns: float = 610.0
    """Each KV position that a row of one token reads."""
    prefill_read_ns: float = 257.0
    """Each KV position that each token of a longer row reads; several tokens share what they read."""

    def counts(self, shape: StepShape) -> tuple[int, int, int, int, int]:
        """Units that each part is paid for, in the order of the fields."""
        num_decodes = num_prefill_tokens = num_decode_reads = num_prefill_reads = 0
        for query_len, context_len in shape.rows:
            if query_len == 1:
                num_decodes += 1
                num_decode_reads += context_len + 1
            else:
                num_prefill_tokens += query_len
                num_prefill_reads += query_len * context_len + query_len * (query_len + 1) // 2
        return 1, num_decodes, num_prefill_tokens, num_decode_reads, num_prefill_reads

    def parts_ns(self, shape: StepShape) -> Mapping[str, int]:
        counts = self.counts(shape)
        return {
            field.name.removesuffix("_ns"): round(getattr(self, field.name) * count)
            for field, count in zip(fields(self), counts, strict=True)
        }

    def duration_ns(self, shape: StepShape) -> int:
        """The sum of the parts."""
        step, decodes, tokens, decode_reads, prefill_reads = self.counts(shape)
        return round(
            self.step_ns * step
            + self.decode_row_ns * decodes
            + self.prefill_token_ns * tokens
            + self.decode_read_ns * decode_reads
            + self.prefill_read_ns * prefill_reads
        )


def shape_of(plan: StepPlan) -> StepShape:
    """The shape of a plan, which is all that a cost model sees of it."""
    return StepShape(
        tuple([(row.query_len, row.context_len) for row in plan.rows]),
        sum(row.samples for row in plan.rows),
    )
