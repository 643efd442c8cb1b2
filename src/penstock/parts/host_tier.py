"""The host tier: turns a config into memory of the machine below the KV pool of a GPU. Called by the composition root; moves no
block.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.config import KvConfig
from penstock.config.units import format_size
from penstock.machine import available_memory_bytes
from penstock.sizing import num_host_slots
from penstock.types.errors import ConfigError

if TYPE_CHECKING:
    from penstock.engine.ports import Executor
    from penstock.storage.host_memory import HostMemory

_log = logging.getLogger(__name__)


def open_host_memory(kv: KvConfig, executor: Executor) -> HostMemory | None:
    """The memory below an executor's pool; None if none was asked for. Raises ConfigError if there is not so much."""
    from penstock.storage.host_memory import HostMemory

    if not kv.kv_host_size_bytes:
        return None
    num_slots = num_host_slots(kv, block_bytes=executor.block_bytes, available_bytes=available_memory_bytes())
    try:
        store = HostMemory(num_slots, content_bytes=executor.block_bytes)
    except MemoryError as error:
        size = format_size(kv.kv_host_size_bytes)
        raise ConfigError(f"The system gives no {size} for kv_host_size.", remedy="Lower --kv-host-size.") from error
    _log.info("KV blocks spill to the machine's memory, up to %s: %d blocks", format_size(kv.kv_host_size_bytes), num_slots)
    return store
