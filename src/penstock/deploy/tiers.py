"""Opens the disk or host tier, which takes KV blocks evicted from the pool, and makes its index."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import KvConfig
from penstock.config.units import format_size
from penstock.deploy.sizing import num_host_slots
from penstock.types.errors import ConfigError, counted

if TYPE_CHECKING:
    from penstock.engine.ports import BlockStore, Executor
    from penstock.kv.tiers import Tier
    from penstock.storage.block_file import BlockFile
    from penstock.storage.host_memory import HostMemory

_log = logging.getLogger(__name__)


def tier_folder(asked: str | None, cache: Path, name: str | None) -> Path:
    """Return the folder of the disk tier: `asked`, or one in the cache. `name`: the model's, if there are several models."""
    from penstock.models.cache import expand_home

    if asked:
        return expand_home(asked)
    return cache / "kv" if name is None else cache / "kv" / ("model-" + re.sub(r"[^\w.-]", "_", name))


def open_store(folder: Path, max_bytes: int, executor: Executor, fingerprint: bytes) -> BlockFile:
    """Open the disk tier's file, which may have blocks of an earlier server. Raises ConfigError."""
    from penstock.storage.block_file import open_block_file

    store = open_block_file(folder, max_bytes=max_bytes, content_bytes=executor.block_bytes, fingerprint=fingerprint)
    _log.info("KV blocks spill to %s, up to %s: %d blocks", store.path, format_size(max_bytes), store.num_slots)
    return store


def open_host_memory(kv: KvConfig, executor: Executor, *, available_bytes: int) -> HostMemory:
    """Allocate the host tier for an executor's blocks. Raises ConfigError if it exceeds `available_bytes`."""
    from penstock.storage.host_memory import HostMemory

    num_slots = num_host_slots(kv, block_bytes=executor.block_bytes, available_bytes=available_bytes)
    try:
        store = HostMemory(num_slots, content_bytes=executor.block_bytes)
    except MemoryError as error:
        size = format_size(kv.kv_host_size_bytes)
        raise ConfigError(f"The system gives no {size} for kv_host_size.", remedy="Lower --kv-host-size.") from error
    _log.info("KV blocks spill to the machine's memory, up to %s: %d blocks", format_size(kv.kv_host_size_bytes), num_slots)
    return store


def build_tier(store: BlockStore | None) -> Tier | None:
    """Make the index of a tier's blocks, or return None without a tier."""
    from penstock.kv.tiers import Tier

    if store is None:
        return None
    entries: Sequence[tuple[int, bytes]] = ()
    try:
        entries = store.entries()
    except OSError as error:
        _log.warning("the file of the disk tier can't be read, and is overwritten: %s", error)
    tier = Tier(store.num_slots, entries=entries)
    if num_kept := len(tier.slots):
        _log.info(counted(num_kept, "KV block of an earlier server was found", "KV blocks of an earlier server were found"))
    return tier


def cleared(store: BlockStore | None) -> BlockStore | None:
    """Empty a failed engine's disk or host tier and return it for the next engine, or None if its disk hangs."""
    if store is None:
        return None
    try:
        return store.emptied()
    except OSError as error:
        _log.error("the engine goes on without the tier below the KV cache: %s", error)
        return None
