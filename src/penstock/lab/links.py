"""Links between simulated replicas, and copying KV over them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from penstock.kv.block_table import root_hash
from penstock.kv.eviction import group_of
from penstock.kv.exchange import Span
from penstock.lab.virtual_server import VirtualServer
from penstock.sched import progress
from penstock.types.errors import ConfigError
from penstock.types.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    bytes_per_token: int
    bytes_per_s: float
    latency_ns: int = 0

    def __post_init__(self) -> None:
        if self.bytes_per_token < 1 or not self.bytes_per_s > 0 or self.latency_ns < 0:
            raise ConfigError("A link needs at least 1 byte per token, a bandwidth above 0, and a latency of at least 0.")

    def busy_ns(self, num_tokens: int) -> int:
        return round(num_tokens * self.bytes_per_token / self.bytes_per_s * 1e9)


def place_kv(server: VirtualServer, request: Request) -> None:
    """Put the KV of a request's prompt, except the last token's, into a server's prefix cache, if it fits."""
    kv, num_tokens = server.core.scheduler.kv, request.num_prompt_tokens - 1
    bearer = fresh_copy(request, request_id=f"{request.request_id} KV")  # a temporary request that owns the blocks
    hit = kv.lookup_prefix(bearer)
    num_needed = kv.num_blocks_for(num_tokens) - len(hit.block_ids) + hit.num_free_blocks
    if num_needed <= kv.pool.num_available:
        kv.allocate(bearer, hit, num_tokens)
        progress.fork(bearer, num_tokens)
        kv.publish(bearer)
        kv.publish_tail(bearer)
    kv.free(bearer.request_id)


def copy_kv(giver: VirtualServer, taker: VirtualServer, request: Request, num_tokens: int) -> None:
    """Copy KV of a prompt's first tokens from one server's prefix cache to another's, as far as it is cached and fits."""
    kv, offering = taker.core.scheduler.kv, giver.core.scheduler.kv.exchange
    root = root_hash(request.cache_salt, request.adapter)
    span = Span.of(root, request.prompt_token_ids[:num_tokens], kv.block_size, has_tail=True)
    room = kv.exchange.make_room(span)
    offered = offering.offer(span.after(len(room.found)).first(len(room.block_ids)))
    kv.exchange.publish(room, span, len(offered), group=group_of(kv.eviction, request))
    offering.release(offered)


def fresh_copy(request: Request, **changes: Any) -> Request:
    """Return a copy with `changes` and without generated tokens, so that engines do not share the list."""
    return replace(request, output_token_ids=[], **changes)
