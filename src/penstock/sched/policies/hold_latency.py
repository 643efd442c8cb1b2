"""The budget that holds a latency between tokens: owns what it learnt about steps. Called by the scheduler once per step."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.sched.policies.base import UNLIMITED, BudgetView, StepLimits, StepRecord
from penstock.sched.policies.step_cost import NOISE, StepCost

DECODES_TO_LEARN = 8
"""Of so many steps without prefills that took as long as expected one is learnt from: the others would tell nothing."""
QUANTILE_STEP = 0.02
"""By which the excess is moved."""
FIRST_EXCESS = 1.1
MAX_EXCESS = 1.5
"""Beyond that it is not the chunks that make steps slow."""


@dataclass(slots=True)
class HoldLatency:
    """Every decode gets its token; prefill chunks take the time that the latency between tokens leaves them.

    While requests decode, the latency between their tokens is the duration of a step. It is fitted to the tokens of the
    step (`StepCost`), and prefills get as many as keep the step within the target. The fit says what a step takes in the
    mean; by how much the slowest in a hundred exceed that is observed too, and the target of the mean is lower by as much.
    Without decodes the whole step is the prefills'.
    """

    slo_itl_ns: int = 0
    """Latency between two tokens that 99 of 100 are to keep; 0: the larger of the next two."""
    fluent_itl_ns: int = 50_000_000
    """20 tokens a second are faster than anybody reads. Smaller chunks would cost throughput, as each step has a fixed part."""
    max_slowdown: float = 2.0
    """Of a step by prefills."""
    min_chunk_tokens: int = 16
    """For prefills in every step, whatever the latency: else they would never end where decodes alone take too long."""
    long_prefill_token_threshold: int = 0
    """A prefill that is further behind is long: others pass it, but leave half of the prefills' tokens to it; 0: none is."""
    max_long_partial_prefills: int = 1
    """Long prefills at the same time; 0: no limit."""
    cost: StepCost = field(default_factory=StepCost)
    excess: float = FIRST_EXCESS
    """Duration over estimate that one in a hundred steps with decodes and prefills exceeds."""
    _seen: StepRecord | None = None
    _num_seen: int = 0

    def limits(self, view: BudgetView) -> StepLimits:
        if view.last_step is not None and view.last_step is not self._seen:
            self._observe(view.last_step)
        num_prefill_tokens = view.max_step_tokens - view.num_decodes
        if view.num_decodes and self.cost.is_known:
            num_prefill_tokens = min(num_prefill_tokens, self._affordable_tokens(view))
        max_tokens = view.num_decodes + num_prefill_tokens
        if not self.long_prefill_token_threshold:
            return StepLimits(max_tokens)
        return StepLimits(
            max_tokens,
            long_prefill_tokens=self.long_prefill_token_threshold,
            max_long_prefills=self.max_long_partial_prefills or UNLIMITED,
            long_prefill_share=max(1, num_prefill_tokens // 2),
        )

    def _affordable_tokens(self, view: BudgetView) -> int:
        base_ns = self.cost.estimate_ns(view.num_decodes)
        default_ns = max(self.fluent_itl_ns, self.max_slowdown * base_ns)
        target_ns = self.slo_itl_ns / self.excess if self.slo_itl_ns else default_ns
        return max(self.min_chunk_tokens, int((target_ns - base_ns) / self.cost.token_ns(view.prefill_context_len)))

    def _observe(self, step: StepRecord) -> None:
        self._seen = step
        self._num_seen += 1
        expected_ns = self.cost.estimate_ns(step.num_decodes, step.num_prefill_tokens, step.num_prefill_pairs)
        is_as_expected = abs(step.duration_ns - expected_ns) < NOISE * step.duration_ns
        if not step.num_prefill_tokens and is_as_expected and self._num_seen % DECODES_TO_LEARN:
            return
        if self.cost.is_known and step.num_decodes and step.num_prefill_tokens:
            # Stochastic approximation of a quantile (Robbins and Monro, 1951): in balance, one in a hundred is above.
            change = QUANTILE_STEP * (0.99 if step.duration_ns > self.excess * expected_ns else -0.01)
            self.excess = min(max(self.excess + change, 1.0), MAX_EXCESS)
        self.cost.learn(step)
