"""Host memory below a GPU's KV pool: owns equal slots of the machine's own memory, each with a block's content and its name.
Called by the worker of `Transfers`; knows neither what the bytes mean nor which are useful.

It ends with the process, so nothing is there from an earlier time, and no checksum is needed: what guards the process's
own memory guards this. The memory is mapped at once and taken from the machine as slots are written first. It is not pinned:
the device copies to and from the executor's own staging memory, which is.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from copy import copy

import numpy as np

from penstock.types.errors import CorruptBlock

LOCK_TIMEOUT_S = 1.0
"""A copy of a block takes milliseconds."""


class HostMemory:
    """Implements `engine.ports.BlockStore`. Made by the composition root; its methods may be called by any thread."""

    def __init__(self, num_slots: int, *, content_bytes: int) -> None:
        """Raises MemoryError if there is no room for so much."""
        self._num_slots = num_slots
        self._memory = np.empty((num_slots, content_bytes), np.uint8)
        self._names: dict[int, bytes] = {}
        """By slot."""
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def outlives_process(self) -> bool:
        return False

    def entries(self) -> Sequence[tuple[int, bytes]]:
        """Nothing outlives the process."""
        return ()

    def write(self, slot: int, block_hash: bytes, content: memoryview) -> None:
        with self._lock:
            self._check_open()
            self._names.pop(slot, None)
            # NumPy copies without the GIL: steps go on.
            np.copyto(self._memory[slot], np.frombuffer(content, np.uint8))
            self._names[slot] = block_hash

    def read(self, slot: int, block_hash: bytes, out: memoryview) -> None:
        with self._lock:
            self._check_open()
            if self._names.get(slot) != block_hash:
                raise CorruptBlock(f"Slot {slot} of the host's memory does not contain what was written there.")
            np.copyto(np.frombuffer(out, np.uint8), self._memory[slot])

    def emptied(self) -> HostMemory:
        """The same memory with nothing in it. This one is closed: whoever has it and writes on gets an OSError.

        Raises OSError (EBUSY) if a copy has not ended.
        """
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise OSError(errno.EBUSY, "a copy of a block does not end")
        try:
            fresh = copy(self)
            fresh._lock, fresh._names = threading.Lock(), {}
            self._release()
            return fresh
        finally:
            self._lock.release()

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._memory = np.empty((0, 0), np.uint8)
        self._names = {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
