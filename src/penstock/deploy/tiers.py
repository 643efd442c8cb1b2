"""The tier below the KV pool: a file, or memory of the machine below a GPU, with its books. The factory opens it from a config;
no block is moved here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.config import Config, KvConfig
from penstock.config.units import format_size
from penstock.deploy.fingerprint import kv_fingerprint
from penstock.deploy.sizing import num_host_slots
from penstock.types.errors import ConfigError, counted

if TYPE_CHECKING:
    from penstock.engine.ports import BlockStore, Executor
    from penstock.kv.tiers import Tier
    from penstock.models.weights import LoadedModel
    from penstock.storage.block_file import BlockFile
    from penstock.storage.host_memory import HostMemory

_log = logging.getLogger(__name__)


def open_store(config: Config, model: LoadedModel, executor: Executor, name: str | None = None) -> BlockFile | None:
    """The file of the disk tier, with what is left in it of an earlier time; None if none was asked for.

    `name`: that of the model, if it is one of several, each of which has a folder of its own. Raises ConfigError if the file
    can't be opened.
    """
    from penstock.models.catalog import cache_dir, expand_home
    from penstock.storage.block_file import open_block_file

    if not config.kv.kv_disk_size_bytes:
        return None
    folder = cache_dir(config.model.cache_dir) / "kv"
    if name is not None:
        folder /= "model-" + re.sub(r"[^\w.-]", "_", name)
    store = open_block_file(
        expand_home(config.kv.kv_disk_path) if config.kv.kv_disk_path else folder,
        max_bytes=config.kv.kv_disk_size_bytes,
        content_bytes=executor.block_bytes,
        fingerprint=kv_fingerprint(config, model, executor),
    )
    _log.info(
        "KV blocks spill to %s, up to %s: %d blocks", store.path, format_size(config.kv.kv_disk_size_bytes), store.num_slots
    )
    return store


def open_host_memory(kv: KvConfig, executor: Executor, *, available_bytes: int) -> HostMemory:
    """The memory below an executor's pool. Raises ConfigError if there is not so much of `available_bytes`."""
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
    """The books of a store, with what it contains."""
    from penstock.kv.tiers import Tier

    if store is None:
        return None
    entries: Sequence[tuple[int, bytes]] = ()
    try:
        entries = store.entries()
    except OSError as error:
        _log.warning("what the file of the disk tier contains can't be read, and is written over: %s", error)
    tier = Tier(store.num_slots, entries=entries)
    if num_kept := len(tier.slots):
        _log.info(counted(num_kept, "KV block of an earlier time is there", "KV blocks of an earlier time are there"))
    return tier


def cleared(store: BlockStore | None) -> BlockStore | None:
    """The store of an engine that failed, emptied for the next one. None if the device hangs."""
    if store is None:
        return None
    try:
        return store.emptied()
    except OSError as error:
        _log.error("the engine goes on without the tier below the KV cache: %s", error)
        return None
