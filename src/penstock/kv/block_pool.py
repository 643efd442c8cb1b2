"""The block pool: free list and reference counts of all KV blocks. The free list is the prefix cache.

A freed block joins the tail of the list if its content stays cached, else the head. Cached blocks of an eviction group have a
list of their own. `allocate` takes blocks without content first, then those that only background requests have held, then the
oldest without a group, then the oldest of the group that the eviction policy names. Blocks of conversations, and blocks that a
later request found, rest: they count as freed `rest_ns` later.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from penstock.kv.eviction import BACKGROUND, EvictionPolicy, LeastRecentlyUsed
from penstock.types.errors import PolicyError

NULL_BLOCK_ID = 0
"""The null block: never allocated. Padding rows write to it."""
MAX_RESTING_SHARE = 0.75
"""Largest share of a group's cached blocks that rest. If all did, new prompts would be evicted before they are found again
(`benchmarks/resting.py`)."""


@dataclass(slots=True)
class _Group:
    end_idx: int
    rest_idx: int
    num_blocks: int = 0
    num_resting: int = 0


class BlockPool:
    """A pool of KV blocks with ids [0, num_blocks). Block 0 is the null block."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_available = num_blocks - 1
        """Blocks in the free list, with and without content."""
        self.num_cached = 0
        """Blocks in the free list with content."""
        self.num_shared = 0
        self.now_ns = 0
        """Time of the step being planned; set by the scheduler."""
        self._ref_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        # The null block's entries are the list's two ends: next[0] is the head, prev[0] the tail.
        self._next: list[int] = [*range(1, num_blocks), NULL_BLOCK_ID]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]
        self._eviction = eviction or LeastRecentlyUsed()
        self._freed_ns = [0] * num_blocks
        self._rests = bytearray(num_blocks)
        """1 for a block that rests whenever it is cached, until its content is lost."""
        self._last_group: list[Hashable] = [BACKGROUND] * num_blocks
        """The last group other than `BACKGROUND` with which each block was released, until its content is lost."""
        self._spare_ends: list[int] = []
        self._ungrouped = _Group(NULL_BLOCK_ID, self._new_end())
        self._groups: dict[Hashable, _Group] = {}
        self._group_of: dict[int, Hashable] = {}
        """Block id -> group, for blocks in a group's lists."""

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_kept(self, block_id: int) -> bool:
        return bool(self._is_kept[block_id])

    def snapshot(self) -> tuple[list[int], bytes]:
        """Return copies of (reference counts, 1 for each free block with cached content), by block id."""
        return self._ref_counts.copy(), bytes(self._is_kept)

    def free_block_ids(self) -> list[int]:
        """Return the ids of free blocks: first those without a group, next to be re-used first. O(free blocks)."""
        groups = (self._ungrouped, *self._groups.values())
        return [block_id for group in groups for block_id in self._blocks_of(group)]

    def groups(self) -> dict[Hashable, list[int]]:
        return {name: self._blocks_of(group) for name, group in self._groups.items()}

    def group_size(self, name: Hashable) -> int:
        group = self._groups.get(name)
        return group.num_blocks if group else 0

    def group_of(self, block_id: int) -> Hashable:
        return self._group_of.get(block_id)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference: from the head of the free list, then from the groups.

        Raises ValueError, and takes nothing, if fewer are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        is_in_order = not self._ungrouped.num_resting and BACKGROUND not in self._groups
        in_turn = len(self._group_of) if is_in_order else self.num_cached
        num_first = min(count, self.num_available - in_turn)
        taken: list[int] = []
        block_id = self._next[NULL_BLOCK_ID]
        for _ in range(num_first):
            taken.append(block_id)
            self._ref_counts[block_id] = 1
            self.num_cached -= self._is_kept[block_id]
            self._is_kept[block_id] = False
            self._last_group[block_id] = BACKGROUND
            block_id = self._next[block_id]
        self._next[NULL_BLOCK_ID] = block_id
        self._prev[block_id] = NULL_BLOCK_ID
        self.num_available -= num_first
        if num_first < count:
            taken += [self._evict() for _ in range(count - num_first)]
        return taken

    def hold(self, block_id: int, *, rests: bool = False) -> None:
        """Add a reference to a block, and take it out of the free list if it is there. `rests` as in `release`."""
        if block_id == NULL_BLOCK_ID:
            raise ValueError("the null block can't be held")
        if self._ref_counts[block_id] == 0:
            self._unlink(block_id)
        self._rests[block_id] |= rests
        self._ref_counts[block_id] += 1
        self.num_shared += self._ref_counts[block_id] == 2

    def release(self, block_id: int, *, keep: bool, group: Hashable = None, rests: bool = False) -> None:
        """Drop a reference to a block. After the last one it joins the free list of `group`, or of the group that it had if
        `group` is `BACKGROUND`. `keep`: its content stays cached.

        `rests`: the block counts as freed later, until its content is lost. Raises ValueError if the block has no reference.
        """
        if self._ref_counts[block_id] == 0:
            raise ValueError(f"block {block_id} was freed twice")
        self._rests[block_id] |= rests
        if group is not BACKGROUND:
            self._last_group[block_id] = group
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            self.num_shared -= self._ref_counts[block_id] == 1
            return
        before = self._prev[self._join(self._last_group[block_id], block_id)] if keep else NULL_BLOCK_ID
        after = self._next[before]
        self._next[before] = self._prev[after] = block_id
        self._prev[block_id], self._next[block_id] = before, after
        self._is_kept[block_id] = keep
        self._rests[block_id] &= keep
        self.num_available += 1
        self.num_cached += keep

    def _unlink(self, block_id: int) -> None:
        before, after = self._prev[block_id], self._next[block_id]
        self._next[before] = after
        self._prev[after] = before
        self.num_available -= 1
        if self._is_kept[block_id]:
            self.num_cached -= 1
            self._is_kept[block_id] = False
            self._leave(block_id)

    def _blocks_of(self, group: _Group) -> list[int]:
        found, following = [], self._next
        for end_idx in (group.end_idx, group.rest_idx):
            block_id = following[end_idx]
            while block_id != end_idx:
                found.append(block_id)
                block_id = following[block_id]
        return found

    def _evict(self) -> int:
        """Take the oldest cached block: of background requests, else without a group, else of the group that the policy
        chooses."""
        num_ungrouped = self.num_cached - len(self._group_of)
        if (yielding := self._groups.get(BACKGROUND)) is not None:
            block_id = self._oldest(yielding, yielding.num_blocks)
        elif num_ungrouped:
            block_id = self._oldest(self._ungrouped, num_ungrouped)
        else:
            name = self._eviction.choose()
            if name not in self._groups:
                # Only simple values: the repr of a request would put its prompt into the log.
                shown = repr(name)[:200] if isinstance(name, int | str | None) else f"something of type {type(name).__name__}"
                what = f"returned {shown} from choose, but must return a group that has blocks"
                raise PolicyError("eviction", self._eviction, what)
            group = self._groups[name]
            block_id = self._oldest(group, group.num_blocks)
        self._unlink(block_id)
        self._rests[block_id] = False
        self._last_group[block_id] = BACKGROUND
        self._ref_counts[block_id] = 1
        return block_id

    def _oldest(self, group: _Group, num_blocks: int) -> int:
        plain, resting = self._next[group.end_idx], self._next[group.rest_idx]
        if resting == group.rest_idx:
            return plain
        if plain == group.end_idx:
            return resting
        rest_ns = self._eviction.rest_ns if group.num_resting <= MAX_RESTING_SHARE * num_blocks else 0
        return plain if self._freed_ns[plain] <= self._freed_ns[resting] + rest_ns else resting

    def _join(self, name: Hashable, block_id: int) -> int:
        """Count a block as cached in a group. Return the end of the free list to append it to."""
        self._freed_ns[block_id] = self.now_ns
        group = self._ungrouped if name is None else self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(self._new_end(), self._new_end())
        rests = self._rests[block_id]
        group.num_resting += rests
        if name is not None:
            self._group_of[block_id] = name
            group.num_blocks += 1
            self._resized(name, group)
        return group.rest_idx if rests else group.end_idx

    def _resized(self, name: Hashable, group: _Group) -> None:
        if name is not BACKGROUND:
            self._eviction.resized(name, group.num_blocks)

    def _new_end(self) -> int:
        if self._spare_ends:
            return self._spare_ends.pop()
        end_idx = len(self._next)
        self._next.append(end_idx)
        self._prev.append(end_idx)
        return end_idx

    def _leave(self, block_id: int) -> None:
        name = self._group_of.pop(block_id, None)
        group = self._ungrouped if name is None else self._groups[name]
        group.num_resting -= self._rests[block_id]
        if name is None:
            return
        group.num_blocks -= 1
        self._resized(name, group)
        if not group.num_blocks:
            del self._groups[name]
            self._spare_ends += (group.end_idx, group.rest_idx)
