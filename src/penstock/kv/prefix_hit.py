"""The prefix hit: how much of a request's tokens the cache has, and why no more. Found for `KVManager`, read by the scheduler;
owns nothing, and gives out no block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.kv.block_pool import NULL_BLOCK_ID, BlockPool
from penstock.kv.block_table import BlockTable, token_at, token_slice
from penstock.kv.prefix_history import PrefixHistory
from penstock.kv.prefix_index import PrefixIndex, child_key, pack
from penstock.types.request import Request
from penstock.types.stats import PrefixEnd, PrefixStop


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """What the cache has of a request's tokens. Valid until the next block is allocated or released."""

    block_ids: tuple[int, ...]
    """Whole blocks, to be shared."""
    num_tokens: int
    """Positions [0, num_tokens) need not be computed."""
    num_free_blocks: int
    """How many of the blocks lie in the free list: holding them makes as many fewer available."""
    tail_block_id: int = NULL_BLOCK_ID
    """The block to copy if the hit ends inside one."""


NO_HIT = PrefixHit(block_ids=(), num_tokens=0, num_free_blocks=0)


def find(
    request: Request, table: BlockTable, index: PrefixIndex, pool: BlockPool, block_size: int, *, copies_tails: bool
) -> PrefixHit:
    """The longest, one token short of the request at least. Hashes what of it was not hashed yet, into its table."""
    num_blocks = (request.num_tokens - 1) // block_size
    table.hash_blocks(request, num_blocks, block_size)
    found = index.lookup(table.hashes[:num_blocks])
    num_found = len(found)
    tail_id, num_tail = _find_tail(request, table, index, num_found, block_size) if copies_tails else (NULL_BLOCK_ID, 0)
    if not num_found and not num_tail:
        return NO_HIT
    num_free = sum(pool.is_kept(block_id) for block_id in found)
    return PrefixHit(tuple(found), num_found * block_size + num_tail, num_free, tail_id)


def _find_tail(request: Request, table: BlockTable, index: PrefixIndex, num_found: int, block_size: int) -> tuple[int, int]:
    """(block, number of tokens) of what can be copied behind so many whole blocks; (0, 0): nothing."""
    start = num_found * block_size
    stop = min(start + block_size, request.num_tokens - 1)
    if start < stop:
        parent = table.parent(num_found)
        if index.has_child(child_key(parent, token_at(request, start))):
            return index.lookup_child(parent, pack(token_slice(request, start, stop)))
    return NULL_BLOCK_ID, 0


def why_stopped(
    request: Request, hit: PrefixHit, table: BlockTable, index: PrefixIndex, history: PrefixHistory, block_size: int
) -> PrefixStop:
    """Why `find` found no more than this. Once per request, as the history takes note of it."""
    position = hit.num_tokens
    has_other_salt = history.begin(request, block_size)
    if position == request.num_tokens - 1:
        return PrefixStop(PrefixEnd.WHOLE, position)
    idx = len(hit.block_ids)
    evicted_ns = history.evicted_ns(table.hashes[idx]) if idx < len(table.hashes) else None
    if evicted_ns is not None:
        return PrefixStop(PrefixEnd.EVICTED, position, evicted_ns)
    if hit.tail_block_id:
        differs = index.has_more(hit.tail_block_id, position - idx * block_size)
    else:
        differs = position > 0 and index.goes_on(table.parent(idx))
    if differs:
        return PrefixStop(PrefixEnd.DIFFERS, position)
    return PrefixStop(PrefixEnd.SALT if has_other_salt and position == 0 else PrefixEnd.UNSEEN, position)


def num_common(own: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Whole blocks that two chains of hashes begin with alike. O(log blocks)."""
    # Chained: where two hashes are equal, all before them are.
    return bisect_left(range(min(len(own), len(other))), True, key=lambda idx: own[idx] != other[idx])
