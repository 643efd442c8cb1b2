"""The end of each request of a workload, as its client or the simulator saw it. Figures are made of these alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class End(StrEnum):
    """How a request ended."""

    OK = "ok"
    CANCELLED = "cancelled"
    """The client went away, as the workload wanted it."""
    REFUSED = "refused"
    """The server would not take it now: 429 or 503."""
    FAILED = "failed"
    """Anything else: another status, a stream that broke off, an error event, too few tokens."""


@dataclass(slots=True, kw_only=True)
class Record:
    """One request. Instants are nanoseconds from the begin of the run, on one clock. Nobody writes to a finished one."""

    index: int
    """Index of its job in the workload."""
    intended_ns: int
    """When it was due. Latencies count from here, so that a client that falls behind does not hide it."""
    sent_ns: int
    """When its first byte left."""
    first_ns: int | None = None
    """When its first token came."""
    ended_ns: int = 0
    """When its last byte came, or the failure was seen."""
    num_prompt_tokens: int = 0
    """As the server counted them."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    gaps_ns: tuple[int, ...] = ()
    """Times between one event with text and the next; a server may put several tokens into one event."""
    queue_ns: int | None = None
    """Time in the server's queue, where the server tells it (`Server-Timing`)."""
    end: End = End.OK
    http_status: int = 0
    """0 without one: in process, or no answer."""
    error: str = ""
    tenant: str = ""
    text: str = ""
    """The answer, where somebody needs it: the next turn of a conversation."""
