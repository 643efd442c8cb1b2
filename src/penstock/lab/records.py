"""The end of each request of a workload, as its client or the simulator saw it. Figures are made of these alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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
    gaps_ns: Sequence[int] = ()
    """Times between one event with text and the next; a server may put several tokens into one event. Often an `array("q")`,
    which takes 8 bytes for each."""
    queue_ns: int | None = None
    """Time in the server's queue, where the server tells it (`Server-Timing`)."""
    end: End = End.OK
    http_status: int = 0
    """0 without one: in process, or no answer."""
    error: str = ""
    tenant: str = ""
    waits_ns: Sequence[int] = ()
    """For how long the server told the client to wait, each time that it was refused and came back; `sent_ns` is the last."""
    text: str = ""
    """The answer, where somebody needs it: the next turn of a conversation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """The outcome of sending a workload once."""

    records: list[Record]
    """In the order of their jobs, without those of the warm-up."""
    duration_ns: int
    """From the first request to the last byte, warm-up included."""
    client_cpu_s: float = 0.0
    """CPU time of the thread that sent and received; 0 in process, where it is the model's, too."""
    num_warm_up: int = 0
    unfinished: list[Record] = field(default_factory=list)
    """Requests under way when the run was interrupted or its time was over, as far as they had come: cancelled ones."""
    num_unsent: int = 0
    """Jobs that were not sent yet at that time."""
    notes: tuple[str, ...] = ()
    """Sentences on what a reader of the figures must know."""
