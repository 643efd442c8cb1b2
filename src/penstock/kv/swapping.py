"""Swapping: owns what the pool does for the tier below it: what of a prefix is loaded, where it goes, what is worth keeping.
Called by `KVManager`; moves no bytes, and never decides who waits.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from penstock.kv.block_pool import BlockPool
from penstock.kv.prefix_hit import PrefixHit
from penstock.kv.prefix_index import PrefixIndex
from penstock.kv.tiers import Load, Tier
from penstock.types.request import Request


class Swapping:
    """Between one pool and one tier."""

    def __init__(self, tier: Tier, pool: BlockPool, index: PrefixIndex, block_size: int) -> None:
        """`index`: of what is in the pool."""
        self._tier = tier
        self._pool = pool
        self._index = index
        self._block_size = block_size

    @property
    def load_ns_per_token(self) -> float | None:
        """To bring a token of a full block back, as measured; 0: not yet; None: the tier does not work."""
        return self._tier.load_ns_per_block / self._block_size if self._tier.is_open else None

    def fetch(
        self,
        request: Request,
        hit: PrefixHit,
        hashes: Sequence[bytes],
        group: Hashable,
        max_blocks: int,
        compute_ns_per_token: float,
        now_ns: int,
    ) -> bool:
        """See `KVManager.fetch`. `hashes`: of the request's blocks; `group`: on whose account they will be cached."""
        num_hit_blocks = len(hit.block_ids)
        waits = self._tier.fetch(
            request.request_id,
            hashes[num_hit_blocks : (request.num_tokens - 1) // self._block_size],
            self._index,
            num_hit_blocks=num_hit_blocks,
            group=group,
            max_blocks=max_blocks,
            compute_ns_per_block=compute_ns_per_token * self._block_size,
            now_ns=now_ns,
        )
        if waits:  # what is there already must not be the first to make place for the rest
            self._touch(hit.block_ids)
        return waits

    def _touch(self, block_ids: Sequence[int]) -> None:
        """Free blocks among these are used again after all other free ones, the later sooner than the earlier."""
        pool = self._pool
        for block_id in reversed(block_ids):
            if pool.ref_count(block_id) == 0:
                group = pool.group_of(block_id)
                pool.hold(block_id)
                pool.release(block_id, keep=True, group=group)

    def place(
        self,
        loads: Sequence[Load],
        hashes: Sequence[bytes],
        take: Callable[[int], list[int]],
    ) -> list[tuple[Load, int]]:
        """See `KVManager.place`. Free blocks come from `take`; `hashes`: of the request's prefix, to find what is in the pool.

        The last go first, since what is released later is evicted later. All are held until the last is placed, and so is what
        the request finds in the pool: else its own would be taken for its own, if its group is the next to lose a block.
        """
        pool, index = self._pool, self._index
        found = index.lookup(hashes)
        held = [(block_id, pool.group_of(block_id)) for block_id in found if pool.ref_count(block_id) == 0]
        for block_id, _ in held:
            pool.hold(block_id)
        placed: list[tuple[Load, int]] = []
        for load in reversed(loads):
            if load.block_hash in index or not pool.num_available:
                continue
            (block_id,) = take(1)
            index.publish_named(block_id, load.block_hash)
            placed.append((load, block_id))
        for block_id, group in [(block_id, load.group) for load, block_id in placed] + held[::-1]:
            pool.release(block_id, keep=True, group=group)
        return placed

    def content_to_keep(self) -> list[int]:
        """Free blocks whose content the tier lacks, as many as it has place for beside the others'; of each group the last
        used first."""
        pool, slots = self._pool, self._tier.slots
        cached = [block_id for block_id in pool.free_block_ids() if pool.is_kept(block_id)]
        missing: list[int] = []
        num_there = 0
        for block_id in reversed(cached):
            block_hash = self._index.hash_of(block_id)
            if block_hash is None:  # a tail, which is never spilled
                continue
            if slots.state(block_hash) is None:
                missing.append(block_id)
            else:
                num_there += 1
                slots.touch(block_hash)
        return missing[: max(0, slots.num_slots - num_there)]

    def forget(self, hashes: Sequence[bytes]) -> None:
        """What a request computed for itself alone is of no use to anybody after its end, neither here nor below."""
        pool, index = self._pool, self._index
        for block_hash in hashes:
            self._tier.slots.forget(block_hash)
            block_id = index.block_of(block_hash)
            if block_id is not None and pool.ref_count(block_id) == 0:
                pool.hold(block_id)
                index.forget((block_id,))
                pool.release(block_id, keep=False)
