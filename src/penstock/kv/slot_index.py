"""The slot index: owns the map from the hash of a prefix to the slot of the lower tier that holds its last block. Called by
`Tier` alone; never reads or writes a slot.

A slot is one block's content in a file, or in other memory. What it holds is named as in `PrefixIndex`. While it is written or
read nothing else happens to it; of all others, the one that was used least recently is given to the next content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from enum import IntEnum


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
        """Those that may be overwritten, the least recently used first."""
        self._busy: dict[bytes, SlotState] = {}
        self._doomed: set[bytes] = set()
        """Busy ones that are to be forgotten as soon as they are not."""

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

        Of two slots with one hash the later stays.
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
        """It was used: others are overwritten before it."""
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
