"""The result of one step, as an executor returns it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities under the model's own distribution, before penalties and temperature."""

    token_id: int
    logprob: float
    rank: int  # 1 + the number of more likely tokens
    top: tuple[tuple[int, float], ...]  # (token_id, logprob), most likely first, ties by id; as many as requested


@dataclass(slots=True)
class StepTiming:
    """When a step began and ended, in the executor's monotonic clock. Treat as frozen (see `RowPlan`)."""

    start_ns: int
    end_ns: int
    parts: Mapping[str, int] = field(default_factory=dict)
    """Named shares of the step (linear, attention, sampling, host, ...)."""
    waited_ns: int = 0  # time before `start_ns` in which other models used the machine


@dataclass(slots=True)
class StepResult:
    step_id: int
    token_ids: Mapping[str, tuple[int, ...]]
    """request_id -> the sampled token, for each sampling row that did not fail. After guesses that held, several tokens."""
    timing: StepTiming
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """Only for rows that asked for them; as long as the row's `token_ids`."""
    prompt_logprobs: Mapping[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """For rows that asked: one entry per `scored_positions`, about the token after it."""
    failures: Mapping[str, str] = field(default_factory=dict)
    """request_id -> why a sampling row has no token. That request ends; the others continue."""
    features: bytes | memoryview = b""
    """Content of `Program.kept`: float32, a row for each token of the step, or for each row that samples."""
    states: Mapping[str, bytes] = field(default_factory=dict)
    """With `Capacity.is_one_pass`, instead of tokens: float32 [width], or [num_tokens, width] with one row per token."""
