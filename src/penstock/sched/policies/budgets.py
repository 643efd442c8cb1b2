"""Budgets: how a step's tokens are split between decodes and prefills."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul
from typing import ClassVar

from penstock.sched.policies.base import UNLIMITED, Budget, BudgetView, StepLimits, StepRecord

PROBE_PERIOD = 64
"""One in this many equal chunks is made smaller, which shows what a smaller chunk saves."""
STRAINED_PROBE_PERIOD = 4
"""The same while the target can't be met."""
PROBE_SHARE = 4
HELD_PROBE_PERIOD = 16
"""One in this many similar steps of `HoldStep` is made smaller: after a stall they may all be too long."""

NOISE = 0.1
"""Standard deviation of a step's duration, as a share of it, so that a stall teaches little."""
DRIFT = 0.03
"""Standard deviation of a coefficient's change per step, as a share of it."""
MAX_DOUBT = 0.5
"""Limit of a coefficient's uncertainty through drift, as a share of it."""
FIRST_TOKENS = 32
"""A first step with fewer tokens counts as this many. One of the background has no more."""
MIN_CHUNK_TOKENS = 16
"""Prefill tokens that a step gets at least, whatever the latency."""
MIN_PREFILL_NS = 1.0
"""Least cost of a prefill token, to divide by."""


@dataclass(frozen=True, slots=True)
class DecodeFirst(Budget):
    """Every decode gets its token, and chunks of prompts take the rest (Sarathi-Serve, OSDI 2024). The settings are vLLM's."""

    long_prefill_token_threshold: int = 0
    """A prefill further behind is long, and gets at most this many tokens in a step; 0: none is long."""
    max_long_partial_prefills: int = 0
    """Long prefills at the same time; 0: no limit."""

    def limits(self, view: BudgetView) -> StepLimits:
        threshold = self.long_prefill_token_threshold
        if not threshold:
            return StepLimits(view.max_step_tokens)
        return StepLimits(view.max_step_tokens, threshold, threshold, self.max_long_partial_prefills or UNLIMITED)


@dataclass(frozen=True, slots=True)
class PrefillFirst(Budget):
    """Prompts are computed in steps of their own, before decodes go on (SGLang without `enable_mixed_chunk`)."""

    separates_prompts: ClassVar[bool] = True

    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens)


@dataclass(frozen=True, slots=True)
class WholePrompts(Budget):
    """Every decode gets its token. Prompts are computed whole, as many as fit the step (Orca, OSDI 2022)."""

    def limits(self, view: BudgetView) -> StepLimits:
        return StepLimits(view.max_step_tokens, splits_prompts=False)


@dataclass(slots=True)
class StepCost:
    """A running estimate of step durations in nanoseconds; all zero before the first step.

        duration = fixed + decode * decodes + any * (1 if it has prefill tokens) + prefill * prefill tokens + attention * pairs

    where pairs are (prefill token, earlier token of its request). A Kalman filter fits the coefficients, which drift. A
    step's error is divided among them by their uncertainty.
    """

    fixed_ns: float = 0.0
    decode_ns: float = 0.0
    any_prefill_ns: float = 0.0
    """Large where other programs use the cores."""
    prefill_ns: float = 0.0
    """At least `MIN_PREFILL_NS` after the first step."""
    attention_ns: float = 0.0
    _doubt: list[list[float]] = field(default_factory=list)
    """Covariance of the five. [5, 5]"""
    _first_doubts_ns: tuple[float, ...] = ()

    @property
    def is_known(self) -> bool:
        return bool(self._doubt)

    @property
    def _values(self) -> list[float]:
        return [self.fixed_ns, self.decode_ns, self.any_prefill_ns, self.prefill_ns, self.attention_ns]

    def estimate_ns(self, step: StepRecord) -> float:
        if not step.num_prefill_tokens:
            return self.fixed_ns + self.decode_ns * step.num_decodes
        tokens_ns = self.prefill_ns * step.num_prefill_tokens
        return self.least_ns(step.num_decodes) + tokens_ns + self.attention_ns * step.num_prefill_pairs

    def is_as_expected(self, step: StepRecord) -> bool:
        return abs(step.duration_ns - self.estimate_ns(step)) < NOISE * step.duration_ns

    def least_ns(self, num_decodes: float) -> float:
        """Return the time of a step with a prefill, without the time of the prefill's tokens."""
        return self.fixed_ns + self.decode_ns * num_decodes + self.any_prefill_ns

    def token_ns(self, context_len: float) -> float:
        """Return the additional time of one prefill token that follows `context_len` others."""
        return self.prefill_ns + self.attention_ns * context_len

    def learn(self, step: StepRecord) -> None:
        if step.duration_ns <= 0:
            return
        if not self._doubt:
            self._begin(step)
        self._drift()
        num_tokens = step.num_prefill_tokens
        shape = [1, step.num_decodes, int(num_tokens > 0), num_tokens, step.num_prefill_pairs]
        least_ns = [0.0, 0.0, 0.0, max(MIN_PREFILL_NS, 0.1 * self.prefill_ns), 0.0]
        values = self._values
        error = step.duration_ns - self.estimate_ns(step)
        is_learnt = False
        while not is_learnt:
            spread = [sum(map(mul, row, shape)) for row in self._doubt]
            variance = sum(map(mul, spread, shape)) + (NOISE * step.duration_ns) ** 2
            limit = 3.0 * variance**0.5  # a step teaches at most so much
            gain = min(max(error, -limit), limit) / variance
            is_learnt = True
            for idx, least in enumerate(least_ns):
                if shape[idx] and values[idx] + spread[idx] * gain < least:
                    # No time is below 0. The other coefficients share the rest of the error.
                    error += shape[idx] * (values[idx] - least)
                    values[idx], shape[idx], is_learnt = least, 0, False
        moved = [max(value + own * gain, least) for value, own, least in zip(values, spread, least_ns, strict=True)]
        self.fixed_ns, self.decode_ns, self.any_prefill_ns, self.prefill_ns, self.attention_ns = moved
        self._doubt = [
            [value - own * other / variance for value, other in zip(row, spread, strict=True)]
            for row, own in zip(self._doubt, spread, strict=True)
        ]

    def _begin(self, step: StepRecord) -> None:
        """Fit the first step: all its time goes to its tokens."""
        duration_ns = float(step.duration_ns)
        token_ns = duration_ns / max(FIRST_TOKENS, step.num_decodes + step.num_prefill_tokens)
        self.decode_ns = self.prefill_ns = token_ns
        fixed_ns = 0.25 * duration_ns
        # A context of 1,000 tokens may double the cost of a prefill token.
        self._first_doubts_ns = (fixed_ns, token_ns, fixed_ns, token_ns, token_ns / 1000)
        self._doubt = [[doubt**2 if row == col else 0.0 for col in range(5)] for row, doubt in enumerate(self._first_doubts_ns)]

    def _drift(self) -> None:
        for idx, (value, first) in enumerate(zip(self._values, self._first_doubts_ns, strict=True)):
            doubt = self._doubt[idx]
            doubt[idx] += (DRIFT * max(value, 0.1 * first)) ** 2  # so that a coefficient of 0 can change too
            limit = max(MAX_DOUBT * value, first)
            if doubt[idx] > limit**2:
                share = limit / doubt[idx] ** 0.5
                for row in self._doubt:
                    row[idx] *= share
                self._doubt[idx] = [value * share for value in doubt]


@dataclass(slots=True)
class HoldLatency(Budget):
    """Every decode gets its token. Prompt chunks get only as much time as a target for inter-token latency leaves.

    `StepCost` predicts the mean duration of a step, and `excess` tracks how far the slowest 1 % exceed it. If even the smallest
    chunk misses the target, prefills get `min_prefill_share` of the time, so no prompt starves.
    """

    slo_itl_ns: int = 0
    """Latency between tokens that 99 % must meet. 0: as `fluent_itl_ns` or `max_slowdown` allow."""
    fluent_itl_ns: int = 50_000_000
    """20 tokens a second, faster than anybody reads. Shorter steps would only cost throughput."""
    max_slowdown: float = 2.0
    """Factor by which prefill tokens may slow a step."""
    min_prefill_share: float = 1 / 3
    """Share of a step's time for prefill tokens if the target can't be met. [0, 1)"""
    fill_share: float = 0.1
    """Background requests may take this share of the time that a prompt could take of the same step. [0, 1]"""
    idle_fill_share: float = 0.25
    """The same for steps of background requests alone, which delay only requests that arrive meanwhile. [0, 1]"""
    min_chunk_tokens: int = MIN_CHUNK_TOKENS
    """Least prefill tokens per step, whatever the latency."""
    long_prefill_token_threshold: int = 0
    """A prefill further behind is long: others pass it, but leave it half of the prefill tokens; 0: none is long."""
    max_long_partial_prefills: int = 1
    """Long prefills at the same time; 0: no limit."""
    cost: StepCost = field(default_factory=StepCost)
    excess: float = 1.1
    """Ratio of real to predicted duration that 1 % of the steps with decodes and prefills exceed, at most 1.5."""
    _seen: StepRecord | None = None
    _num_seen: int = 0
    _num_equal_chunks: int = 0
    """Steps since prefills last had at most half of the possible tokens."""
    _chunk_tokens: int = 0
    _is_strained: bool = False

    def limits(self, view: BudgetView) -> StepLimits:
        if view.last_step is not None and view.last_step is not self._seen:
            self._observe(view.last_step)
        num_prefill_tokens = view.max_step_tokens - view.num_decodes
        if (view.num_decodes or view.most_ns) and self.cost.is_known:
            num_prefill_tokens = self._chunk_tokens = min(num_prefill_tokens, self._affordable_tokens(view))
            period = STRAINED_PROBE_PERIOD if self._is_strained else PROBE_PERIOD
            if view.num_decodes and self._num_equal_chunks >= period - 1:
                num_prefill_tokens = max(1, num_prefill_tokens // PROBE_SHARE)
        max_tokens = view.num_decodes + num_prefill_tokens
        limits = StepLimits(max_tokens)
        if self.slo_itl_ns:
            limits.most_ns = self.slo_itl_ns / self.excess
        if self.long_prefill_token_threshold:
            limits.long_prefill_tokens = self.long_prefill_token_threshold
            limits.max_long_prefills = self.max_long_partial_prefills or UNLIMITED
            limits.long_prefill_share = max(1, num_prefill_tokens // 2)
        if view.has_background:
            self._fill(view, limits)
        return limits

    def _target_ns(self, least_ns: float) -> float:
        if self.slo_itl_ns:
            return self.slo_itl_ns / self.excess
        return max(self.fluent_itl_ns, self.max_slowdown * least_ns)

    def _fill(self, view: BudgetView, limits: StepLimits) -> None:
        """Limit background requests to a share of the time that a prompt could take of a step."""
        if not self.cost.is_known:
            limits.fill_tokens = view.num_decodes + FIRST_TOKENS
            return
        least_ns, token_ns = self.cost.least_ns(view.num_decodes), self.cost.token_ns(view.prefill_context_len)
        share = self.idle_fill_share if view.is_idle else self.fill_share
        most_ns = least_ns + share * (self._target_ns(least_ns) - least_ns)
        if view.most_ns:
            most_ns = min(most_ns, view.most_ns)
        num_tokens = max(0, int((most_ns - least_ns) / token_ns))
        limits.fill_tokens = view.num_decodes + num_tokens if view.num_decodes else max(self.min_chunk_tokens, num_tokens)
        limits.decode_tokens = max(MIN_PREFILL_NS, self.cost.decode_ns) / token_ns

    def _affordable_tokens(self, view: BudgetView) -> int:
        least_ns = self.cost.least_ns(view.num_decodes)
        target_ns = self._target_ns(least_ns)
        if view.most_ns:
            target_ns = min(target_ns, view.most_ns) if view.num_decodes else view.most_ns
        token_ns = self.cost.token_ns(view.prefill_context_len)
        self._is_strained = target_ns - least_ns < self.min_chunk_tokens * token_ns
        if not self._is_strained:
            return int((target_ns - least_ns) / token_ns)
        share_ns = least_ns * self.min_prefill_share / (1 - self.min_prefill_share)
        return max(self.min_chunk_tokens, int(share_ns / token_ns))

    def _observe(self, step: StepRecord) -> None:
        self._seen = step
        self._num_seen += 1
        if step.num_decodes and step.num_prefill_tokens:
            is_full = 2 * step.num_prefill_tokens > self._chunk_tokens
            self._num_equal_chunks = self._num_equal_chunks + 1 if is_full else 0
        if not step.num_prefill_tokens and self.cost.is_as_expected(step) and self._num_seen % 8:
            return  # a step like this teaches nothing new
        if self.cost.is_known and step.num_decodes and step.num_prefill_tokens:
            # Stochastic approximation of a quantile (Robbins and Monro, 1951): in equilibrium 1 % is above.
            change = 0.02 * (0.99 if step.duration_ns > self.excess * self.cost.estimate_ns(step) else -0.01)
            self.excess = min(max(self.excess + change, 1.0), 1.5)
        self.cost.learn(step)


@dataclass(slots=True)
class HoldStep(Budget):
    """Limits steps to about `step_ns`, for models that compute whole input texts in one step.

    Short steps keep latency low, since a new text waits for the current step. A text that takes longer gets its own step.
    """

    step_ns: int = 5_000_000
    """Duration of a step, unless its fixed part requires more."""
    max_fixed_share: float = 0.3
    """Largest share of a step's time for its fixed part. (0, 1)"""
    first_step_tokens: int = 128
    cost: StepCost = field(default_factory=StepCost)
    pairs_per_token: float = 0.0
    """Running mean of (token, earlier token) pairs per token."""
    _seen: StepRecord | None = None
    _num_seen: int = 0
    _held_tokens: int = 0
    """Tokens that the last step could have had, ignoring probes."""
    _num_equal: int = 0
    """Steps since the last with at most half of its possible tokens."""

    def limits(self, view: BudgetView) -> StepLimits:
        if view.last_step is not None and view.last_step is not self._seen:
            self._observe(view.last_step)
        num_prefill_tokens = self.first_step_tokens
        if self.cost.is_known:
            least_ns = self.cost.least_ns(view.num_decodes)
            rest_ns = max(self.step_ns, least_ns / self.max_fixed_share) - least_ns
            num_prefill_tokens = max(1, int(rest_ns / self.cost.token_ns(self.pairs_per_token)))
        self._held_tokens = num_prefill_tokens = min(num_prefill_tokens, view.max_step_tokens - view.num_decodes)
        if self._num_equal == HELD_PROBE_PERIOD - 1:
            num_prefill_tokens = max(1, num_prefill_tokens // 8)  # most of its time is the fixed part
        elif self._num_equal >= HELD_PROBE_PERIOD and view.last_step is not None:
            # The smaller step did not happen, since texts are never split. Only a larger one tells what a token takes.
            num_prefill_tokens = 2 * max(num_prefill_tokens, view.last_step.num_prefill_tokens)
            num_prefill_tokens = min(num_prefill_tokens, view.max_step_tokens - view.num_decodes)
            self._num_equal = 0
        return StepLimits(view.num_decodes + num_prefill_tokens)

    def _observe(self, step: StepRecord) -> None:
        self._seen = step
        self._num_seen += 1
        num_tokens = step.num_prefill_tokens
        self._num_equal = self._num_equal + 1 if 2 * num_tokens > self._held_tokens else 0
        if num_tokens:
            self.pairs_per_token += (step.num_prefill_pairs / num_tokens - self.pairs_per_token) / 8
        if not self.cost.is_as_expected(step) or self._num_seen % 4 == 0:
            self.cost.learn(step)


BUDGETS = {
    "decode-first": "penstock.sched.policies.budgets:DecodeFirst",
    "hold-step": "penstock.sched.policies.budgets:HoldStep",
    "itl": "penstock.sched.policies.budgets:HoldLatency",
    "prefill-first": "penstock.sched.policies.budgets:PrefillFirst",
    "whole-prompts": "penstock.sched.policies.budgets:WholePrompts",
}
