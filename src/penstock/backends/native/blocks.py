"""The `BlockMemory` of the C++ engine: its KV cache, accessed in place."""

from __future__ import annotations

import os
import secrets

from penstock.backends.native._native import Engine


class KvFile:
    """An open in-memory file. Closed with its last user."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


def new_file() -> KvFile | None:
    """Return a new in-memory file with a unique name, or None if the system has no memfd."""
    return KvFile(os.memfd_create(f"penstock-kv-{secrets.token_hex(16)}")) if hasattr(os, "memfd_create") else None


class NativeBlocks:
    """The engine's KV memory, kept alive by this object."""

    def __init__(self, engine: Engine, file: KvFile | None) -> None:
        self.block_bytes = int(engine.block_bytes)
        self._file, self._memory = file, engine.kv_memory.data

    @property
    def fd(self) -> int | None:
        return None if self._file is None else self._file.fd

    def content(self, block_id: int) -> memoryview:
        return self._memory[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def target(self, block_id: int) -> memoryview:
        return self.content(block_id)

    def fill(self, block_id: int) -> None:
        """Do nothing: the content was written in its place."""
