"""Workloads: lists of requests with given output lengths. Benchmarks send them; the simulator runs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.types.errors import ConfigError

NS_PER_S = 1_000_000_000
MAX_NS = 10 * 366 * 24 * 3600 * NS_PER_S
"""Ten years, the latest time of a workload."""


def whole_ns(at_ns: float) -> int:
    """Round a time of a workload. Raises ConfigError if it is not at most `MAX_NS`."""
    if not at_ns <= MAX_NS:
        raise ConfigError(
            "The workload would last for more than ten years.", remedy="Set a higher rate or speed, or shorter think times."
        )
    return round(at_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arrival_ns: int
    num_prompt_tokens: int
    """Tokens of the whole prompt, with earlier turns."""
    num_output_tokens: int
    tenant: str = ""
    priority: int = 0
    background: bool = False
    """The request runs on spare capacity. Background jobs have no arrival: `Pace` says how many are in flight."""
    deadline_ns: int | None = None
    """Instant of the deadline, on the clock of `arrival_ns`."""
    cancelled_ns: int | None = None
    cancelled_after_tokens: int | None = None
    after: int | None = None
    """Index of the previous job in the same conversation, or None. It is smaller than this job's index."""
    prefix: tuple[int, ...] = ()
    """Ids of the prompt's blocks of `Workload.prefix_block_tokens` each. Blocks with equal ids have equal tokens."""
    alike: tuple[tuple[int, int, int], ...] = ()
    """(block, other, n): blocks of the prompt whose first `n` tokens are those of another block."""
    answer: tuple[int, ...] = ()
    """Ids of the blocks after the prompt's last full one, to the end of the answer. Later prompts may begin with them."""
    prompt: str | None = None
    """The text to send, or the new message of a conversation. None means any text of that length."""
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt's tokens, or empty if any tokens will do."""
    texts: tuple[str, ...] = ()
    """Texts of a request for embeddings, else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    name: str
    """Origin and changes: `azure_conv_2023.csv, lengths / 4`."""
    jobs: Sequence[Job]
    prefix_block_tokens: int = 0
