"""A picture of the pool: the state of each block, and its owner. Drawing it changes nothing.

The thread that draws must have the books of the engine (`engine/books.py`), so that nothing changes the pool meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from penstock.kv.block_pool import NULL_BLOCK_ID
from penstock.kv.manager import KVManager
from penstock.types.request import Request


class BlockState(StrEnum):
    FREE = "free"
    """Held by no request, and without content to reuse."""
    CACHED = "cached"
    """Held by no request, with content that a prefix hit, or a request with the adapter that lies there, may revive."""
    HELD = "held"
    """Held by one request."""
    SHARED = "shared"
    """Held by several requests."""
    ADAPTER = "adapter"
    """Holds an adapter that requests with blocks have."""
    NULL = "null"
    """Block 0, which padding may be written to."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of one state and, if held, of one owner."""

    state: BlockState
    num_blocks: int
    owner: int | None = None
    """Index among the owners."""


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """A request with blocks."""

    request_id: str
    num_blocks: int
    """Shared ones included."""
    num_tokens: int
    """0 of one that has ended, and whose blocks are held until its last step is collected."""
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PoolMap:
    block_size: int
    num_blocks: int
    """The null block included: the sum over the states."""
    states: Mapping[BlockState, int]
    runs: Sequence[Run]
    """In the order of block ids."""
    owners: Sequence[BlockOwner]
    """In the order of admission, then those that have ended."""
    waste: float
    """As `waste_ratio` says."""


_FREE, _CACHED, _SHARED, _ADAPTER, _NULL = range(5)
_STATES = {
    _FREE: BlockState.FREE,
    _CACHED: BlockState.CACHED,
    _SHARED: BlockState.SHARED,
    _ADAPTER: BlockState.ADAPTER,
    _NULL: BlockState.NULL,
}
_FIRST_OWNER = len(_STATES)


def draw(manager: KVManager, running: Iterable[Request]) -> PoolMap:
    """The pool as it is now. O(blocks)."""
    requests, fenced = list(running), manager.fenced
    holdings = [manager.block_table(request.request_id) for request in requests]
    holdings += [tuple(table.block_ids) for _, table in fenced]
    ref_counts, is_kept = manager.pool.snapshot()
    codes = list(is_kept)  # 0 and 1: free and cached
    for idx, block_ids in enumerate(holdings, start=_FIRST_OWNER):
        for block_id in block_ids:
            codes[block_id] = idx if ref_counts[block_id] < 2 else _SHARED
    for resident in manager.adapters.residents.values():
        if resident.num_pins:
            for block_id in resident.block_ids:
                codes[block_id] = _ADAPTER
    codes[NULL_BLOCK_ID] = _NULL
    runs = [_run(code, len(list(same))) for code, same in groupby(codes)]
    states: Counter[BlockState] = Counter(dict.fromkeys(BlockState, 0))
    for run in runs:
        states[run.state] += run.num_blocks
    owners = [
        BlockOwner(
            request.request_id,
            manager.num_held_blocks(request.request_id),
            request.num_tokens,
            request.num_computed_tokens,
        )
        for request in requests
    ]
    owners += [BlockOwner(request_id, len(table.held), 0, 0) for request_id, table in fenced]
    waste = waste_ratio(manager, requests)
    return PoolMap(manager.block_size, manager.pool.num_blocks, states, runs, owners, waste)


def waste_ratio(manager: KVManager, running: Iterable[Request]) -> float:
    """The share of positions in held blocks that have no token, nor get one in the step that runs.

    O(requests). Only the last blocks of a request can have such positions; one that others hold, too, counts once.
    """
    size = manager.block_size
    filled: dict[int, int] = {}
    """Tokens in each block that is not full, as seen by the holder with the most."""
    for request in running:
        num_tokens = request.num_computed_tokens + request.num_inflight_tokens
        block_ids = manager.block_table(request.request_id)
        for idx in range(num_tokens // size, len(block_ids)):
            num_filled = max(0, num_tokens - idx * size)
            filled[block_ids[idx]] = max(filled.get(block_ids[idx], 0), num_filled)
    num_held = manager.num_total_blocks - manager.pool.num_available - manager.adapters.num_pinned_blocks
    num_empty = sum(size - num_filled for num_filled in filled.values())
    return min(1.0, num_empty / (num_held * size)) if num_held else 0.0


def _run(code: int, num_blocks: int) -> Run:
    state = _STATES.get(code)
    return Run(BlockState.HELD, num_blocks, code - _FIRST_OWNER) if state is None else Run(state, num_blocks)
