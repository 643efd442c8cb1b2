"""Host memory for KV blocks that were evicted from a GPU. It has slots of equal size, each with a block's content and hash.
`Transfers` calls it from its worker thread.

The content ends with the process and needs no checksum. The memory is mapped at once and committed as slots are first written.
The memory need not be pinned, because the device copies through the executor's pinned staging memory.
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


class HostMemory:
    outlives_process = False

    def __init__(self, num_slots: int, *, content_bytes: int) -> None:
        self.num_slots = num_slots
        self._memory = np.empty((num_slots, content_bytes), np.uint8)
        self._names: dict[int, bytes] = {}
        self._lock = threading.Lock()
        self._is_closed = False

    def entries(self) -> Sequence[tuple[int, bytes]]:
        return ()

    def expect_newest_first(self) -> None:
        """Ignore the order, which ends with the process."""

    def write(self, slot: int, block_hash: bytes, content: memoryview) -> None:
        with self._lock:
            self._check_open()
            self._names.pop(slot, None)
            # NumPy copies without the GIL, so steps continue.
            np.copyto(self._memory[slot], np.frombuffer(content, np.uint8))
            self._names[slot] = block_hash

    def read(self, slot: int, block_hash: bytes, out: memoryview) -> None:
        with self._lock:
            self._check_open()
            if self._names.get(slot) != block_hash:
                raise CorruptBlock(f"Slot {slot} of the host's memory does not contain what was written there.")
            np.copyto(np.frombuffer(out, np.uint8), self._memory[slot])

    def emptied(self) -> HostMemory:
        """Close this object, and return an empty one with the same memory. Raises OSError (EBUSY) while a copy runs."""
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
        with self._lock:
            self._release()

    def _release(self) -> None:
        self._is_closed = True
        self._memory = np.empty((0, 0), np.uint8)
        self._names = {}

    def _check_open(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
