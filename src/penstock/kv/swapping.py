"""Swapping: what the pool does for the tier below it. Called by `KVManager`; owns nothing, and moves no bytes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from penstock.kv.block_pool import BlockPool
from penstock.kv.prefix_index import PrefixIndex
from penstock.kv.tiers import Load, Tier


def place(
    loads: Sequence[Load],
    found: Sequence[int],
    write: Callable[[Load, int], None],
    take: Callable[[int], list[int]],
    pool: BlockPool,
    index: PrefixIndex,
) -> None:
    """Put what arrived for one request into free blocks; `found` are those of its prefix that are in the pool.

    The last go first, since what is released later is evicted later. All are held until the last is placed, and so is what
    the request finds in the pool: else its own would be taken for its own, if its group is the next to lose a block.
    """
    held = [(block_id, pool.group_of(block_id)) for block_id in found if pool.ref_count(block_id) == 0]
    for block_id, _ in held:
        pool.hold(block_id)
    placed: list[tuple[int, Hashable]] = []
    for load in reversed(loads):
        if load.block_hash in index or not pool.num_available:
            continue
        (block_id,) = take(1)
        write(load, block_id)
        index.publish_named(block_id, load.block_hash)
        placed.append((block_id, load.group))
    for block_id, group in placed + held[::-1]:
        pool.release(block_id, keep=True, group=group)


def touch(block_ids: Sequence[int], pool: BlockPool) -> None:
    """Free blocks among these are used again after all other free ones, the later sooner than the earlier."""
    for block_id in reversed(block_ids):
        if pool.ref_count(block_id) == 0:
            group = pool.group_of(block_id)
            pool.hold(block_id)
            pool.release(block_id, keep=True, group=group)


def content_to_keep(tier: Tier, pool: BlockPool, index: PrefixIndex) -> list[int]:
    """Free blocks whose content the tier lacks, as many as it has place for beside the others'; of each group the last
    used first."""
    cached = [block_id for block_id in pool.free_block_ids() if pool.is_kept(block_id)]
    missing: list[int] = []
    for block_id in reversed(cached):
        block_hash = index.hash_of(block_id)
        if block_hash is None:
            continue
        if tier.slots.state(block_hash) is None:
            missing.append(block_id)
        tier.slots.touch(block_hash)
    return missing[: max(0, tier.slots.num_slots - (len(cached) - len(missing)))]


def forget_content(hashes: Sequence[bytes], tier: Tier, pool: BlockPool, index: PrefixIndex) -> None:
    """What a request computed for itself alone is of no use to anybody after its end, neither here nor below."""
    for block_hash in hashes:
        tier.slots.forget(block_hash)
        block_id = index.block_of(block_hash)
        if block_id is not None and pool.ref_count(block_id) == 0:
            pool.hold(block_id)
            index.forget((block_id,))
            pool.release(block_id, keep=False)
