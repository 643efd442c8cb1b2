"""Records of how each request of a workload ended, written by the client or the simulator. `figures` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class End(StrEnum):
    OK = "ok"
    CANCELLED = "cancelled"
    """The client left before the end, as the workload asked."""
    REFUSED = "refused"
    """The server refused for now: status 429 or 503."""
    FAILED = "failed"
    """Any other failure: another status, a broken stream, an error event, too few tokens."""


@dataclass(slots=True, kw_only=True)
class Record:
    """Times, token counts and outcome of one request. Instants are nanoseconds from the start of the run."""

    index: int
    intended_ns: int
    """When the request was due. Latencies count from then, so they include the delay of a slow client."""
    sent_ns: int
    """When the first byte was sent, for the first time if the request was sent again after refusals."""
    first_ns: int | None = None
    ended_ns: int = 0
    """When the last byte arrived, or the failure was noticed."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache. None if the server does not report them."""
    num_output_tokens: int = 0
    gaps_ns: Sequence[int] = ()
    """Times between events with text. An event can have several tokens. Often an `array("q")`, to save memory."""
    queue_ns: int | None = None
    end: End = End.OK
    http_status: int = 0
    """0 for a model in this process, or without an answer."""
    error: str = ""
    tenant: str = ""
    text: str = ""

    @classmethod
    def lost(cls, index: int, at_ns: int, tenant: str) -> Record:
        """Return the record of a turn that is not sent, because the one before it failed."""
        lost = cls(index=index, intended_ns=at_ns, sent_ns=at_ns, ended_ns=at_ns, tenant=tenant, end=End.FAILED)
        lost.error = "The turn before it had no answer."
        return lost


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    records: list[Record]
    duration_ns: int
    """Time from the first request to the last byte, with warm-up."""
    client_cpu_s: float = 0.0
    """CPU time of the client's thread. 0 for a model in this process."""
    num_warm_up: int = 0
    unfinished: list[Record] = field(default_factory=list)
    num_unsent: int = 0
    notes: tuple[str, ...] = ()
