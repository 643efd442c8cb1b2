"""Each replica, and each request that has not ended, as the front follows them. For the fleet's thread alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.cluster.link import Link
from penstock.engine.core import request_stats
from penstock.engine.ports import OutputChunk
from penstock.sched import progress
from penstock.types.errors import RejectReason
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, RequestStats

PROGRESS = 16
"""Losses of a request count together if it got fewer tokens than this between."""


@dataclass(slots=True, eq=False)
class ReplicaEnd:
    """The front's end of a replica, or of a connection that has not said who it is."""

    link: Link
    since_ns: int
    nonce: bytes
    heard_ns: int = 0
    name: str = ""
    """Empty until it has said who it is."""
    number: int = -1
    load: EngineLoad = field(default_factory=EngineLoad)
    blocks_port: int = 0
    """Where it gives KV blocks to others. 0: nowhere."""
    num_copied_tokens: int = 0
    is_ready: bool = False
    """Its engine takes requests: it neither drains nor restarts."""
    flights: dict[str, Flight] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Requests handed over to another replica that this one has not confirmed ending."""


@dataclass(slots=True, eq=False)
class Flight:
    """A request that has not ended, as the front follows it."""

    request: Request
    replica: ReplicaEnd | None = None
    """None while waiting for a replica."""
    since_ns: int = 0
    """Start of that wait; 0 if it has a replica."""
    abort_detail: str | None = None
    """Why its replica was asked to abort it, or None."""
    num_losses: int = 0
    """Consecutive replicas that failed while computing the request (see `PROGRESS`)."""
    num_tokens_then: int = 0
    """Tokens that it had at the last such loss."""
    last_loss: str = ""
    """Its cause, in words."""
    last_token_ns: int = 0
    before: tuple[str, ...] = ()
    """Names of the replicas that it was sent to, one after another."""
    stats: RequestStats | None = None
    """The stats that its replica reported at its end."""
    num_gaps: int = 0
    num_late: int = 0

    @property
    def has_adapter(self) -> bool:
        """Whether the front has read its adapter, or it needs none."""
        adapter = self.request.adapter
        return adapter is None or bool(adapter.fingerprint)

    def count_loss(self, why: str) -> None:
        num_tokens = len(self.request.output_token_ids)
        if num_tokens - self.num_tokens_then >= PROGRESS:
            self.num_losses = 0
        self.num_losses += 1
        self.num_tokens_then, self.last_loss = num_tokens, why

    def note(self, chunk: OutputChunk) -> int | None:
        """Note a chunk's progress. Return the time since the previous tokens, or None for the first ones or none."""
        request = self.request
        progress.follow(request, chunk.token_ids, chunk.first_scheduled_ns, chunk.first_token_ns, chunk.num_cached_tokens)
        gap_ns = None
        if chunk.token_ids or chunk.states:
            if self.last_token_ns:
                gap_ns = chunk.at_ns - self.last_token_ns
                if request.slo_itl_ns is not None:
                    self.num_gaps += 1
                    self.num_late += gap_ns > request.slo_itl_ns
            self.last_token_ns = chunk.at_ns
        if chunk.finish_reason is not None:
            progress.end(request, chunk.finish_reason, chunk.stop_reason)
        return gap_ns

    def stats_at(self, chunk: OutputChunk) -> RequestStats:
        """Return the stats of the request, which ends with this chunk, by the front's clock."""
        stats, own = self.stats, request_stats(self.request, chunk.at_ns, chunk.reject_reason)
        if stats is None:  # it ended before it was in the replica's engine
            return own
        return replace(own, num_generated_tokens=stats.num_generated_tokens, num_preemptions=stats.num_preemptions)

    def end_at(self, now_ns: int, reason: FinishReason, detail: str, because: RejectReason | None) -> OutputChunk:
        """End the request at the front, since no replica does. Return its last chunk."""
        request = self.request
        progress.end(request, reason)
        num_tokens = len(request.output_token_ids)
        chunk = OutputChunk(request.request_id, "", (), (), now_ns, request.num_cached_tokens, num_tokens)
        chunk.finish_reason, chunk.detail = reason, detail
        chunk.reject_reason = "" if because is None else because.value
        chunk.first_scheduled_ns, chunk.first_token_ns = request.first_scheduled_ns, request.first_token_ns
        return chunk


def move_times(target: Any, shift_ns: int, names: Iterable[str]) -> None:
    """Shift fields with a time of another clock, unless they are None."""
    for name in names:
        at_ns = getattr(target, name)
        if at_ns is not None:
            setattr(target, name, at_ns + shift_ns)
