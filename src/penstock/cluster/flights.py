"""The front's state of each replica and of each unfinished request. Used only on the fleet's thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.cluster.link import Link
from penstock.engine.core import request_stats
from penstock.engine.ports import OutputChunk
from penstock.obs.explain.explanation import Route
from penstock.sched import progress
from penstock.types.errors import RejectReason
from penstock.types.request import FinishReason, Request
from penstock.types.stats import EngineLoad, RequestStats

PROGRESS = 16
"""A request that has gained this many tokens since its last loss counts its losses from 0 again."""
SUSPECT_AFTER = 2
"""After this many failures of replicas in a row, a request is a suspect. A replica gets one suspect at a time, so that another
failure blames the cause and not the requests beside it."""


@dataclass(slots=True, eq=False)
class ReplicaEnd:
    """The front's end of a connection: to a replica, or to a peer that has not identified itself yet."""

    link: Link
    since_ns: int
    nonce: bytes
    heard_ns: int = 0
    name: str = ""
    """Empty until the replica has identified itself."""
    number: int = -1
    load: EngineLoad = field(default_factory=EngineLoad)
    blocks_port: int = 0
    """Port at which the replica serves KV blocks to other replicas, or 0."""
    num_copied_tokens: int = 0
    is_ready: bool = False
    """Its engine takes requests: it neither drains nor restarts."""
    flights: dict[str, Flight] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    """Ids of requests that moved to another replica, until this replica confirms their end."""
    suspects: Sequence[Flight] = ()
    """The last suspect that it was sent: one request, or the choices of one prompt."""

    @property
    def has_suspect(self) -> bool:
        return any(flight.replica is self and flight.is_suspect for flight in self.suspects)


@dataclass(slots=True, eq=False)
class Flight:
    """An unfinished request, as the front tracks it."""

    request: Request
    replica: ReplicaEnd | None = None
    """None while waiting for a replica."""
    since_ns: int = 0
    """When the wait for a replica began; 0 while the request has one."""
    abort_detail: str | None = None
    """Why its replica was asked to abort it, or None."""
    failed_at: list[str] = field(default_factory=list)
    """Names of the replicas that failed with the request, or refused it, in a row (see `PROGRESS`)."""
    num_tokens_at_loss: int = 0
    """Generated tokens at the last of these losses."""
    last_loss: str = ""
    """Cause of the last loss, for error messages."""
    num_failures: int = 0
    """How many of these failed while they had the request, which may be the cause. The others only refused it."""
    last_token_ns: int = 0
    route: Route | None = None
    """Its replica and the earlier ones, for explanations. None until it was sent."""
    stats: RequestStats | None = None
    """Final stats that the replica reported."""
    num_gaps: int = 0
    num_late: int = 0

    @property
    def has_adapter(self) -> bool:
        """Whether the front has read its adapter, or it needs none."""
        adapter = self.request.adapter
        return adapter is None or bool(adapter.fingerprint)

    @property
    def has_progressed(self) -> bool:
        return len(self.request.output_token_ids) - self.num_tokens_at_loss >= PROGRESS

    @property
    def is_suspect(self) -> bool:
        """Whether the request may be what replicas fail with (see `SUSPECT_AFTER`)."""
        return self.num_failures >= SUSPECT_AFTER and not self.has_progressed

    def count_loss(self, name: str, why: str, *, is_refusal: bool = False) -> None:
        if self.has_progressed:
            self.failed_at.clear()
            self.num_failures = 0
        self.failed_at.append(name)
        self.num_failures += not is_refusal
        self.num_tokens_at_loss, self.last_loss = len(self.request.output_token_ids), why

    def note(self, chunk: OutputChunk) -> int | None:
        """Record a chunk's progress. Return the time since the previous tokens, or None for the first tokens or without any."""
        request = self.request
        progress.follow(request, chunk.token_ids, chunk.first_scheduled_ns, chunk.first_token_ns, chunk.num_cached_tokens)
        gap_ns = None
        if chunk.token_ids or chunk.states:
            if self.last_token_ns:
                gap_ns = chunk.at_ns - self.last_token_ns
                if request.slo_itl_ns is not None and not request.background:
                    self.num_gaps += 1
                    self.num_late += gap_ns > request.slo_itl_ns
            self.last_token_ns = chunk.at_ns
        if chunk.finish_reason is not None:
            progress.end(request, chunk.finish_reason, chunk.stop_reason)
        return gap_ns

    def stats_at(self, chunk: OutputChunk) -> RequestStats:
        """Return the final stats by the front's clock. `chunk` is the request's last one."""
        stats, own = self.stats, request_stats(self.request, chunk.at_ns, chunk.reject_reason)
        if stats is None:  # the request ended before the replica's engine accepted it
            return own
        return replace(own, num_generated_tokens=stats.num_generated_tokens, num_preemptions=stats.num_preemptions)

    def end_at(self, now_ns: int, reason: FinishReason, detail: str, because: RejectReason | None) -> OutputChunk:
        """Mark the request as ended by the front. Return its last chunk."""
        request = self.request
        progress.end(request, reason)
        num_tokens = len(request.output_token_ids)
        chunk = OutputChunk(request.request_id, "", (), (), now_ns, request.num_cached_tokens, num_tokens)
        chunk.finish_reason, chunk.detail = reason, detail
        chunk.reject_reason = "" if because is None else because.value
        chunk.first_scheduled_ns, chunk.first_token_ns = request.first_scheduled_ns, request.first_token_ns
        return chunk


@dataclass(slots=True)
class News:
    """A replica's report, sorted: chunks to deliver, and what to tell observers."""

    chunks: list[OutputChunk] = field(default_factory=list)
    first: list[Flight] = field(default_factory=list)
    """Requests with their first tokens."""
    gaps_ns: list[int] = field(default_factory=list)
    """Times between later tokens."""
    ended: list[tuple[OutputChunk, Flight]] = field(default_factory=list)


def shift_times(target: Any, shift_ns: int, names: Iterable[str]) -> None:
    """Convert these time fields from another machine's clock, by adding `shift_ns`. None stays None."""
    for name in names:
        at_ns = getattr(target, name)
        if at_ns is not None:
            setattr(target, name, at_ns + shift_ns)
