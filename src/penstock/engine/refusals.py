"""Refusals: what is told of a request that the core never saw, as the engine takes no more. Made by `loop`; tells nobody."""

from __future__ import annotations

from penstock.engine.ports import OutputChunk
from penstock.types.errors import RejectReason
from penstock.types.request import FinishReason, Request
from penstock.types.stats import RequestStats

SHUTTING_DOWN = "the server is shutting down"


def refused_chunk(request: Request, reason: RejectReason, now_ns: int) -> OutputChunk:
    """The one chunk that the client gets."""
    chunk = OutputChunk(request.request_id, "", (), (), now_ns)
    chunk.finish_reason, chunk.reject_reason = FinishReason.REJECTED, reason.value
    chunk.detail = SHUTTING_DOWN if reason is RejectReason.DRAINING else "the engine is not running"
    return chunk


def refused_stats(request: Request, reason: RejectReason, now_ns: int) -> RequestStats:
    """What observers hear of it."""
    return RequestStats(
        request_id=request.request_id,
        tenant=request.tenant,
        arrival_ns=request.arrival_ns,
        first_scheduled_ns=None,
        first_token_ns=None,
        ended_ns=now_ns,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=0,
        num_generated_tokens=0,
        num_preemptions=0,
        finish_reason=FinishReason.REJECTED,
        reject_reason=reason.value,
    )
