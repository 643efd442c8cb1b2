"""The settings of the KV cache: blocks, memory and the tiers below it. Read by `build` and its parts; holds no block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class KvConfig(Component):
    """How much is remembered."""

    title: ClassVar[str] = "KV cache"

    block_size: int = setting(16, "KV positions per block.", kind=Kind.COUNT, minimum=1, maximum=256)
    kv_cache_memory_bytes: int | None = setting(
        None,
        "Memory for keys and values.",
        kind=Kind.SIZE,
        key="kv_cache_memory",
        minimum=1,
        default_doc="half of what is free after the weights, at most 4GiB or what all rows can use; on a GPU what "
        "--gpu-memory-utilization leaves",
    )
    gpu_memory_utilization: float | None = setting(
        None,
        "Share of a GPU's memory for this server: weights, the largest step and, of the rest, keys and values.",
        kind=Kind.SHARE,
        minimum=0.01,
        maximum=1.0,
        default_doc="90%",
    )
    kv_cache_dtype: str | None = setting(
        None,
        "Type of the stored keys and values; bf16 takes twice the memory.",
        kind=Kind.CHOICE,
        choices=("int8", "bf16"),
        default_doc="int8, on a GPU bf16",
    )
    prefix_caching: bool = setting(True, "Reuse the KV of prompts that begin alike.", kind=Kind.FLAG)
    prefix_sharing: str | None = setting(
        None,
        "Among whom: all, or each tenant for itself.",
        kind=Kind.CHOICE,
        choices=("all", "tenant"),
        default_doc="tenant with several API keys or --trust-tenant-header, else all",
    )
    kv_eviction: str | None = setting(
        None,
        "Whose cached prefixes are lost first when blocks are needed.",
        kind=Kind.CHOICE,
        choices=("lru", "priority", "tenant-fair"),
        default_doc="priority with --policy priority, tenant-fair with --policy fair, else the preset's: lru",
    )
    kv_host_size_bytes: int = setting(
        0,
        "Memory of the machine below the KV cache of a GPU, for what is evicted or preempted; 0: none.",
        kind=Kind.SIZE,
        key="kv_host_size",
        minimum=0,
    )
    kv_disk_size_bytes: int = setting(
        0,
        "Largest size of the file below the KV cache, for what is evicted or preempted; 0: none.",
        kind=Kind.SIZE,
        key="kv_disk_size",
        minimum=0,
    )
    kv_disk_path: str | None = setting(
        None,
        "Folder of that file, which is kept for the next start; one server at a time.",
        kind=Kind.PATH,
        default_doc="`kv` in the folder for fetched weights",
    )
    kv_watermark: float | None = setting(
        None,
        "Share of the blocks kept free when a waiting request begins to run.",
        kind=Kind.SHARE,
        minimum=0.0,
        maximum=0.9,
        default_doc="the preset's: 1%",
    )
