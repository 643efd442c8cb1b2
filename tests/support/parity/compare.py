"""Owns the comparison of logits with golden answers: greedy choices along the reference's path, and perplexity.

Called by the tests, `full.py` and `make_golden.py` on anything that has `forward_logits`. It needs neither torch nor the
package under test, and never decides how the executor is made.

A step is *clear* if the reference's best logit leads by more than `CLEAR_MARGIN`. Only clear steps must agree: below
that, arithmetic that is as good as the reference's may choose otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from support.parity.golden import FloatArray, GreedyCase, IntArray, TextCase

CLEAR_MARGIN = 0.5
"""Logits. Five ways of rounding activations to int8 moved the choice where the lead was at most 0.45 (golden/noise.json)."""
MIN_CLEAR_SHARE = 0.75
MAX_PERPLEXITY_RATIO = 1.01
"""For 20,000 tokens and more."""
MAX_SMALL_TEXT_RATIO = 1.02
"""For some thousand tokens, where rounding alone moves the perplexity by up to 0.9 % either way (golden/noise.json)."""


class HasLogits(Protocol):
    def forward_logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Logits after each token of one sequence, float32 [num_tokens, vocab_size]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class GreedyComparison:
    """An executor's choices along the reference's own path of one case."""

    case: GreedyCase
    chosen_ids: IntArray
    """The executor's argmax at each step, the lower id first among equals. [num_steps]"""
    margin_errors: FloatArray
    """The executor's difference of the reference's two best tokens, minus the reference's. [num_steps]"""
    text: TextComparison

    @property
    def is_clear(self) -> NDArray[np.bool_]:
        return self.case.margins > CLEAR_MARGIN

    @property
    def is_equal(self) -> NDArray[np.bool_]:
        return np.asarray(self.chosen_ids == self.case.path_ids)

    @property
    def mismatches(self) -> list[str]:
        """Clear steps that disagree, in words."""
        steps = np.flatnonzero(self.is_clear & ~self.is_equal)
        return [
            f"{self.case.name} step {i}: {self.chosen_ids[i]} instead of {self.case.path_ids[i]}, "
            f"which leads by {self.case.margins[i]:.3f}"
            for i in steps.tolist()
        ]


@dataclass(frozen=True, slots=True, eq=False)
class TextComparison:
    """An executor's log-probabilities of a text's tokens beside the reference's."""

    case: TextCase
    logprobs: FloatArray
    """Log-probabilities of tokens 1 to n - 1. [n - 1]"""


@dataclass(frozen=True, slots=True)
class GreedySummary:
    num_steps: int
    num_clear: int
    num_equal: int
    mismatches: tuple[str, ...]
    worst_unequal_margin: float
    """The largest lead of the reference's choice at a step where the executor chose otherwise; 0 if there is none."""
    margin_error_rms: float

    @property
    def clear_share(self) -> float:
        return self.num_clear / self.num_steps


@dataclass(frozen=True, slots=True)
class PerplexitySummary:
    num_tokens: int
    """Tokens predicted."""
    executor: float
    f32: float
    bf16: float

    @property
    def ratio_to_f32(self) -> float:
        return self.executor / self.f32

    @property
    def ratio_to_bf16(self) -> float:
        return self.executor / self.bf16


def compare_greedy(executor: HasLogits, case: GreedyCase) -> GreedyComparison:
    """One forward pass over the prompt and the reference's path, its last token excepted."""
    token_ids = case.text.token_ids
    logits = executor.forward_logits(token_ids[:-1].tolist())
    steps = logits[case.prompt_len - 1 :]
    pairs = np.take_along_axis(steps, case.top_ids[:, :2], axis=1)
    return GreedyComparison(
        case,
        steps.argmax(axis=1).astype(np.int32),
        pairs[:, 0] - pairs[:, 1] - case.margins,
        TextComparison(case.text, token_logprobs(logits, token_ids[1:])),
    )


def compare_text(executor: HasLogits, case: TextCase) -> TextComparison:
    """One forward pass over the text, its last token excepted."""
    logits = executor.forward_logits(case.token_ids[:-1].tolist())
    return TextComparison(case, token_logprobs(logits, case.token_ids[1:]))


def token_logprobs(logits: FloatArray, token_ids: IntArray) -> FloatArray:
    """log softmax(logits[i])[token_ids[i]], summed in float64. [n]"""
    log_sums = np.empty(len(logits), np.float64)
    for begin in range(0, len(logits), 64):  # the logits of a long text of a large vocabulary take gigabytes already
        rows = logits[begin : begin + 64]
        top = rows.max(axis=1, keepdims=True)
        log_sums[begin : begin + 64] = np.log(np.exp(rows - top).sum(axis=1, dtype=np.float64)) + top[:, 0]
    return np.asarray(logits[np.arange(len(token_ids)), token_ids] - log_sums, dtype=np.float32)


def summarise_greedy(comparisons: Sequence[GreedyComparison]) -> GreedySummary:
    margins = np.concatenate([comparison.case.margins for comparison in comparisons])
    is_equal = np.concatenate([comparison.is_equal for comparison in comparisons])
    errors = np.concatenate([comparison.margin_errors for comparison in comparisons])
    return GreedySummary(
        num_steps=len(margins),
        num_clear=int((margins > CLEAR_MARGIN).sum()),
        num_equal=int(is_equal.sum()),
        mismatches=tuple(line for comparison in comparisons for line in comparison.mismatches),
        worst_unequal_margin=float(margins[~is_equal].max(initial=0.0)),
        margin_error_rms=float(np.sqrt((errors.astype(np.float64) ** 2).mean())),
    )


def summarise_perplexity(comparisons: Sequence[TextComparison]) -> PerplexitySummary:
    """exp(mean negative log-likelihood) over all predicted tokens of all texts together."""

    def perplexity(parts: list[FloatArray]) -> float:
        return float(np.exp(-np.concatenate(parts).mean(dtype=np.float64)))

    return PerplexitySummary(
        num_tokens=sum(len(comparison.logprobs) for comparison in comparisons),
        executor=perplexity([comparison.logprobs for comparison in comparisons]),
        f32=perplexity([comparison.case.logprobs_f32 for comparison in comparisons]),
        bf16=perplexity([comparison.case.logprobs_bf16 for comparison in comparisons]),
    )
