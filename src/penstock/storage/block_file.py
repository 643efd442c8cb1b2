"""A file of KV blocks on disk. It has slots of equal size, each with a block's content, hash and checksum. `Transfers` calls it
from its worker thread.

The file may be damaged or cut short at any moment, so each read verifies a checksum and nothing is synced. Reads use system
calls, because an unreadable page of a mapping would kill the process. One process at a time uses the file (`flock`). Its mode
is 0600, because it contains users' text.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from copy import copy
from itertools import count
from pathlib import Path
from zlib import crc32

from penstock.types.errors import ConfigError, CorruptBlock

_logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
MAGIC = b"PENSTOCK KV\x00\x00\x00\x00\x01"
_FILE_HEADER = struct.Struct("<16sQQ32sI")
"""Magic, bytes of a slot, bytes of a block's content, fingerprint, checksum of these."""
RECORD_MAGIC = 0x4B565042
_RECORD = struct.Struct("<IIQ16sQ24x")
"""Magic, checksum of all that follows and the content, sequence number, hash, length."""
_NUM_UNCHECKED_BYTES = 8
_NUM_DESCENDING = 1 << 32
"""Sequence numbers reserved for writes from the newest content to the oldest. No stop writes so many blocks."""
FINGERPRINT_BYTES = 32
LOCK_TIMEOUT_S = 1.0


FILE_NAME = "blocks.penstock-kv"


class BlockFile:
    """KV blocks in a file on disk. Implements `engine.ports.BlockStore`. Any thread may call its methods."""

    outlives_process = True

    def __init__(self, path: Path, *, max_bytes: int, content_bytes: int, fingerprint: bytes) -> None:
        """Open or create the file, of at most `max_bytes`. Blocks with another fingerprint (of model and format) are discarded.

        Raises OSError if it can't be opened (`BlockingIOError` if another process has it), ValueError if not one block fits.
        """
        if len(fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(fingerprint)}")
        self.path = path
        self._content_bytes = content_bytes
        self.slot_bytes = -(-(_RECORD.size + content_bytes) // PAGE_BYTES) * PAGE_BYTES
        self.num_slots = (max_bytes - PAGE_BYTES) // self.slot_bytes
        if self.num_slots < 1:
            raise ValueError(f"{max_bytes} bytes do not hold one block of {self.slot_bytes}")
        self._numbers: Iterator[int] = count()
        """The sequence numbers of the next writes."""
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._begin(self._header(fingerprint))
        except BaseException:
            os.close(self._fd)
            raise

    def entries(self) -> Sequence[tuple[int, bytes]]:
        """Return (slot, block hash) of the slots that seem to have a block, oldest first. Reads one page of each slot."""
        found: list[tuple[int, int, bytes]] = []
        with self._lock:
            for slot in range(min(self.num_slots, os.fstat(self._fd).st_size // self.slot_bytes)):
                data = os.pread(self._fd, _RECORD.size, self._offset(slot))
                if len(data) < _RECORD.size:
                    break
                magic, _, sequence, block_hash, length = _RECORD.unpack(data)
                if magic == RECORD_MAGIC and length == self._content_bytes:
                    found.append((sequence, slot, block_hash))
            found.sort()
            if found:
                self._numbers = count(found[-1][0] + 1)
        return [(slot, block_hash) for _, slot, block_hash in found]

    def expect_newest_first(self) -> None:
        with self._lock:
            self._numbers = count(next(self._numbers) + _NUM_DESCENDING, -1)

    def write(self, slot: int, block_hash: bytes, content: memoryview) -> None:
        if len(content) != self._content_bytes or not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} of {self.num_slots} does not hold {len(content)} bytes")
        with self._lock:
            record = bytearray(_RECORD.pack(RECORD_MAGIC, 0, next(self._numbers), block_hash, self._content_bytes))
            struct.pack_into("<I", record, 4, _checksum(record, content))
            num_written = os.pwritev(self._fd, [record, content], self._offset(slot))
        if num_written != len(record) + len(content):
            raise OSError(errno.ENOSPC, "only part of a block was written", str(self.path))

    def read(self, slot: int, block_hash: bytes, out: memoryview) -> None:
        record = bytearray(_RECORD.size)
        with self._lock:
            num_read = os.preadv(self._fd, [record, out], self._offset(slot))
        magic, checksum, _, name, length = _RECORD.unpack(record)
        is_whole = num_read == len(record) + len(out) and magic == RECORD_MAGIC and length == len(out)
        if not is_whole or name != block_hash or checksum != _checksum(record, out):
            raise CorruptBlock(f"Slot {slot} of {self.path} does not contain what was written there.")

    def emptied(self) -> BlockFile:
        """Close this object, empty the file, and return a new object for it.

        Raises OSError (EBUSY) if the device has not finished its last task.
        """
        self._lock_or_fail()
        try:
            os.ftruncate(self._fd, PAGE_BYTES)
            fresh = copy(self)
            fresh._lock, fresh._numbers = threading.Lock(), count()
            self._fd = -1
            return fresh
        finally:
            self._lock.release()

    def close(self) -> None:
        """Release the file, keeping its content. Idempotent.

        If the device hangs, the file stays open, because a late write to a reused descriptor would hit another file.
        """
        try:
            self._lock_or_fail()
        except OSError:
            return
        try:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1
        finally:
            self._lock.release()

    def _begin(self, header: bytes) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(self._fd, 0o600)
        if os.pread(self._fd, len(header), 0) != header:
            if num_bytes := os.fstat(self._fd).st_size:
                _logger.warning(
                    "%s: discarding %d bytes that belong to another model, KV type, block size, kernel or version. "
                    "To keep both, give each its own --kv-disk-path.",
                    self.path,
                    num_bytes,
                )
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, header, 0)
        end = self._offset(self.num_slots)
        if os.fstat(self._fd).st_size > end:
            os.ftruncate(self._fd, end)

    def _header(self, fingerprint: bytes) -> bytes:
        data = _FILE_HEADER.pack(MAGIC, self.slot_bytes, self._content_bytes, fingerprint, 0)
        return data[:-4] + struct.pack("<I", crc32(data))

    def _offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self.slot_bytes

    def _lock_or_fail(self) -> None:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise OSError(errno.EBUSY, "the device does not answer", str(self.path))


def open_block_file(folder: Path, *, max_bytes: int, content_bytes: int, fingerprint: bytes) -> BlockFile:
    """Open the file of KV blocks in the folder, creating both if needed. Raises ConfigError if that fails."""
    path = folder / FILE_NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return BlockFile(path, max_bytes=max_bytes, content_bytes=content_bytes, fingerprint=fingerprint)
    except BlockingIOError as error:
        remedy = "Give each its own --kv-disk-path, or set --kv-disk-size 0."
        raise ConfigError(f"{path} is in use by another server.", remedy=remedy) from error
    except OSError as error:
        raise ConfigError(f"{path} can't be opened: {error}.", remedy="Set --kv-disk-path to a folder of your own.") from error
    except ValueError as error:
        raise ConfigError(f"kv_disk_size is too small: {error}.", remedy="Raise --kv-disk-size.") from error


def _checksum(record: bytearray, content: memoryview) -> int:
    return crc32(content, crc32(memoryview(record)[_NUM_UNCHECKED_BYTES:]))
