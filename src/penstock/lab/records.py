"""How each request of a workload ended, as its client or the simulator saw it. Figures are made of these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    """The client went away, as the workload wanted it."""
    REFUSED = "refused"
    """The server would not take it now: 429 or 503."""
    FAILED = "failed"
    """Anything else: another status, a broken stream, an error event, too few tokens."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Instants are nanoseconds from the begin of the run. Nobody writes to a finished one."""

    index: int
    intended_ns: int
    """When it was due. Latencies count from here, so that a client that falls behind does not hide it."""
    sent_ns: int
    """When its first byte left."""
    first_ns: int | None = None
    ended_ns: int = 0
    """When its last byte came, or the failure was seen."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    gaps_ns: Sequence[int] = ()
    """Times between events with text, which may have several tokens. Often an `array("q")`, to save memory."""
    queue_ns: int | None = None
    end: End = End.OK
    http_status: int = 0
    """0 in process, or without an answer."""
    error: str = ""
    tenant: str = ""
    waits_ns: Sequence[int] = ()
    """The wait after each refusal that the client came back from; `sent_ns` is the last sending."""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    records: list[Record]
    duration_ns: int
    """From the first request to the last byte, warm-up included."""
    client_cpu_s: float = 0.0
    """CPU time of the thread that sent and received; 0 in process, where the model shares it."""
    num_warm_up: int = 0
    unfinished: list[Record] = field(default_factory=list)
    num_unsent: int = 0
    notes: tuple[str, ...] = ()
