"""LoRA adapters in the KV pool, in pages of one block. Part of `KVManager`.

The blocks of an adapter in use are held (the adapter is pinned). Later they lie in the free list, and taking one evicts the
whole adapter. Before a step, or a load from the tier, the executor drops adapters. Then it copies blocks and places adapters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, KeysView, Mapping, Sequence
from dataclasses import dataclass

from penstock.kv.block_pool import BlockPool
from penstock.kv.eviction import BACKGROUND
from penstock.types.adapter import BASE, AdapterPlacement, PackedAdapter
from penstock.types.stats import AdapterCounts


@dataclass(slots=True)
class Resident:
    block_ids: tuple[int, ...]
    num_pins: int = 0
    group: Hashable = BACKGROUND
    """The last group with which it was unpinned, other than `BACKGROUND`."""


class AdapterPages:
    def __init__(self, pool: BlockPool, take: Callable[[int], list[int]]) -> None:
        self.residents: dict[int, Resident] = {}
        self.counts = AdapterCounts(numbers=self.residents.keys())
        self.num_pinned = 0
        self.num_pinned_blocks = 0
        self.num_placements = 0
        self.num_evictions = 0
        self._pool = pool
        self._take = take
        self._number_of: dict[int, int] = {}
        self._drops: list[int] = []
        self._placements: list[AdapterPlacement] = []

    def _count(self) -> None:
        num_resident, num_blocks, numbers = len(self.residents), len(self._number_of), self.residents.keys()
        self.counts = AdapterCounts(num_resident, self.num_pinned, num_blocks, self.num_placements, self.num_evictions, numbers)

    def is_pinned(self, number: int) -> bool:
        """Return whether a running request uses the adapter."""
        resident = self.residents.get(number)
        return resident is not None and resident.num_pins > 0

    def num_blocks(self, number: int, packed: PackedAdapter | None = None) -> int:
        """Return how many blocks the adapter has in the pool or, outside it, `packed` needs. 0 if unknown."""
        resident = self.residents.get(number)
        if resident is not None:
            return len(resident.block_ids)
        return 0 if packed is None else packed.num_pages

    def num_missing(self, number: int, packed: PackedAdapter | None = None) -> int:
        """Return how many available blocks `pin` would take."""
        return 0 if self.is_pinned(number) else self.num_blocks(number, packed)

    def pin(self, number: int, packed: PackedAdapter | None = None) -> None:
        """Hold the adapter for one more request. If the adapter is not in the pool, allocate blocks and order a placement.

        Raises ValueError if `packed` is needed and missing, or too few blocks are available.
        """
        resident = self.residents.get(number)
        if resident is None:
            if packed is None:
                raise ValueError(f"adapter {number} is not in the pool, and its content is not given")
            block_ids = tuple(self._take(packed.num_pages))
            resident = self.residents[number] = Resident(block_ids)
            self._number_of.update(dict.fromkeys(block_ids, number))
            self._placements.append(AdapterPlacement(number, packed, block_ids))
            self.num_placements += 1
        elif not resident.num_pins:
            for block_id in resident.block_ids:
                self._pool.hold(block_id)
        if not resident.num_pins:
            self.num_pinned += 1
            self.num_pinned_blocks += len(resident.block_ids)
        resident.num_pins += 1
        self._count()

    def unpin(self, number: int, group: Hashable) -> None:
        """Hold the adapter for one request less. After the last request its blocks are cached in the last `group` other than
        `BACKGROUND`."""
        resident = self.residents[number]
        if group is not BACKGROUND:
            resident.group = group
        resident.num_pins -= 1
        if not resident.num_pins:
            self.num_pinned -= 1
            self.num_pinned_blocks -= len(resident.block_ids)
            for block_id in resident.block_ids:
                self._pool.release(block_id, keep=True, group=resident.group)
        self._count()

    def num_freed(self, pins: Mapping[int, int]) -> int:
        """Return how many blocks become available if each adapter (by number) loses that many pins."""
        residents = self.residents
        return sum(len(residents[number].block_ids) for number, count in pins.items() if residents[number].num_pins == count)

    def evict(self, block_ids: Iterable[int]) -> None:
        """Forget adapters whose blocks were allocated for something else."""
        number_of, taken = self._number_of, set(block_ids)
        for number in dict.fromkeys(number_of[block_id] for block_id in sorted(taken & number_of.keys())):
            for block_id in self.residents.pop(number).block_ids:
                del number_of[block_id]
                if block_id not in taken:
                    self._pool.hold(block_id)
                    self._pool.release(block_id, keep=False)
            placements = [placement for placement in self._placements if placement.number != number]
            if len(placements) == len(self._placements):  # otherwise the executor does not know it yet
                self._drops.append(number)
            self._placements = placements
            self.num_evictions += 1
            self._count()

    @property
    def block_ids(self) -> KeysView[int]:
        return self._number_of.keys()

    @property
    def has_placements(self) -> bool:
        """Return whether adapters are still to be placed. Drops may wait, since blocks are taken between steps too."""
        return bool(self._placements)

    def take_drops(self) -> Sequence[int]:
        """Return, once each, numbers of adapters to drop before blocks are copied or written."""
        drops, self._drops = self._drops, []
        return drops

    def take_placements(self) -> Sequence[AdapterPlacement]:
        """Return, once each, adapters to place in the executor after blocks are copied."""
        placements, self._placements = self._placements, []
        return placements

    def check(self, pins: Counter[int]) -> None:
        """Raise AssertionError if an invariant is broken. `pins`: adapter number -> requests that use it."""
        pool = self._pool
        assert BASE not in pins, "a table has the base as its adapter"
        found = {number: resident.num_pins for number, resident in self.residents.items() if resident.num_pins}
        assert found == dict(pins), f"adapters are pinned {found}, and tables have {dict(pins)}"
        pinned = [resident for resident in self.residents.values() if resident.num_pins]
        assert self.num_pinned == len(pinned), f"{len(pinned)} adapters are pinned, {self.num_pinned} are counted"
        num_blocks = sum(len(resident.block_ids) for resident in pinned)
        assert self.num_pinned_blocks == num_blocks, f"{num_blocks} blocks are pinned, {self.num_pinned_blocks} are counted"
        owned = [block_id for resident in self.residents.values() for block_id in resident.block_ids]
        assert len(set(owned)) == len(owned), "two adapters lie in one block"
        assert set(owned) == self._number_of.keys(), "a block is said to hold an adapter and does not"
        for number, resident in self.residents.items():
            for block_id in resident.block_ids:
                assert pool.ref_count(block_id) == (resident.num_pins > 0), f"block {block_id} of adapter {number} is held"
                assert pool.is_kept(block_id) == (not resident.num_pins), f"block {block_id} of adapter {number} may be lost"
