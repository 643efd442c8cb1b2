"""Hits that prefix caches could have if requests came one after another: an infinite cache, LRU, and Belady's
optimum, which knows the future (Belady, IBM Systems Journal 5(2), 1966). Called by `prefix_cache.py`; needs no server.

A request is a list of block names. A name stands for the whole prefix that ends with its block. A block is a hit only if all
earlier blocks of its prompt are hits. All blocks of a request are in the cache while it is served, so a cache must hold the
longest request.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Collection, Sequence
from itertools import takewhile

Blocks = Sequence[int]
"""The blocks of one request, in order; each at most once."""


def num_found(blocks: Blocks, cached: Collection[int]) -> int:
    return sum(1 for _ in takewhile(cached.__contains__, blocks))


def infinite(requests: Sequence[Blocks]) -> int:
    """Blocks found by a cache that never loses any."""
    seen: set[int] = set()
    found = 0
    for blocks in requests:
        found += num_found(blocks, seen)
        seen.update(blocks)
    return found


def least_recently_used(requests: Sequence[Blocks], num_blocks: int) -> int:
    """Blocks found under LRU eviction; within a prompt, its last blocks go first."""
    cached: OrderedDict[int, None] = OrderedDict()
    found = 0
    for blocks in requests:
        _check_room(blocks, num_blocks)
        num_known = num_found(blocks, cached)
        found += num_known
        for block in blocks:
            cached.pop(block, None)
        for _ in range(len(cached) + len(blocks) - num_blocks):
            cached.popitem(last=False)
        cached.update((block, None) for block in reversed(blocks))
    return found


def belady(requests: Sequence[Blocks], num_blocks: int) -> int:
    """Blocks found when the block needed again last is evicted first, among equals the deepest: no cache finds more.

    A prefix is needed no later than its continuations, so no block outlives its prefix.
    """
    next_uses = _next_uses(requests)
    cached: dict[int, float] = {}
    farthest: list[tuple[float, int, int]] = []
    """(minus the next use, minus the depth, block), also of blocks that have gone or were used since."""
    found = 0
    for idx, blocks in enumerate(requests):
        _check_room(blocks, num_blocks)
        found += num_found(blocks, cached)
        for block in blocks:
            cached.pop(block, None)
        while len(cached) + len(blocks) > num_blocks:
            next_use, _, block = heapq.heappop(farthest)
            if cached.get(block) == -next_use:
                del cached[block]
        for depth, (block, next_use) in enumerate(zip(blocks, next_uses[idx], strict=True)):
            cached[block] = next_use
            heapq.heappush(farthest, (-next_use, -depth, block))
    return found


def _next_uses(requests: Sequence[Blocks]) -> list[list[float]]:
    """For each block of each request, the index of the next request that has it; infinity if there is none."""
    last_seen: dict[int, float] = {}
    uses: list[list[float]] = []
    for idx in range(len(requests) - 1, -1, -1):
        uses.append([last_seen.get(block, math.inf) for block in requests[idx]])
        last_seen.update((block, idx) for block in requests[idx])
    return uses[::-1]


def _check_room(blocks: Blocks, num_blocks: int) -> None:
    if len(blocks) > num_blocks:
        raise ValueError(f"a request of {len(blocks)} blocks can't be served from {num_blocks}")
