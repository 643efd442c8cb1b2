"""The disk tier: turns a config into the open file of the tier below the KV pool, and into its books. Called by the
composition root; moves no block.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.units import format_size
from penstock.parts.device import is_on_gpu, kv_dtype
from penstock.types.counted import counted

if TYPE_CHECKING:
    from penstock.engine.ports import BlockStore, Executor
    from penstock.kv.tiers import Tier
    from penstock.models.weights import LoadedModel
    from penstock.storage.block_file import BlockFile

_log = logging.getLogger(__name__)


def open_store(config: Config, model: LoadedModel, executor: Executor) -> BlockFile | None:
    """The file of the disk tier, with what is left in it of an earlier time; None if none was asked for.

    Raises ConfigError if it can't be opened.
    """
    from penstock.models.catalog import default_cache_dir, expand_home
    from penstock.storage.block_file import open_block_file

    if not config.kv.kv_disk_size_bytes:
        return None
    cache_dir = expand_home(config.model.cache_dir) if config.model.cache_dir else default_cache_dir()
    store = open_block_file(
        expand_home(config.kv.kv_disk_path) if config.kv.kv_disk_path else cache_dir / "kv",
        max_bytes=config.kv.kv_disk_size_bytes,
        content_bytes=executor.block_bytes,
        fingerprint=_kv_fingerprint(config, model, executor),
    )
    _log.info(
        "KV blocks spill to %s, up to %s: %d blocks", store.path, format_size(config.kv.kv_disk_size_bytes), store.num_slots
    )
    return store


def _kv_fingerprint(config: Config, model: LoadedModel, executor: Executor) -> bytes:
    """Of all that the bytes of a block depend on."""
    from penstock import __version__
    from penstock.models.fingerprint import fingerprint

    parts = [__version__, config.backend.backend, getattr(executor, "variant", ""), *_kernels(config)]
    parts += [str(kv_dtype(config)), config.kv.block_size, executor.block_bytes, *_pairs_without_bias(model, executor)]
    own = blake2b(repr(parts).encode(), digest_size=32, key=fingerprint(model.path))
    return own.digest()


def _pairs_without_bias(model: LoadedModel, executor: Executor) -> Sequence[object]:
    """Pairs of columns of keys that are stored without their bias, which depends on the longest request; for each rotation."""
    from penstock.models.key_centre import still_pairs
    from penstock.models.program import KvWrite
    from penstock.models.registry import describe

    num_positions = getattr(executor, "num_positions", executor.capacity.max_model_len)  # what a GPU's was made for
    rotations = {op.inv_freq for op in describe(model.spec).ops if isinstance(op, KvWrite) and op.bias is not None}
    return [still_pairs(inv_freq, num_positions) for inv_freq in sorted(rotations)]


def _kernels(config: Config) -> Sequence[object]:
    """Whose change may change the bytes."""
    if is_on_gpu(config):
        from penstock.backends import cuda

        gpu = cuda.find_gpu()
        backend = config.backend
        who = [cuda.flashinfer_version(), backend.attention, backend.deterministic, backend.weight_dtype]
        return [cuda.package_versions(), gpu if isinstance(gpu, str) else gpu.name, *who]
    from penstock.backends.native import _native

    kernels = Path(_native.__file__).stat()
    return [kernels.st_size, kernels.st_mtime_ns]


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
    """The store of an engine that failed, for the next one: nothing that was computed before is trusted. None if it hangs."""
    if store is None:
        return None
    try:
        return store.emptied()
    except OSError as error:
        _log.error("the engine goes on without the tier below the KV cache: %s", error)
        return None
