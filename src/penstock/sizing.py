"""How much memory the KV cache gets: one pure decision, made for `build`, from numbers that are passed in. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config import KvConfig
from penstock.config.units import format_size
from penstock.types.errors import ConfigError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import ModelSpec

DEFAULT_CAP_BYTES = 4 << 30
"""More is only taken when asked for: a server should not fill a workstation unasked."""
RESERVE_BYTES = 256 << 20
"""Left for the process itself: the interpreter, activations, the vocabulary."""
SLOT_BOOKS_BYTES = 450
"""Of memory for each slot of the disk tier: 443 were taken at the most while 300,000 were read at a start, and 352 kept
(`benchmarks/disk_start.py`)."""
TYPICAL_REQUEST_TOKENS = 512
"""Prompt and answer, where a number is needed before any request has come. First turns of ShareGPT have 467 in the mean
(`benchmarks/kv_waste.py`)."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    num_blocks: int
    """The null block included."""
    block_size: int
    max_model_len: int
    """Longest prompt + output that is admitted, in tokens."""
    num_bytes: int
    is_shortened: bool
    """The model could take longer requests than the cache can hold."""

    @property
    def num_tokens(self) -> int:
        """Positions that all running requests share."""
        return (self.num_blocks - 1) * self.block_size

    def num_requests_of(self, num_tokens: int) -> int:
        """How many requests of so many tokens, prompt and answer, the cache holds at once when all are complete."""
        return (self.num_blocks - 1) // -(-num_tokens // self.block_size)


def plan_kv(
    spec: ModelSpec,
    kv: KvConfig,
    *,
    max_model_len: int | None,
    max_num_seqs: int,
    num_weight_bytes: int,
    available_bytes: int,
) -> KvPlan:
    """Blocks and longest request for a model on a machine with `available_bytes` before the weights are loaded.

    Raises ConfigError, with the numbers, where what was asked for does not fit.
    """
    if max_model_len is not None and max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is longer than the model's own {spec.max_model_len} positions.",
            remedy=f"Set --max-model-len to {spec.max_model_len} or less.",
        )
    wanted_len = max_model_len or spec.max_model_len
    block_bytes = kv.block_size * spec.kv_bytes_per_token(KvDtype(kv.kv_cache_dtype))
    free_bytes = available_bytes - num_weight_bytes - RESERVE_BYTES
    free_bytes -= _books_bytes(kv, free_bytes, block_bytes)
    budget_bytes = _budget_bytes(kv, free_bytes, (max_num_seqs * -(-wanted_len // kv.block_size) + 1) * block_bytes)
    num_blocks = budget_bytes // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"The KV cache gets {format_size(budget_bytes)}, which is less than the two blocks of "
            f"{format_size(block_bytes)} that are the least.",
            remedy="Raise --kv-cache-memory, or free some memory.",
        )
    longest = (num_blocks - 1) * kv.block_size
    if max_model_len is not None and longest < max_model_len:
        needed_bytes = (-(-max_model_len // kv.block_size) + 1) * block_bytes
        raise ConfigError(
            f"A request of max_model_len {max_model_len} tokens needs {format_size(needed_bytes)} of KV cache; "
            f"{format_size(budget_bytes)} holds {longest}.",
            remedy="Raise --kv-cache-memory or lower --max-model-len.",
        )
    return KvPlan(num_blocks, kv.block_size, min(wanted_len, longest), num_blocks * block_bytes, longest < wanted_len)


def _books_bytes(kv: KvConfig, free_bytes: int, block_bytes: int) -> int:
    """What it takes to know what is in the disk tier."""
    num_slots = kv.kv_disk_size_bytes // block_bytes
    num_bytes = num_slots * SLOT_BOOKS_BYTES
    if num_slots and num_bytes > max(0, free_bytes) // 2:
        raise ConfigError(
            f"The books of kv_disk_size {format_size(kv.kv_disk_size_bytes)}, {num_slots} blocks, take up to "
            f"{format_size(num_bytes)} of memory, more than half of the {format_size(max(0, free_bytes))} that are free.",
            remedy="Lower --kv-disk-size, or raise --block-size.",
        )
    return num_bytes


def _budget_bytes(kv: KvConfig, free_bytes: int, useful_bytes: int) -> int:
    """What was asked for, or half of what is free, up to the cap and to what all rows together can use."""
    asked_bytes = kv.kv_cache_memory_bytes
    if asked_bytes is None:
        return min(max(0, free_bytes) // 2, DEFAULT_CAP_BYTES, useful_bytes)
    if asked_bytes > free_bytes:
        raise ConfigError(
            f"kv_cache_memory {format_size(asked_bytes)} is more than the {format_size(max(0, free_bytes))} that are free "
            f"after the weights{' and the books of the disk tier' if kv.kv_disk_size_bytes else ''}.",
            remedy="Lower --kv-cache-memory, or free some memory.",
        )
    return asked_bytes
