"""Model of the time that a step takes, given its shape: a sum of named parts, each a count times its cost.

Noise is drawn from ratios of measured to modelled time. A model keeps the range of the steps that it was fitted to, so that the
simulator can warn of extrapolation.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any, NamedTuple

from penstock.lab.kernel_tables import KernelTables
from penstock.lab.step_counts import NARROW_TOKENS, Counts, counts_of
from penstock.types.plan import RowPlan, StepShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    max_rows: int
    max_decodes: int
    max_prefill_tokens: int
    max_context_len: int

    def exceeded_by(self, counts: Counts) -> tuple[str, ...]:
        pairs = (
            ("rows", counts.num_rows, self.max_rows),
            ("decodes", counts.num_decodes, self.max_decodes),
            ("prefill tokens", counts.num_prefill_tokens, self.max_prefill_tokens),
            ("tokens of context", counts.max_context_len, self.max_context_len),
        )
        return tuple([f"{num} {name} > {most}" for name, num, most in pairs if num > most])


COLD_AFTER_NS = 35e6
"""A step this long evicts all weights from the processor's caches. Measured, like `COLD_DECAY`: docs/profile.md."""
COLD_DECAY = 0.75
"""Share of the evicted weights that is still missing after one more step."""


def coldness_after(coldness: float, duration_ns: float) -> float:
    """Return the share of the weights that is missing from the processor's caches after a step of `duration_ns`.

    `coldness`: that share before the step. A step of at most `NARROW_TOKENS` that follows takes this share of
    `CostModel.cold_ns` longer. Larger steps lose less time.
    """
    return max(coldness * COLD_DECAY, min(1.0, duration_ns / COLD_AFTER_NS))


def cold_share(coldness: float, num_tokens: int) -> float:
    return coldness * min(1.0, NARROW_TOKENS / num_tokens)


class Residuals(NamedTuple):
    up_to_ns: float
    """The ratios apply to steps with a modelled time up to this."""
    ratios: tuple[float, ...]
    """Ratios of measured to modelled time, ascending. Each is the mean of equally many steps."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Costs of the parts of a step in nanoseconds, for one model on one machine.

    The defaults are SmolLM2-135M (Q4_1, 8-bit KV) on one thread with AVX-512, fitted to 36 shapes with a mean error of 5 %
    (2026-11-20), without host time and noise.
    """

    step_ns: float = 2_680_000.0
    """Each step: reading weights, starting and joining threads."""
    decode_row_ns: float = 391_000.0
    """Each row of one token."""
    prefill_token_ns: float = 326_000.0
    """Each token of longer rows."""
    decode_read_ns: float = 610.0
    """Each KV position that a row of one token reads."""
    prefill_read_ns: float = 257.0
    """Each KV position that each token of a longer row reads."""
    prefill_context_ns: float = 0.0
    """Each KV position before a longer row, once for all of its tokens."""
    narrow_read_ns: float = 0.0
    """Extra per KV position that a row of one token reads in a step of fewer than `NARROW_TOKENS`."""
    repeated_ns: float = 0.0
    """Saved for each KV position that a row of one token reads after another one: the processor's caches have it."""
    sample_ns: float = 0.0
    """Each sampled token: computing its logits and choosing it."""
    sample_step_ns: float = 0.0
    """Each step that samples: reading the output matrix."""
    token_brackets: tuple[tuple[int, float], ...] = ()
    """Products with weights, priced like tax brackets: (up to this many tokens in the step, cost of each token). The last
    bracket has no upper end."""
    cold_ns: float = 0.0
    """Added to a short step after a long one, which has evicted the weights from the caches."""
    host_step_ns: float = 0.0
    """Time of the engine's thread for each step, outside of the executor."""
    host_row_ns: float = 0.0
    """The same, for each row."""
    host_prefill_ns: float = 0.0
    """The same, for a step with prompts."""
    text_ns: float = 0.0
    """From a request's arrival to the engine's queue, in which its text becomes tokens."""
    text_token_ns: float = 0.0
    """The same, for each token of the prompt."""
    residuals: tuple[Residuals, ...] = ()
    """Noise by step time, ascending. The last entry is also for longer steps. Empty means no noise."""
    residual_correlation: float = 0.0
    """Rank correlation between the noise of successive steps, in [0, 1): a slow phase lasts for many steps."""
    host_residuals: tuple[float, ...] = ()
    kernels: KernelTables | None = None
    """Tables of kernel times, added to the other costs."""
    fitted: Fitted | None = None

    def duration_ns(self, shape: StepShape) -> int:
        """Return the executor's time for a step of this shape, with warm caches and without noise."""
        return self.counted_ns(counts_of(shape))

    def counted_ns(self, counts: Counts) -> int:
        ns = (
            self.step_ns
            + self.decode_row_ns * counts.num_decodes
            + self.prefill_token_ns * counts.num_prefill_tokens
            + self.decode_read_ns * counts.num_decode_reads
            + self.narrow_read_ns * counts.num_narrow_reads
            + self.prefill_read_ns * counts.num_prefill_reads
            + self.prefill_context_ns * counts.num_prefill_context
            - self.repeated_ns * counts.num_repeated_reads
            + self._sample_ns(counts.num_samples)
            + (self._tokens_ns(counts.num_tokens) if self.token_brackets else 0.0)
            + (0.0 if self.kernels is None else self.kernels.step_ns(counts))
        )
        return round(max(0.0, ns))

    def scaled(self, factor: float) -> CostModel:
        """Return this model with all times multiplied, the host's too. Its noise is relative, and stays."""
        names = [one.name for one in fields(self) if one.name.endswith("_ns")]
        costs: dict[str, Any] = {name: factor * getattr(self, name) for name in names}
        costs["token_brackets"] = tuple([(up_to, factor * ns) for up_to, ns in self.token_brackets])
        return replace(self, **costs, kernels=self.kernels.slowed(factor) if self.kernels is not None and factor else None)

    def host_ns(self, num_rows: int, *, has_prefill: bool) -> int:
        return round(self.host_step_ns + self.host_row_ns * num_rows + (self.host_prefill_ns if has_prefill else 0.0))

    def prompt_ns(self, num_tokens: int) -> int:
        """Return the time from a request's arrival to the engine's queue."""
        return round(self.text_ns + self.text_token_ns * num_tokens)

    def noise(self, rng: Random) -> Noise:
        return Noise(self.residuals, self.residual_correlation, rng)

    def host_noise(self, rng: Random) -> Noise:
        return Noise((Residuals(math.inf, self.host_residuals),) if self.host_residuals else (), 0.0, rng)

    def outside(self, counts: Counts) -> tuple[str, ...]:
        return () if self.fitted is None else self.fitted.exceeded_by(counts)

    def _sample_ns(self, num_samples: int) -> float:
        return self.sample_ns * num_samples + (self.sample_step_ns if num_samples else 0.0)

    def _tokens_ns(self, num_tokens: int) -> float:
        total_ns, begin = 0.0, 0
        last = len(self.token_brackets) - 1
        for idx, (up_to, token_ns) in enumerate(self.token_brackets):
            if num_tokens <= up_to or idx == last:
                return total_ns + (num_tokens - begin) * token_ns
            total_ns += (up_to - begin) * token_ns
            begin = up_to
        return total_ns


NO_COSTS = CostModel(0.0, 0.0, 0.0, 0.0, 0.0)


class Noise:
    def __init__(self, residuals: Sequence[Residuals], correlation: float, rng: Random) -> None:
        self._edges = [one.up_to_ns for one in residuals[:-1]]
        self._ratios = [one.ratios for one in residuals]
        # Correlation of normal deviates that gives this rank correlation (Pearson, 1907).
        self._share = 2 * math.sin(math.pi * correlation / 6)
        self._own_share = math.sqrt(1 - self._share**2)
        self._rng = rng
        self._deviate = rng.gauss() if residuals else 0.0

    def draw(self, modelled_ns: float) -> float:
        if not self._ratios:
            return 1.0
        self._deviate = self._share * self._deviate + self._own_share * self._rng.gauss()
        rank = 0.5 * (1 + math.erf(self._deviate / math.sqrt(2)))
        ratios = self._ratios[bisect_left(self._edges, modelled_ns)]
        return ratios[min(int(rank * len(ratios)), len(ratios) - 1)]


def shape_of_rows(rows: Sequence[RowPlan]) -> StepShape:
    return StepShape(tuple([(row.query_len, row.context_len) for row in rows]), sum([row.samples for row in rows]))
