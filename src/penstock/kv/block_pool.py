"""The block pool: owns the free list and the reference counts of all KV blocks. Called by `KVManager` alone; never knows
requests or tokens.

The free list *is* the prefix cache. A block that is given back with content worth keeping goes to the
tail and keeps that content until the head of the list reaches it; one without goes to the head and is
re-used first. So the order of the list is the eviction policy: least recently freed first.

    head -> [no content ...] -> [oldest content ... newest content] <- tail

The list is intrusive: two arrays of neighbours, indexed by block id. Taking a block out of the
middle (a prefix hit revives it) is therefore O(1), and nothing is allocated per operation.
"""

from __future__ import annotations

from collections.abc import Iterator

NULL_BLOCK_ID = 0
"""Belongs to nobody and is never given out; padding may be written to it."""


class BlockPool:
    """`num_blocks` blocks with ids [0, num_blocks), of which block 0 is the null block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_available = num_blocks - 1
        """Blocks in the free list, with and without content."""
        self.num_cached = 0
        """Blocks in the free list whose content was kept."""
        self._ref_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        # The null block's entries are the list's two ends: next[0] is the head, prev[0] the tail.
        self._next = [*range(1, num_blocks), NULL_BLOCK_ID]
        self._prev = [num_blocks - 1, *range(num_blocks - 1)]

    def ref_count(self, block_id: int) -> int:
        """How many tables hold the block; 0 if it is in the free list."""
        return self._ref_counts[block_id]

    def is_kept(self, block_id: int) -> bool:
        """True for a block in the free list whose content was kept."""
        return bool(self._is_kept[block_id])

    def free_block_ids(self) -> Iterator[int]:
        """The free list, the next to be re-used first. O(length); for checks."""
        block_id = self._next[NULL_BLOCK_ID]
        while block_id != NULL_BLOCK_ID:
            yield block_id
            block_id = self._next[block_id]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks from the head, each with one reference. Their old content is lost.

        Raises ValueError, and takes nothing, if fewer are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        taken: list[int] = []
        block_id = self._next[NULL_BLOCK_ID]
        for _ in range(count):
            taken.append(block_id)
            self._ref_counts[block_id] = 1
            self.num_cached -= self._is_kept[block_id]
            self._is_kept[block_id] = False
            block_id = self._next[block_id]
        self._next[NULL_BLOCK_ID] = block_id
        self._prev[block_id] = NULL_BLOCK_ID
        self.num_available -= count
        return taken

    def hold(self, block_id: int) -> None:
        """Add a reference; revives the block from the free list if it lies there."""
        if block_id == NULL_BLOCK_ID:
            raise ValueError("the null block can't be held")
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._ref_counts[block_id] += 1

    def release(self, block_id: int, *, keep: bool) -> None:
        """Drop a reference; with the last one the block joins the free list, its content kept or not.

        Raises ValueError if nobody holds it.
        """
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"block {block_id} was freed twice")
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return
        before = self._prev[NULL_BLOCK_ID] if keep else NULL_BLOCK_ID
        after = self._next[before]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self._is_kept[block_id] = keep
        self.num_available += 1
        self.num_cached += keep

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_available -= 1
        self.num_cached -= self._is_kept[block_id]
        self._is_kept[block_id] = False
