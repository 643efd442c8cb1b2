"""The tier below the pool: block contents in a file or in host memory. The engine's `Transfers` moves the bytes.

Before a block is re-used, its content is spilled to a slot under its hash. If the tier has more of the first waiting request's
prefix, that is loaded, verified, and placed into free blocks like any cached prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import BlockTable
from penstock.kv.eviction import BACKGROUND, EvictionPolicy, group_of
from penstock.kv.prefix_cache import PrefixCache, PrefixHit, PrefixIndex
from penstock.types.request import Request

LOAD_TIMEOUT_NS = 2_000_000_000
"""Longest wait of a request for its loads. After it the tier counts as slow."""


@dataclass(frozen=True, slots=True)
class Spill:
    """An ordered copy of a block's content to a slot. It must be done before the block is written again."""

    block_id: int
    slot: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Load:
    slot: int
    block_hash: bytes
    group: Hashable = None
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class _Wait:
    num_hit_blocks: int
    """Blocks of the request's prefix in the pool when its last load began. -1: none has begun."""
    until_ns: int


class Tier:
    """Slots for block contents, and orders to copy contents to and from the pool. The engine takes the orders and reports their
    ends."""

    def __init__(self, num_slots: int, *, max_load_blocks: int = 64, entries: Iterable[tuple[int, bytes]] = ()) -> None:
        """`entries`: (slot, hash) of contents from an earlier process, oldest first."""
        self.slots = SlotIndex(num_slots)
        self.slots.restore(entries)
        self.is_open = True
        self.load_ns_per_block = 0.0
        self._declined: dict[str, int] = {}
        """Waiting request -> number of its blocks in the tier that take longer to load than to compute."""
        self._num_declined = 0
        self._may_probe = False
        """A closed tier may take one block, to see whether writing works."""
        self._max_load_blocks = max_load_blocks
        self._spills: list[Spill] = []
        self._loads: list[list[Load]] = []
        self._waits: dict[str, _Wait] = {}

    # For the manager.

    def spill(self, block_ids: Iterable[int], index: PrefixIndex) -> None:
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
        """Return whether the request should wait for blocks of its prefix. Orders a load if that is faster than computing.

        `chain`: hashes of the request's blocks after the first `num_hit_blocks`, which the pool has.
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
            num_found, found = len(found), found[: min(max_blocks, self._max_load_blocks)]
            if not found:
                return False
            if not self._is_cheap(compute_ns_per_block):
                self._declined[request_id] = num_found
                return False
            self._declined.pop(request_id, None)
            self._loads.append([Load(self.slots.begin_read(name), name, group, request_id) for name in found])
        elif not is_busy or not self._is_cheap(compute_ns_per_block):
            return False
        if wait is None or found:
            until_ns = wait.until_ns if wait else now_ns + LOAD_TIMEOUT_NS
            self._waits[request_id] = _Wait(num_hit_blocks if found else -1, until_ns)
        return True

    def _next_of(self, chain: Sequence[bytes], index: PrefixIndex) -> tuple[list[bytes], bool]:
        """Return the loadable hashes at the beginning of `chain`, and whether the next one is being moved now."""
        found: list[bytes] = []
        for block_hash in chain:
            if block_hash in index:
                continue
            if not self.slots.is_present(block_hash):
                return found, block_hash in self.slots
            found.append(block_hash)
        return found, False

    def _is_cheap(self, compute_ns_per_block: float) -> bool:
        if compute_ns_per_block and self.load_ns_per_block > compute_ns_per_block:
            self.load_ns_per_block *= 0.98  # decays, so that a load is tried again some day
            return False
        return True

    def is_awaited_by(self, request_id: str, now_ns: int) -> bool:
        wait = self._waits.get(request_id)
        return wait is not None and now_ns < wait.until_ns

    def end_wait(self, request_id: str, *, computes: bool = False) -> None:
        """`computes`: the request begins, and computes what it did not load."""
        self._waits.pop(request_id, None)
        num_declined = self._declined.pop(request_id, 0)
        self._num_declined += num_declined * computes

    def next_timeout_ns(self, now_ns: int) -> int | None:
        return min((wait.until_ns for wait in self._waits.values() if wait.until_ns > now_ns), default=None)

    # For the engine's `Transfers`, which carries content.

    def take_num_declined(self) -> int:
        """Return how many more blocks are computed though the tier has them, because loading takes longer."""
        num, self._num_declined = self._num_declined, 0
        return num

    def take_spills(self) -> list[Spill]:
        spills, self._spills = self._spills, []
        return spills

    def take_loads(self) -> list[list[Load]]:
        """Return the ordered loads, once each, as one list per request."""
        loads, self._loads = self._loads, []
        return loads

    def spilled(self, block_hash: bytes, *, is_sound: bool) -> None:
        """Note that a spill ended. `is_sound`: it succeeded."""
        self.slots.end(block_hash, is_sound=is_sound)

    def postpone(self, loads: Sequence[Load]) -> None:
        """Cancel loads that can't begin now. Their requests may order them again."""
        for load in loads:
            self.slots.end(load.block_hash, is_sound=True)
            wait = self._waits.get(load.request_id)
            if wait is not None:
                self._waits[load.request_id] = _Wait(-1, wait.until_ns)

    def loaded(self, block_hash: bytes, *, is_sound: bool, duration_ns: int = 0) -> bool:
        """Note that a block's load ended. Return whether the content may be used."""
        self.slots.end(block_hash, is_sound=is_sound)
        if is_sound and duration_ns:
            before = self.load_ns_per_block or duration_ns
            self.load_ns_per_block = 0.875 * before + 0.125 * duration_ns
        return block_hash in self.slots

    def close(self) -> None:
        """Stop using the tier until it is opened. Copies under way may still end."""
        self.is_open = self._may_probe = False
        self._waits.clear()

    def probe(self) -> None:
        self._may_probe = not self.is_open

    def open(self) -> None:
        self.is_open, self._may_probe = True, False


class Swapping:
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
        self._tier, self._pool, self._prefix, self._index = tier, pool, prefix, prefix.index
        self._tables, self._eviction, self._take, self._block_size = tables, eviction, take, block_size

    def fetch(self, request: Request, hit: PrefixHit, *, max_blocks: int, compute_ns_per_token: float, now_ns: int) -> bool:
        """Return whether a request should wait for the tier to load more of its prefix.

        Orders a load of at most `max_blocks` if that is faster than computing (`compute_ns_per_token` 0: unknown).
        """
        num_hit_blocks = len(hit.block_ids)
        waits = self._tier.fetch(
            request.request_id,
            self._tables[request.request_id].hashes[num_hit_blocks : (request.num_tokens - 1) // self._block_size],
            self._index,
            num_hit_blocks=num_hit_blocks,
            group=group_of(self._eviction, request),
            max_blocks=max_blocks,
            compute_ns_per_block=compute_ns_per_token * self._block_size,
            now_ns=now_ns,
        )
        if waits:  # its cached blocks must not be evicted to make room for the rest
            self._touch(hit.held)
        return waits

    def _touch(self, block_ids: Sequence[int]) -> None:
        """Mark the free blocks among these as just used; later ones are evicted first."""
        pool = self._pool
        for block_id in reversed(block_ids):
            if pool.ref_count(block_id) == 0:
                pool.hold(block_id)
                pool.release(block_id, keep=True, group=BACKGROUND)

    def place(self, loads: Sequence[Load]) -> list[tuple[Load, int]]:
        """Allocate blocks for contents that arrived for one request, and publish them. Return (load, block id) pairs.

        The caller must write the contents before anything else, after the spills that made room. Content that is already in the
        pool, or finds no free block, is skipped.
        """
        if not loads:
            return []
        pool, index, table = self._pool, self._index, self._tables.get(loads[0].request_id)
        found = self._prefix.find(table, len(table.hashes)) if table is not None else []
        held = [block_id for block_id in found if block_id and pool.ref_count(block_id) == 0]
        for block_id in held:
            pool.hold(block_id)
        placed: list[tuple[Load, int]] = []
        for load in reversed(loads):
            if load.block_hash in index or not pool.num_available:
                continue
            (block_id,) = self._take(1)
            index.publish_named(block_id, load.block_hash)
            placed.append((load, block_id))
        for load, block_id in placed:
            pool.release(block_id, keep=True, group=load.group)
        for block_id in reversed(held):
            pool.release(block_id, keep=True, group=BACKGROUND)
        return placed

    def content_to_keep(self) -> list[int]:
        """Return free blocks whose content is worth a slot and not in the tier, last used first within a group. Empty without
        prefix caching."""
        if not self._prefix.is_shared:
            return []
        pool, slots = self._pool, self._tier.slots
        kept = [block_id for block_id in pool.free_block_ids() if pool.is_kept(block_id)]
        cached = [block_id for block_id in kept if pool.group_of(block_id) is not BACKGROUND]
        missing: list[int] = []
        num_there = 0
        for block_id in reversed(cached):
            block_hash = self._index.hash_of(block_id)
            if block_hash is None:  # a tail is never spilled
                continue
            if block_hash in slots:
                num_there += 1
                slots.touch(block_hash)
            else:
                missing.append(block_id)
        return missing[: max(0, slots.num_slots - num_there)]

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Remove an ended request's contents from pool and tier, since no other request may use them."""
        pool, index = self._pool, self._index
        for block_hash in hashes:
            self._tier.slots.forget(block_hash)
            block_id = index.block_of(block_hash)
            if block_id is not None and pool.ref_count(block_id) == 0:
                pool.hold(block_id)
                index.forget((block_id,))
                pool.release(block_id, keep=False)


class SlotIndex:
    """The tier's slots [0, num_slots): each is free or has the content of one hash."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a tier needs at least one slot, not {num_slots}")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._present: OrderedDict[bytes, int] = OrderedDict()
        """Hash -> slot, least recently used first."""
        self._busy: dict[bytes, int] = {}
        """Hash -> slot that is being written or read."""
        self._doomed: set[bytes] = set()
        """Busy content to forget when it is idle."""

    def __len__(self) -> int:
        return len(self._present)

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._present or block_hash in self._busy

    def is_present(self, block_hash: bytes) -> bool:
        """Return whether a slot has the content, and is neither being written nor read."""
        return block_hash in self._present

    def restore(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Record contents from an earlier process, least recently used first. If two slots have one hash, the later wins."""
        for slot, block_hash in entries:
            self._present.pop(block_hash, None)
            self._present[block_hash] = slot
        used = set(self._present.values())
        self._free = [slot for slot in range(self.num_slots - 1, -1, -1) if slot not in used]

    def begin_write(self, block_hash: bytes) -> int | None:
        """Return a slot for new content. Return None if the content is already in a slot, or all slots are busy."""
        if block_hash in self:
            self.touch(block_hash)
            return None
        if self._free:
            slot = self._free.pop()
        elif self._present:
            _, slot = self._present.popitem(last=False)
        else:
            return None
        self._busy[block_hash] = slot
        return slot

    def begin_read(self, block_hash: bytes) -> int:
        slot = self._busy[block_hash] = self._present.pop(block_hash)
        return slot

    def end(self, block_hash: bytes, *, is_sound: bool) -> None:
        """Note that a slot's write or read ended. Damaged content is forgotten."""
        slot = self._busy.pop(block_hash)
        if is_sound and block_hash not in self._doomed:
            self._present[block_hash] = slot
            return
        self._doomed.discard(block_hash)
        self._free.append(slot)

    def touch(self, block_hash: bytes) -> None:
        if block_hash in self._present:
            self._present.move_to_end(block_hash)

    def forget(self, block_hash: bytes) -> None:
        """Forget content that no request will need again. Unknown hashes are ignored."""
        if block_hash in self._present:
            self._free.append(self._present.pop(block_hash))
        elif block_hash in self._busy:
            self._doomed.add(block_hash)

    def check(self) -> None:
        """Raise AssertionError unless each slot is free, present or busy, with at most one hash."""
        slots = [*self._present.values(), *self._busy.values(), *self._free]
        assert sorted(slots) == list(range(self.num_slots)), "a slot was lost, or is in two states"
        assert not self._present.keys() & self._busy.keys(), "two slots have one hash"
        assert self._doomed <= self._busy.keys(), "what is doomed is not busy"
