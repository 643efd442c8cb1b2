"""The tier below the pool: owns what is spilled to slots and loaded from them. Called by `KVManager`, and by whoever carries
content to and fro (`engine/transfers.py`); integers and hashes only, no I/O, no clock.

One rule serves preempted requests, prefixes that were evicted and sessions that return. Whatever has content in the pool has
a name, the hash of its prefix. When such a block is about to be used for something else, its content is spilled under
that name. When the first of those who wait could be admitted and the tier continues its prefix, that is loaded:

    pool     A B C - - -        the request waits, while steps of others run
    tier         C D E -        D and E are read into memory beside the pool
    pool     A B C D E -        arrived and verified, they are placed into free blocks like any cached prefix

So no plan is made on content that has not arrived, and no block of the pool is held for it. What does not arrive sound, or not
in time, is forgotten and computed again. What was loaded stays in the tier, too, and need not be written a second time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from penstock.kv.prefix_index import PrefixIndex
from penstock.kv.slot_index import SlotIndex, SlotState

LOAD_TIMEOUT_NS = 2_000_000_000
"""For so long a request waits for its loads before it is admitted; if one is under way then, the tier is taken for slow."""
OLD_COST_WEIGHT = 0.875
"""Of what loads cost before, when another one was measured."""
FORGIVING = 0.98
"""By so much the cost that is remembered shrinks with each load that is not begun for it: some day one is tried again."""


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
    """On whose account it will be cached (`eviction.py`)."""
    request_id: str = ""
    """Who waits for it."""


@dataclass(frozen=True, slots=True)
class _Wait:
    """What a request waits for."""

    num_hit_blocks: int
    """That it had found in the pool when its last load began; -1: none has."""
    until_ns: int
    """Set by the first load and kept by those that follow."""


class Tier:
    """Slots, and what is on its way. Moves are ordered here, taken by `take_spills` and `take_loads`, and told back."""

    def __init__(self, num_slots: int, *, max_load_blocks: int = 64, entries: Iterable[tuple[int, bytes]] = ()) -> None:
        """`entries`: (slot, hash) of what is there from an earlier time, the oldest first.

        `max_load_blocks`: of one load; a longer prefix comes in several.
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
        """What can be loaded of the chain's beginning; and whether, if nothing, that is since its first is being moved now."""
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
        """When the next of those who wait gives up; None if nobody will."""
        return min((wait.until_ns for wait in self._waits.values() if wait.until_ns > now_ns), default=None)

    # For whoever carries content.

    def take_spills(self) -> list[Spill]:
        """Those that were ordered, to be done now; each is returned once."""
        spills, self._spills = self._spills, []
        return spills

    def take_loads(self) -> list[list[Load]]:
        """Those that were ordered, one list for each request, in the order of its prefix; each is returned once."""
        loads, self._loads = self._loads, []
        return loads

    def spilled(self, block_hash: bytes, *, is_sound: bool) -> None:
        """A spill has ended: its content can be loaded from now on, or is lost."""
        self.slots.end(block_hash, is_sound=is_sound)

    def postpone(self, loads: Sequence[Load]) -> None:
        """These can't be begun now. Whoever waits may order them again."""
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
        """The tier can't be trusted now: until it is opened, all is as if there were none. What is on its way may still end."""
        self.is_open = self._may_probe = False
        self._waits.clear()

    def probe(self) -> None:
        """Let a closed tier take the next block that is spilled, one only."""
        self._may_probe = not self.is_open

    def open(self) -> None:
        """That one got there: the tier is used again, with what it had."""
        self.is_open, self._may_probe = True, False

    def check(self) -> None:
        """Verify the laws of the slots. Raises AssertionError. O(slots)."""
        self.slots.check()
