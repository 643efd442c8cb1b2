"""Commands into the engine core, and token events out of it.

Every added request ends in exactly one `TokenEvent` with `finish_reason` set.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.request import FinishReason, Request
from penstock.types.result import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Add:
    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """End a request at once. Unknown and ended ids are ignored."""

    request_id: str
    detail: str = "cancelled"


@dataclass(frozen=True, slots=True)
class Stop:
    """End a request because of its text: a stop string, a line limit, or text that can't be decoded."""

    request_id: str
    stop_reason: str | None
    finish_reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True)
class Drain:
    """Refuse new requests; finish those already added."""


Command = Add | Abort | Stop | Drain


@dataclass(slots=True)
class TokenEvent:
    """The progress of one request in one step. Treat as frozen (see `RowPlan`)."""

    request_id: str
    token_ids: tuple[int, ...]
    """New tokens, in order, including a sampled stop token; may be empty on a finish event."""
    at_ns: int
    logprobs: tuple[TokenLogprobs, ...] = ()  # empty, or as long as `token_ids`
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    detail: str = ""  # for ABORT, ERROR and REJECTED: the cause, for the user
    reject_reason: str = ""
    """Why it ended, as a `RejectReason` value. Empty if it ended by itself, was cancelled, or failed for another cause."""
    states: bytes = b""  # `StepResult.states` of a text
