"""A map of the KV pool: each block's state and owner.

The caller must hold the engine's lock (`engine/core_lock.py`), so that the pool does not change meanwhile.
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
    CACHED = "cached"
    """In the free list, with content that a prefix hit or a request with the adapter can reuse."""
    HELD = "held"
    SHARED = "shared"
    """Held by several requests, or on its way from or to another replica."""
    ADAPTER = "adapter"
    NULL = "null"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of neighbouring blocks with the same state and owner."""

    state: BlockState
    num_blocks: int
    owner: int | None = None


@dataclass(frozen=True, slots=True)
class BlockOwner:
    request_id: str
    num_blocks: int
    num_tokens: int
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class PoolMap:
    block_size: int
    num_blocks: int
    states: Mapping[BlockState, int]
    runs: Sequence[Run]
    owners: Sequence[BlockOwner]
    waste: float


def draw(manager: KVManager, running: Iterable[Request]) -> PoolMap:
    requests, fenced = list(running), manager.fenced
    tables = [*(manager.tables[request.request_id] for request in requests), *(table for _, table in fenced)]
    holdings = [(*table.block_ids, *table.state_block_ids) for table in tables]
    ref_counts, cached = manager.pool.snapshot()
    # By block: its state, or the index of its only owner.
    codes: list[BlockState | int] = [BlockState.FREE] * manager.pool.num_blocks
    for block_id in cached:
        codes[block_id] = BlockState.CACHED
    for block_id in manager.exchange.held:
        codes[block_id] = BlockState.SHARED
    for idx, block_ids in enumerate(holdings):
        for block_id in block_ids:
            codes[block_id] = idx if ref_counts[block_id] < 2 else BlockState.SHARED
    for resident in manager.adapters.residents.values():
        if resident.num_pins:
            for block_id in resident.block_ids:
                codes[block_id] = BlockState.ADAPTER
    codes[NULL_BLOCK_ID] = BlockState.NULL
    runs = [_run(code, len(list(same))) for code, same in groupby(codes)]
    states: Counter[BlockState] = Counter(dict.fromkeys(BlockState, 0))
    for run in runs:
        states[run.state] += run.num_blocks
    owners = [
        BlockOwner(
            request.request_id, manager.num_held_blocks(request.request_id), request.num_tokens, request.num_computed_tokens
        )
        for request in requests
    ]
    owners += [BlockOwner(request_id, len(table.held) + len(table.state_block_ids), 0, 0) for request_id, table in fenced]
    waste = waste_ratio(manager, requests)
    return PoolMap(manager.block_size, manager.pool.num_blocks, states, runs, owners, waste)


def waste_ratio(manager: KVManager, running: Iterable[Request]) -> float:
    """Return the share of token positions in held blocks that are empty. Tokens of the running step count as present.
    O(requests)."""
    size = manager.block_size
    filled: dict[int, int] = {}
    """Block id -> tokens, by the holder that has filled it most."""
    for request in running:
        num_tokens = request.num_computed_tokens + request.num_inflight_tokens
        block_ids = manager.block_table(request.request_id)
        for idx in range(num_tokens // size, len(block_ids)):
            num_filled = max(0, num_tokens - idx * size)
            filled[block_ids[idx]] = max(filled.get(block_ids[idx], 0), num_filled)
    num_held = manager.num_total_blocks - manager.pool.num_available - manager.adapters.num_pinned_blocks
    num_empty = sum(size - num_filled for num_filled in filled.values())
    return min(1.0, num_empty / (num_held * size)) if num_held else 0.0


def _run(code: BlockState | int, num_blocks: int) -> Run:
    return Run(code, num_blocks) if isinstance(code, BlockState) else Run(BlockState.HELD, num_blocks, code)
