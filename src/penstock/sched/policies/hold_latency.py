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
PROBE_PERIOD = 64
"""One of so many equal chunks is made smaller: equal steps don't tell what a smaller chunk would save."""
STRAINED_PROBE_PERIOD = 4
"""The same while the target can't be held: either smaller chunks save little, or the machine is too slow for the target."""
PROBE_SHARE = 4
"""The smaller chunk has one in so many of the tokens."""


@dataclass(slots=True)
class HoldLatency:
    """Every decode gets its token; prefill chunks take the time that the latency between tokens leaves them.

    While requests decode, the latency between their tokens is the duration of a step. It is fitted to the tokens of the
    step (`StepCost`), and prefills get as many as keep the step within the target. The fit says what a step takes in the
    mean; by how much the slowest in a hundred exceed that is observed too, and the target of the mean is lower by as much.
    Without decodes the whole step is the prefills'.

    A chunk of a few tokens may take as long as one of a hundred, where other programs keep the cores busy. Chunks of one size
    would hide that, so now and then one is smaller (`PROBE_PERIOD`). Where not even the smallest chunk keeps the target,
    prefills get a share of the step's time (`min_prefill_share`), so no prompt starves.
    """

    slo_itl_ns: int = 0
    """Latency between two tokens that 99 of 100 are to keep; 0: the larger of the next two."""
    fluent_itl_ns: int = 50_000_000
    """20 tokens a second are faster than anybody reads. Smaller chunks would cost throughput, as each step has a fixed part."""
    max_slowdown: float = 2.0
    """Of a step by the tokens of prefills."""
    min_prefill_share: float = 1 / 3
    """Of a step's time, for the tokens of prefills, where the target can't be held: they then take about three times as long as
    in steps that are full of them. [0, 1)"""
    min_chunk_tokens: int = 16
    """For prefills in every step, whatever the latency."""
    long_prefill_token_threshold: int = 0
    """A prefill that is further behind is long: others pass it, but leave half of the prefills' tokens to it; 0: none is."""
    max_long_partial_prefills: int = 1
    """Long prefills at the same time; 0: no limit."""
    cost: StepCost = field(default_factory=StepCost)
    excess: float = FIRST_EXCESS
    """Duration over estimate that one in a hundred steps with decodes and prefills exceeds."""
    _seen: StepRecord | None = None
    _num_seen: int = 0
    _num_equal_chunks: int = 0
    """Steps with decodes since the last in which prefills had at most half of the tokens that they might have had."""
    _chunk_tokens: int = 0
    """What prefills might have had in the last step with decodes, but for a probe."""
    _is_strained: bool = False
    """Not even the smallest chunk keeps the target."""

    def limits(self, view: BudgetView) -> StepLimits:
        if view.last_step is not None and view.last_step is not self._seen:
            self._observe(view.last_step)
        num_prefill_tokens = view.max_step_tokens - view.num_decodes
        if view.num_decodes and self.cost.is_known:
            num_prefill_tokens = self._chunk_tokens = min(num_prefill_tokens, self._affordable_tokens(view))
            if self._is_probe_due:
                num_prefill_tokens = max(1, num_prefill_tokens // PROBE_SHARE)
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
        least_ns = self.cost.least_ns(view.num_decodes)
        default_ns = max(self.fluent_itl_ns, self.max_slowdown * least_ns)
        target_ns = self.slo_itl_ns / self.excess if self.slo_itl_ns else default_ns
        token_ns = self.cost.token_ns(view.prefill_context_len)
        smallest_ns = self.min_chunk_tokens * token_ns
        self._is_strained = target_ns - least_ns < smallest_ns
        if not self._is_strained:
            return int((target_ns - least_ns) / token_ns)
        share_ns = least_ns * self.min_prefill_share / (1 - self.min_prefill_share)
        return max(self.min_chunk_tokens, int(share_ns / token_ns))

    @property
    def _is_probe_due(self) -> bool:
        period = STRAINED_PROBE_PERIOD if self._is_strained else PROBE_PERIOD
        return self._num_equal_chunks >= period - 1

    def _observe(self, step: StepRecord) -> None:
        self._seen = step
        self._num_seen += 1
        if step.num_decodes and step.num_prefill_tokens:
            is_full = 2 * step.num_prefill_tokens > self._chunk_tokens
            self._num_equal_chunks = self._num_equal_chunks + 1 if is_full else 0
        expected_ns = self.cost.estimate_ns(step.num_decodes, step.num_prefill_tokens, step.num_prefill_pairs)
        is_as_expected = abs(step.duration_ns - expected_ns) < NOISE * step.duration_ns
        if not step.num_prefill_tokens and is_as_expected and self._num_seen % DECODES_TO_LEARN:
            return
        if self.cost.is_known and step.num_decodes and step.num_prefill_tokens:
            # Stochastic approximation of a quantile (Robbins and Monro, 1951): in balance, one in a hundred is above.
            change = QUANTILE_STEP * (0.99 if step.duration_ns > self.excess * expected_ns else -0.01)
            self.excess = min(max(self.excess + change, 1.0), MAX_EXCESS)
        self.cost.learn(step)
