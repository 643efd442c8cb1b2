"""How long one request spent where. Made by the server from a finish chunk; never reads a clock."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimings:
    """The instants of one request, on one clock. [0, queue) [queue, prefill) [prefill, end): half-open, without gaps."""

    arrival_ns: int
    first_scheduled_ns: int | None
    """None if no step ever ran it: all its time was queueing."""
    first_token_ns: int | None
    """None if it ended before its first token: the rest of its time was prefill."""
    ended_ns: int

    @property
    def queue_ms(self) -> float:
        return (self._prefill_start_ns - self.arrival_ns) / 1e6

    @property
    def prefill_ms(self) -> float:
        return (self._decode_start_ns - self._prefill_start_ns) / 1e6

    @property
    def decode_ms(self) -> float:
        return (self.ended_ns - self._decode_start_ns) / 1e6

    def server_timing(self) -> str:
        """The value of a `Server-Timing` header, durations in ms (https://www.w3.org/TR/server-timing/)."""
        return f"{self.server_timing_so_far()}, decode;dur={self.decode_ms:.3f}"

    def server_timing_so_far(self) -> str:
        """The same when the first token is there, and the end is not known."""
        return f"queue;dur={self.queue_ms:.3f}, prefill;dur={self.prefill_ms:.3f}"

    @property
    def _prefill_start_ns(self) -> int:
        return self.ended_ns if self.first_scheduled_ns is None else self.first_scheduled_ns

    @property
    def _decode_start_ns(self) -> int:
        return self.ended_ns if self.first_token_ns is None else self.first_token_ns
