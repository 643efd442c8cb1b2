"""How fast steps and prefills go, measured from the steps. Kept by `door`; the engine thread is the one writer."""

from __future__ import annotations

from penstock.types.stats import StepStats, WaitReason

STEP_WEIGHT = 0.05
"""Of the newest step in the mean."""
PREFILL_DECAY = 0.95
"""Of what is remembered, per step that had all the prefill that it could take."""


class Pace:
    """Both are 0 until they were measured."""

    def __init__(self, max_step_tokens: int) -> None:
        self._half_step_tokens = max_step_tokens / 2
        self._step_ns = 0.0
        self._prefill_tokens = 0.0
        self._prefill_ns = 0.0

    @property
    def step_ns(self) -> int:
        """Mean duration of a step: what a running request waits for its next token."""
        return int(self._step_ns)

    def prefill_ns(self, num_tokens: float) -> int:
        """Expected time to compute so many prompt tokens, beside the decodes of late."""
        return int(num_tokens * self._prefill_ns / self._prefill_tokens) if self._prefill_tokens else 0

    def on_step(self, stats: StepStats) -> None:
        duration_ns = stats.ended_ns - stats.started_ns
        self._step_ns += (duration_ns - self._step_ns) * (STEP_WEIGHT if self._step_ns else 1.0)
        # A row's last token samples, as a decode does; padding is nobody's prompt.
        num_prefill_tokens = stats.num_tokens - stats.num_padding_tokens - stats.num_rows
        # Other steps say how many prompts came, not how fast they could be computed.
        is_full = stats.waits_for is WaitReason.TOKENS or stats.num_tokens >= self._half_step_tokens
        if is_full and num_prefill_tokens > 0:
            self._prefill_tokens = PREFILL_DECAY * self._prefill_tokens + num_prefill_tokens
            self._prefill_ns = PREFILL_DECAY * self._prefill_ns + duration_ns
