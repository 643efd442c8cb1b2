"""The result that an executor returns for one step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution (before penalties and temperature)."""

    token_id: int
    logprob: float
    rank: int
    """How many tokens are more likely, plus one."""
    top: tuple[tuple[int, float], ...]
    """(token_id, logprob), most likely first, ties by id; as many as were asked for."""


@dataclass(slots=True)
class StepTiming:
    """Integer nanoseconds of the executor's own monotonic clock.

    Nobody writes to one after it was made; not frozen for the reason in `RowPlan` (`types/plan.py`), as `StepResult`.
    """

    start_ns: int
    end_ns: int
    parts: Mapping[str, int] = field(default_factory=dict)
    """Named shares of the step (linear, attention, sampling, host, ...), where the executor knows them."""
    waited_ns: int = 0
    """For how long, before `start_ns`, the executor was ready and the machine did the work of other models."""


@dataclass(slots=True)
class StepResult:
    step_id: int
    token_ids: Mapping[str, tuple[int, ...]]
    """request_id -> tokens sampled in this step, in order: 1 to `samples` of each row that samples and did not fail."""
    timing: StepTiming
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Only rows that asked for them; as long as that row's `token_ids`."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Only rows that asked for them: request_id -> one for each of the row's `scored_positions`, about the token after it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """request_id -> why this row has no token though it samples (no logit was a number). Its request ends; the others go on."""
    states: Mapping[str, bytes] = field(default_factory=dict)
    """With `Capacity.is_one_pass`, instead of tokens: request_id -> the answer to its text, float32 in the machine's order of
    bytes. [width], or [num_tokens, width] where each token has its own"""
