"""The block pool: free list and reference counts of all KV blocks. The free list is the prefix cache.

`allocate` takes blocks without content first. Then come those that only background requests have held, then the oldest
without a group, and last the oldest of the group that the eviction policy names. Blocks of conversations, and blocks that a
later request found, rest: they count as freed `rest_ns` later.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field

from penstock.kv.eviction import BACKGROUND, EvictionPolicy, LeastRecentlyUsed
from penstock.types.errors import PolicyError

NULL_BLOCK_ID = 0
"""The null block: never allocated. Padding rows write to it."""
MAX_RESTING_SHARE = 0.75
"""Largest share of a group's cached blocks that rest. If all did, new prompts would be evicted before they are found again
(`benchmarks/resting.py`)."""


@dataclass(slots=True)
class _Group:
    """Cached blocks, the least recently freed first."""

    plain: OrderedDict[int, None] = field(default_factory=OrderedDict)
    resting: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.plain) + len(self.resting)


class BlockPool:
    """A pool of KV blocks with ids [0, num_blocks). Block 0 is the null block."""

    def __init__(self, num_blocks: int, eviction: EvictionPolicy | None = None) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and at least one more, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_shared = 0
        self.num_repeats = 0
        """References to shared blocks, all but one of each."""
        self.now_ns = 0
        """Time of the step being planned; set by the scheduler."""
        self._ref_counts = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, NULL_BLOCK_ID, -1))
        """Free blocks without content. The last one is allocated next."""
        self._eviction = eviction or LeastRecentlyUsed()
        self._freed_ns = [0] * num_blocks
        self._rests = bytearray(num_blocks)
        """1 for a block that rests whenever it is cached, until its content is lost."""
        self._last_group: list[Hashable] = [BACKGROUND] * num_blocks
        """The last group other than `BACKGROUND` with which each block was released, until its content is lost."""
        self._groups: dict[Hashable, _Group] = {None: _Group()}
        """The groups that have blocks, and None: the blocks without a group."""
        self._group_of: dict[int, Hashable] = {}
        """Block id -> group, for every free block with content."""

    @property
    def num_available(self) -> int:
        """Free blocks, with and without content."""
        return len(self._empty) + len(self._group_of)

    @property
    def num_cached(self) -> int:
        """Free blocks with content."""
        return len(self._group_of)

    def ref_count(self, block_id: int) -> int:
        return self._ref_counts[block_id]

    def is_kept(self, block_id: int) -> bool:
        return block_id in self._group_of

    def snapshot(self) -> tuple[list[int], set[int]]:
        """Return copies of (reference counts by block id, ids of free blocks with cached content)."""
        return self._ref_counts.copy(), set(self._group_of)

    def free_block_ids(self) -> list[int]:
        """Return the ids of free blocks: first those without content, then group by group. O(free blocks)."""
        cached = [block_id for group in self._groups.values() for block_id in (*group.plain, *group.resting)]
        return self._empty[::-1] + cached

    def groups(self) -> dict[Hashable, list[int]]:
        return {name: [*group.plain, *group.resting] for name, group in self._groups.items() if name is not None}

    def group_size(self, name: Hashable) -> int:
        return len(self._groups.get(name, ()))

    def group_of(self, block_id: int) -> Hashable:
        return self._group_of.get(block_id)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, each with one reference: blocks without content, then the oldest of the groups.

        Raises ValueError, and takes nothing, if fewer are available.
        """
        if count > self.num_available:
            raise ValueError(f"{count} blocks asked for, {self.num_available} available")
        taken = [self._empty.pop() if self._empty else self._evict() for _ in range(count)]
        for block_id in taken:
            self._ref_counts[block_id] = 1
            self._rests[block_id] = False
            self._last_group[block_id] = BACKGROUND
        return taken

    def hold(self, block_id: int, *, rests: bool = False) -> None:
        """Add a reference to a block that has content, and take it out of the cached ones if it is free. `rests` as in
        `release`."""
        if block_id == NULL_BLOCK_ID:
            raise ValueError("the null block can't be held")
        if self._ref_counts[block_id] == 0:
            self._leave(block_id)
        self._rests[block_id] |= rests
        self._ref_counts[block_id] += 1
        self.num_shared += self._ref_counts[block_id] == 2
        self.num_repeats += self._ref_counts[block_id] >= 2

    def release(self, block_id: int, *, keep: bool, group: Hashable = None, rests: bool = False) -> None:
        """Drop a reference to a block. After the last one it is cached in `group`, or in the group that it had if `group` is
        `BACKGROUND`. `keep`: its content stays cached.

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
            self.num_repeats -= 1
        elif keep:
            self._join(self._last_group[block_id], block_id)
        else:
            self._empty.append(block_id)

    def _evict(self) -> int:
        """Take the oldest cached block: of background requests, else without a group, else of the group that the policy
        chooses."""
        name: Hashable = BACKGROUND if BACKGROUND in self._groups else None
        group = self._groups[name]
        if not group.plain and not group.resting:
            name = self._eviction.choose()
            if name is None or name not in self._groups:
                # Only simple values: the repr of a request would put its prompt into the log.
                shown = repr(name)[:200] if isinstance(name, int | str | None) else f"something of type {type(name).__name__}"
                what = f"returned {shown} from choose, but must return a group that has blocks"
                raise PolicyError("eviction", self._eviction, what)
            group = self._groups[name]
        cached = group.resting if group.resting and self._is_rest_over(group) else group.plain
        block_id, _ = cached.popitem(last=False)
        del self._group_of[block_id]
        if name is not None:
            self._resized(name, group)
        return block_id

    def _is_rest_over(self, group: _Group) -> bool:
        """Return whether the oldest block that rests is lost before the oldest other one."""
        if not group.plain:
            return True
        plain, resting = next(iter(group.plain)), next(iter(group.resting))
        rest_ns = self._eviction.rest_ns if len(group.resting) <= MAX_RESTING_SHARE * len(group) else 0
        return self._freed_ns[resting] + rest_ns < self._freed_ns[plain]

    def _join(self, name: Hashable, block_id: int) -> None:
        self._freed_ns[block_id] = self.now_ns
        self._group_of[block_id] = name
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group()
        (group.resting if self._rests[block_id] else group.plain)[block_id] = None
        if name is not None:
            self._resized(name, group)

    def _leave(self, block_id: int) -> None:
        name = self._group_of.pop(block_id)
        group = self._groups[name]
        del (group.resting if self._rests[block_id] else group.plain)[block_id]
        if name is not None:
            self._resized(name, group)

    def _resized(self, name: Hashable, group: _Group) -> None:
        if name is not BACKGROUND:
            self._eviction.resized(name, len(group))
        if not group.plain and not group.resting:
            del self._groups[name]
