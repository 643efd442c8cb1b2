"""A store of blocks in memory that breaks as often as it is told to. Called through the port of `Transfers`; repeatable from a
seed.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

from penstock.types.errors import CorruptBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """How often what happens; shares in [0, 1]."""

    write_fails: float = 0.0
    read_fails: float = 0.0
    no_memory: float = 0.0
    corrupts: float = 0.0
    """Content changes while it lies there; it is noticed when it is read."""
    loses: float = 0.0
    """Earlier content stays there, under its old name."""


class MemoryStore:
    """Implements `BlockStore`."""

    def __init__(self, num_slots: int, faults: Faults | None = None, seed: int = 0) -> None:
        self.faults = faults or Faults()
        self._num_slots = num_slots
        self._random = random.Random(seed)
        self._slots: dict[int, tuple[bytes, bytearray, int]] = {}

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def outlives_process(self) -> bool:
        """As if it were a file."""
        return True

    def entries(self) -> Sequence[tuple[int, bytes]]:
        return [(slot, block_hash) for slot, (block_hash, _, _) in self._slots.items()]

    def expect_newest_first(self) -> None:
        """Nothing to do: `entries` are in no order."""

    def write(self, slot: int, block_hash: bytes, content: memoryview) -> None:
        assert 0 <= slot < self._num_slots, f"there is no slot {slot}"
        if self._happens(self.faults.write_fails):
            self._slots.pop(slot, None)
            raise OSError(errno.ENOSPC, "no space left, as it was told")
        if self._happens(self.faults.no_memory):
            raise MemoryError
        if self._happens(self.faults.loses):
            return
        kept = bytearray(content)
        self._slots[slot] = (block_hash, kept, crc32(kept))
        if self._happens(self.faults.corrupts):
            kept[self._random.randrange(len(kept))] ^= 1

    def read(self, slot: int, block_hash: bytes, out: memoryview) -> None:
        if self._happens(self.faults.read_fails):
            raise OSError(errno.EIO, "the device failed, as it was told")
        if self._happens(self.faults.no_memory):
            raise MemoryError
        name, kept, checksum = self._slots.get(slot, (b"", bytearray(), 0))
        if name != block_hash or crc32(kept) != checksum:
            raise CorruptBlock(f"slot {slot} has not what was written")
        out[:] = kept

    def emptied(self) -> MemoryStore:
        """Nobody writes to this one any more."""
        return MemoryStore(self._num_slots, self.faults)

    def close(self) -> None:
        """Nothing to do."""

    def _happens(self, share: float) -> bool:
        return share > 0 and self._random.random() < share
