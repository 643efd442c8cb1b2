"""The tier below the pool: owns what is spilled to slots and loaded from them. Used by `KVManager`, and by the engine's
`Transfers`, which carries content to and fro; integers and hashes only, no I/O, no clock.

One rule serves preempted requests, prefixes that were evicted and sessions that return. Every block with content in the pool
has a name, the hash of its prefix. When such a block is about to be used for something else, its content is spilled under
that name. When the first of the waiting requests could be admitted and the tier continues its prefix, that is loaded:

    pool     A B C - - -        the request waits, while steps of others run
    tier         C D E -        D and E are read into memory beside the pool
    pool     A B C D E -        arrived and verified, they are placed into free blocks like any cached prefix

So no plan is made on content that has not arrived, and no block of the pool is held for it. Content that does not arrive sound,
or not in time, is forgotten and computed again. Content that was loaded stays in the tier, too, and need not be written twice.

A slot is one block's content in a file, or in other memory. While it is written or read nothing else happens to it; of all
others, the least recently used one is given to the next content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.eviction import EvictionPolicy
from penstock.kv.prefix_cache import PrefixCache, PrefixHit, PrefixIndex
from penstock.types.request import Request

LOAD_TIMEOUT_NS = 2_000_000_000
"""A request waits so long for its loads before it is admitted; if one is under way then, the tier is taken for slow."""
OLD_COST_WEIGHT = 0.875
"""Weight of the cost of earlier loads, when another one was measured."""
FORGIVING = 0.98
"""The remembered cost is multiplied by this with each load that it prevents: some day one is tried again."""


@dataclass(frozen=True, slots=True)
class Spill:
    """Content of a block on its way to a slot. It must be copied before anything else is written to the block."""

    block_id: int
    slot: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Content on its way from a slot to memory beside the pool."""

    slot: int
    block_hash: bytes
    group: Hashable = None
    """The group of cached blocks that it will join (`eviction.py`)."""
    request_id: str = ""
    """The request that waits for it."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """The loads that a request waits for."""

    num_hit_blocks: int
    """Blocks of its prefix in the pool when its last load began; -1: none has begun."""
    until_ns: int
    """End of the wait: set by the first load and kept by those that follow."""


class Tier:
    """Slots, and what is on its way. Moves are ordered here, taken by `take_spills` and `take_loads`, and told back."""

    def __init__(self, num_slots: int, *, max_load_blocks: int = 64, entries: Iterable[tuple[int, bytes]] = ()) -> None:
        """`entries`: (slot, hash) of content from an earlier time, the oldest first.

        `max_load_blocks` bounds one load; a longer prefix comes in several.
        """
        self.slots = SlotIndex(num_slots)
        self.slots.restore(entries)
        self.is_open = True
        """Nothing is spilled to, and loaded from, a closed one; but see `probe`."""
        self.load_ns_per_block = 0.0
        """Measured; 0 before the first."""
        self._may_probe = False
        """A closed one takes a single block, to see whether it gets there."""
        self._max_load_blocks = max_load_blocks
        self._spills: list[Spill] = []
        self._loads: list[list[Load]] = []
        self._waits: dict[str, _Wait] = {}
        """By request id."""

    # For the manager.

    def spill(self, block_ids: Iterable[int], index: PrefixIndex) -> None:
        """These blocks are about to be used for other content."""
        if not (self.is_open or self._may_probe):
            return
        for block_id in block_ids:
            block_hash = index.hash_of(block_id)
            if block_hash is None:
                continue
            slot = self.slots.begin_write(block_hash)
            if slot is not None:
                self._spills.append(Spill(block_id, slot, block_hash))
                if not self.is_open:
                    self._may_probe = False
                    return

    def fetch(
        self,
        request_id: str,
        chain: Sequence[bytes],
        index: PrefixIndex,
        *,
        num_hit_blocks: int,
        group: Hashable,
        max_blocks: int,
        compute_ns_per_block: float,
        now_ns: int,
    ) -> bool:
        """True if the request should wait, since blocks of its prefix are on their way; begins a load if that pays.

        `chain`: hashes of what it would have to compute, after `num_hit_blocks` that the pool has. A load is not tried
        again unless the one before has made the hit longer. `compute_ns_per_block` 0: not measured yet.
        """
        if not self.is_open:
            return False
        wait = self._waits.get(request_id)
        found, is_busy = self._next_of(chain, index)
        if wait is not None and now_ns >= wait.until_ns:
            if is_busy:
                self.load_ns_per_block = max(self.load_ns_per_block, float(LOAD_TIMEOUT_NS))
            return False
        if found:
            if wait is not None and num_hit_blocks <= wait.num_hit_blocks:
                return False
            found = found[: min(max_blocks, self._max_load_blocks)]
            if not found or not self._is_cheap(compute_ns_per_block):
                return False
            self._loads.append([Load(self.slots.begin_read(name), name, group, request_id) for name in found])
        elif not is_busy or not self._is_cheap(compute_ns_per_block):
            return False
        if wait is None or found:
            until_ns = wait.until_ns if wait else now_ns + LOAD_TIMEOUT_NS
            self._waits[request_id] = _Wait(num_hit_blocks if found else -1, until_ns)
        return True

    def _next_of(self, chain: Sequence[bytes], index: PrefixIndex) -> tuple[list[bytes], bool]:
        """Hashes of the chain's beginning that can be loaded; if none: whether that is because the first is being moved now."""
        found: list[bytes] = []
        for block_hash in chain:
            if block_hash in index:
                continue
            state = self.slots.state(block_hash)
            if state is not SlotState.PRESENT:
                return found, state is not None
            found.append(block_hash)
        return found, False

    def _is_cheap(self, compute_ns_per_block: float) -> bool:
        if compute_ns_per_block and self.load_ns_per_block > compute_ns_per_block:
            self.load_ns_per_block *= FORGIVING
            return False
        return True

    def is_awaited_by(self, request_id: str, now_ns: int) -> bool:
        """The request was told to wait, is not admitted since, and has not waited for too long."""
        wait = self._waits.get(request_id)
        return wait is not None and now_ns < wait.until_ns

    def end_wait(self, request_id: str) -> None:
        """The request is admitted, or has ended."""
        self._waits.pop(request_id, None)

    def next_timeout_ns(self, now_ns: int) -> int | None:
        """When the next waiting request gives up; None if none will."""
        return min((wait.until_ns for wait in self._waits.values() if wait.until_ns > now_ns), default=None)

    # For the engine's `Transfers`, which carries content.

    def take_spills(self) -> list[Spill]:
        """The spills that were ordered, to be done now; each is returned once."""
        spills, self._spills = self._spills, []
        return spills

    def take_loads(self) -> list[list[Load]]:
        """The loads that were ordered, one list for each request, in the order of its prefix; each is returned once."""
        loads, self._loads = self._loads, []
        return loads

    def spilled(self, block_hash: bytes, *, is_sound: bool) -> None:
        """A spill has ended: its content can be loaded from now on, or is lost."""
        self.slots.end(block_hash, is_sound=is_sound)

    def postpone(self, loads: Sequence[Load]) -> None:
        """These can't be begun now. The requests that wait for them may order them again."""
        for load in loads:
            self.slots.end(load.block_hash, is_sound=True)
            wait = self._waits.get(load.request_id)
            if wait is not None:
                self._waits[load.request_id] = _Wait(-1, wait.until_ns)

    def loaded(self, block_hash: bytes, *, is_sound: bool, duration_ns: int = 0) -> bool:
        """A load of one block has ended. It took `duration_ns`; 0: not measured. False if its content is of no use."""
        self.slots.end(block_hash, is_sound=is_sound)
        if is_sound and duration_ns:
            before = self.load_ns_per_block or duration_ns
            self.load_ns_per_block = OLD_COST_WEIGHT * before + (1 - OLD_COST_WEIGHT) * duration_ns
        return self.slots.state(block_hash) is not None

    def close(self) -> None:
        """The tier can't be trusted now: until it is opened, all is as if there were none. Moves on their way may still end."""
        self.is_open = self._may_probe = False
        self._waits.clear()

    def probe(self) -> None:
        """Let a closed tier take the next block that is spilled, one only."""
        self._may_probe = not self.is_open

    def open(self) -> None:
        """The block of the probe got there: the tier is used again, with what it had."""
        self.is_open, self._may_probe = True, False

    def check(self) -> None:
        """Verify the laws of the slots. Raises AssertionError. O(slots)."""
        self.slots.check()


class Swapping:
    """Moves between one pool and one tier: which part of a prefix is loaded, where it goes, which content is worth keeping."""

    def __init__(
        self,
        tier: Tier,
        pool: BlockPool,
        prefix: PrefixCache,
        tables: Mapping[str, BlockTable],
        eviction: EvictionPolicy,
        take: Callable[[int], list[int]],
        block_size: int,
    ) -> None:
        """`take` gives out so many blocks of the pool."""
        self._tier, self._pool, self._prefix, self._index = tier, pool, prefix, prefix.index
        self._tables, self._eviction, self._take, self._block_size = tables, eviction, take, block_size

    def fetch(self, request: Request, hit: PrefixHit, *, max_blocks: int, compute_ns_per_token: float, now_ns: int) -> bool:
        """Should a request that could be admitted with this hit rather wait, since the tier brings more of its prefix?

        Begins to load at most `max_blocks`, if there is more and that takes less time than to compute it (0: not known).
        """
        num_hit_blocks = len(hit.block_ids)
        waits = self._tier.fetch(
            request.request_id,
            self._tables[request.request_id].hashes[num_hit_blocks : (request.num_tokens - 1) // self._block_size],
            self._index,
            num_hit_blocks=num_hit_blocks,
            group=self._eviction.group_of(request),
            max_blocks=max_blocks,
            compute_ns_per_block=compute_ns_per_token * self._block_size,
            now_ns=now_ns,
        )
        if waits:  # what is there already must not be the first to make place for the rest
            self._touch(hit.held)
        return waits

    def _touch(self, block_ids: Sequence[int]) -> None:
        """Free blocks among these are used again after all other free ones, the later sooner than the earlier."""
        pool = self._pool
        for block_id in reversed(block_ids):
            if pool.ref_count(block_id) == 0:
                group = pool.group_of(block_id)
                pool.hold(block_id)
                pool.release(block_id, keep=True, group=group)

    def place(self, loads: Sequence[Load]) -> list[tuple[Load, int]]:
        """Find free blocks for what arrived for one request, in the order of its prefix, and name them by it: (load, block id).

        It must be written there before anything else happens, and before that what had to make place must be spilled. There
        is no block for content that is here already, or when none is free.

        The last go first, since what is released later is evicted later. All are held until the last is placed, and so is what
        the request finds in the pool: else its own would be taken for its own, if its group is the next to lose a block.
        """
        if not loads:
            return []
        pool, index, table = self._pool, self._index, self._tables.get(loads[0].request_id)
        found = self._prefix.find(table, len(table.hashes)) if table is not None else []
        held = [(block_id, pool.group_of(block_id)) for block_id in found if block_id and pool.ref_count(block_id) == 0]
        for block_id, _ in held:
            pool.hold(block_id)
        placed: list[tuple[Load, int]] = []
        for load in reversed(loads):
            if load.block_hash in index or not pool.num_available:
                continue
            (block_id,) = self._take(1)
            index.publish_named(block_id, load.block_hash)
            placed.append((load, block_id))
        for block_id, group in [(block_id, load.group) for load, block_id in placed] + held[::-1]:
            pool.release(block_id, keep=True, group=group)
        return placed

    def content_to_keep(self) -> list[int]:
        """Free blocks whose content the tier lacks, of each group the last used first; as many as the tier has place for.

        None if requests share nothing: content is then of no use to others.
        """
        if not self._prefix.is_shared:
            return []
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
        """Forget content that a request computed for itself alone, here and below: after its end nobody can use it."""
        pool, index = self._pool, self._index
        for block_hash in hashes:
            self._tier.slots.forget(block_hash)
            block_id = index.block_of(block_hash)
            if block_id is not None and pool.ref_count(block_id) == 0:
                pool.hold(block_id)
                index.forget((block_id,))
                pool.release(block_id, keep=False)


class SlotState(IntEnum):
    WRITING = 0
    """Ordered; it can't be read yet."""
    PRESENT = 1
    READING = 2


class SlotIndex:
    """`num_slots` slots with numbers [0, num_slots), each free or with the content of one hash."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[bytes, int] = {}
        self._present: OrderedDict[bytes, None] = OrderedDict()
        """Content that may be overwritten, the least recently used first."""
        self._busy: dict[bytes, SlotState] = {}
        self._doomed: set[bytes] = set()
        """Busy content, to be forgotten as soon as it is not."""

    def __len__(self) -> int:
        """Contents that can be read now."""
        return len(self._present)

    def state(self, block_hash: bytes) -> SlotState | None:
        """None: it is not here."""
        if block_hash in self._present:
            return SlotState.PRESENT
        return self._busy.get(block_hash)

    def restore(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Take over what the slots hold from an earlier time, the least recently used first. Call before anything else.

        If two slots have one hash, the later stays.
        """
        for slot, block_hash in entries:
            if block_hash in self._slots:
                self.forget(block_hash)
            self._slots[block_hash] = slot
            self._present[block_hash] = None
        used = set(self._slots.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def begin_write(self, block_hash: bytes) -> int | None:
        """A slot for new content; None if it is here already, or all slots are busy."""
        if block_hash in self._slots:
            self.touch(block_hash)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._present:
            oldest, _ = self._present.popitem(last=False)
            slot = self._slots.pop(oldest)
        else:
            return None
        self._slots[block_hash] = slot
        self._busy[block_hash] = SlotState.WRITING
        return slot

    def begin_read(self, block_hash: bytes) -> int:
        """The slot of content that is present. Raises KeyError for any other."""
        del self._present[block_hash]
        self._busy[block_hash] = SlotState.READING
        return self._slots[block_hash]

    def end(self, block_hash: bytes, *, is_sound: bool) -> None:
        """The write or read that began is over; content that is not sound is forgotten. Raises KeyError if none was begun."""
        del self._busy[block_hash]
        if is_sound and block_hash not in self._doomed:
            self._present[block_hash] = None
            return
        self._doomed.discard(block_hash)
        self._free.append(self._slots.pop(block_hash))

    def touch(self, block_hash: bytes) -> None:
        """This content was used: others are overwritten before it."""
        if block_hash in self._present:
            self._present.move_to_end(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Nobody will ask for it again. Unknown ones are ignored."""
        if block_hash in self._present:
            del self._present[block_hash]
            self._free.append(self._slots.pop(block_hash))
        elif block_hash in self._busy:
            self._doomed.add(block_hash)

    def check(self) -> None:
        """Each slot is free, present or busy, and has one hash at most. Raises AssertionError. O(slots)."""
        used = list(self._slots.values())
        assert len(set(used)) == len(used), "two hashes have one slot"
        assert sorted([*used, *self._free]) == list(range(self.num_slots)), "a slot was lost, or is free and used"
        assert self._slots.keys() == self._present.keys() | self._busy.keys(), "a slot is in no state"
        assert not self._present.keys() & self._busy.keys(), "a slot is in two states"
        assert self._doomed <= self._busy.keys(), "what is doomed is not busy"
