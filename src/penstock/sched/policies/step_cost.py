"""How long a step takes: a running fit of what was observed. Owned by the budget that steers by it; decides nothing.

    duration = fixed + decode * decodes + any * (1 if it has prefill tokens) + prefill * prefill tokens + attention * pairs

(pairs of a prefill token and one before it in its request) is fitted by a Kalman filter whose state are the five
coefficients. They drift (contexts grow, others use the machine), so each step adds a little doubt to them; what a step teaches
is divided among them by how doubtful each is. So a run of equal steps keeps the sum right and spoils no single coefficient, as
a plain fit over the last steps would.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import mul

from penstock.sched.policies.base import StepRecord

NOISE = 0.1
"""Standard deviation of a step's duration, as a share of it. Of the measured one, so that a stall teaches little."""
DRIFT = 0.03
"""Standard deviation of a coefficient's change from step to step, as a share of it."""
MIN_DRIFT = 0.1
"""What drifts at least, as a share of the first doubt: also a coefficient that was found to be nothing."""
MAX_DOUBT = 0.5
"""Standard deviation up to which drift makes a coefficient doubtful, as a share of it, or the first doubt if that is more."""
FIXED_SHARE = 0.25
"""Standard deviation of the fixed part, as a share of the first step's duration."""
FIRST_TOKENS = 32
"""A first step of fewer tokens is taken for one of so many: most of its time is that of any step."""
FAR_CONTEXT = 1000
"""Tokens before it that may make a prefill token cost twice as much, before anything is known."""
MIN_PREFILL_NS = 1.0
"""What a prefill token costs at least. Where steps with prefills are the shorter ones it would shrink until nothing is left to
divide by."""
MAX_ERRORS = 3.0
"""What a step teaches at most, in standard deviations."""


@dataclass(slots=True)
class StepCost:
    """Nanoseconds; all zero before the first step."""

    fixed_ns: float = 0.0
    decode_ns: float = 0.0
    """Per row that decodes."""
    any_prefill_ns: float = 0.0
    """What a step takes for having prefill tokens, however few.

    Large where other programs use the cores: each operation on more than one row waits for a thread that does not run.
    """
    prefill_ns: float = 0.0
    """Per prefill token; `MIN_PREFILL_NS` at least after the first step."""
    attention_ns: float = 0.0
    """Per pair of a prefill token and one before it."""
    _doubt: list[list[float]] = field(default_factory=list)
    """Covariance of the five. [5, 5]"""
    _first_doubts_ns: tuple[float, ...] = ()
    """Their standard deviations before the first step was learnt."""

    @property
    def is_known(self) -> bool:
        return bool(self._doubt)

    def estimate_ns(self, num_decodes: int, num_prefill_tokens: int = 0, num_prefill_pairs: int = 0) -> float:
        if not num_prefill_tokens:
            return self.fixed_ns + self.decode_ns * num_decodes
        return self.least_ns(num_decodes) + self.prefill_ns * num_prefill_tokens + self.attention_ns * num_prefill_pairs

    def least_ns(self, num_decodes: int) -> float:
        """What a step with prefill tokens takes, their own time aside."""
        return self.fixed_ns + self.decode_ns * num_decodes + self.any_prefill_ns

    def token_ns(self, context_len: int) -> float:
        """Of one more prefill token with so many before it."""
        return self.prefill_ns + self.attention_ns * context_len

    def learn(self, step: StepRecord) -> None:
        """Take over what a step took. O(1)."""
        if step.duration_ns <= 0:
            return
        if not self._doubt:
            self._begin(step)
        self._drift()
        num_tokens = step.num_prefill_tokens
        shape = [1, step.num_decodes, int(num_tokens > 0), num_tokens, step.num_prefill_pairs]
        least_ns = [0.0, 0.0, 0.0, max(MIN_PREFILL_NS, 0.1 * self.prefill_ns), 0.0]
        values = [self.fixed_ns, self.decode_ns, self.any_prefill_ns, self.prefill_ns, self.attention_ns]
        error = step.duration_ns - self.estimate_ns(step.num_decodes, num_tokens, step.num_prefill_pairs)
        is_learnt = False
        while not is_learnt:
            spread = [sum(map(mul, row, shape)) for row in self._doubt]
            variance = sum(map(mul, spread, shape)) + (NOISE * step.duration_ns) ** 2
            limit = MAX_ERRORS * variance**0.5
            gain = min(max(error, -limit), limit) / variance
            is_learnt = True
            for idx, least in enumerate(least_ns):
                if shape[idx] and values[idx] + spread[idx] * gain < least:
                    # No time is below nothing. What this part can't give, the others have to: they share the rest of the error.
                    error += shape[idx] * (values[idx] - least)
                    values[idx], shape[idx], is_learnt = least, 0, False
        moved = [max(value + own * gain, least) for value, own, least in zip(values, spread, least_ns, strict=True)]
        self.fixed_ns, self.decode_ns, self.any_prefill_ns, self.prefill_ns, self.attention_ns = moved
        self._doubt = [
            [value - own * other / variance for value, other in zip(row, spread, strict=True)]
            for row, own in zip(self._doubt, spread, strict=True)
        ]

    def _begin(self, step: StepRecord) -> None:
        """All of the first step's time is that of its tokens, and everything is doubtful."""
        duration_ns = float(step.duration_ns)
        token_ns = duration_ns / max(FIRST_TOKENS, step.num_decodes + step.num_prefill_tokens)
        self.decode_ns = self.prefill_ns = token_ns
        fixed_ns = FIXED_SHARE * duration_ns
        self._first_doubts_ns = (fixed_ns, token_ns, fixed_ns, token_ns, token_ns / FAR_CONTEXT)
        self._doubt = [[doubt**2 if row == col else 0.0 for col in range(5)] for row, doubt in enumerate(self._first_doubts_ns)]

    def _drift(self) -> None:
        values = (self.fixed_ns, self.decode_ns, self.any_prefill_ns, self.prefill_ns, self.attention_ns)
        for idx, (value, first) in enumerate(zip(values, self._first_doubts_ns, strict=True)):
            doubt = self._doubt[idx]
            doubt[idx] += (DRIFT * max(value, MIN_DRIFT * first)) ** 2
            limit = max(MAX_DOUBT * value, first)
            if doubt[idx] > limit**2:
                share = limit / doubt[idx] ** 0.5
                for row in self._doubt:
                    row[idx] *= share
                self._doubt[idx] = [value * share for value in doubt]
