"""Blocks whose contents are copied to another pool, or come from one, while steps run.

They are held, so that nobody else takes them meanwhile. A running request that lacks them is preempted, and goes on later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from penstock.kv.block_pool import BlockPool
from penstock.kv.prefix_cache import PrefixIndex


@dataclass(frozen=True, slots=True)
class Room:
    """Held blocks for contents that come."""

    found: Sequence[int]
    """Blocks of the prefix that are there already."""
    block_ids: Sequence[int]
    """To be filled: the blocks of the prefix that follow."""


class Exchange:
    def __init__(self, pool: BlockPool, index: PrefixIndex, take: Callable[[int], list[int]]) -> None:
        self.held: Counter[int] = Counter()
        """Block -> how often it is held here."""
        self._pool, self._index, self._take = pool, index, take

    def offer(self, hashes: Iterable[bytes]) -> list[int]:
        """Hold the blocks of a prefix that are there, without a gap. Give them back with `release`."""
        block_ids = self._index.lookup(hashes)
        for block_id in block_ids:
            self._pool.hold(block_id)
        self.held.update(block_ids)
        return block_ids

    def make_room(self, hashes: Sequence[bytes]) -> Room:
        """Hold what is there of a prefix, and blocks for the rest: at most half of those that nobody holds."""
        found = self.offer(hashes)
        block_ids = self._take(min(len(hashes) - len(found), self._pool.num_available // 2))
        self.held.update(block_ids)
        return Room(found, block_ids)

    def publish(
        self, room: Room, hashes: Sequence[bytes], contents: Sequence[bytes], num_filled: int, *, parent: bytes, group: Hashable
    ) -> None:
        """Add the first `num_filled` blocks of a room to the prefix cache, and give all back.

        `hashes`, `contents`: of the whole prefix, as `extend_chain` returns them; `parent`: the hash before. A content that
        came by another way meanwhile is left out.
        """
        first = len(room.found)
        filled = slice(first, first + num_filled)
        before = hashes[first - 1] if first else parent
        self._index.publish(room.block_ids[:num_filled], before, hashes[filled], contents[filled])
        self.release([*room.found, *room.block_ids], group)

    def release(self, block_ids: Sequence[int], group: Hashable = None) -> None:
        published = self._index.block_ids
        for block_id in reversed(block_ids):  # the first last: it is part of the most prefixes
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]
            self._pool.release(block_id, keep=block_id in published, group=group)
