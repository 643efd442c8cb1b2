"""Computes the size of the KV cache from sizes of model and memory, without reading either."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config import KvConfig
from penstock.config.units import format_size
from penstock.types.errors import ConfigError, NotEnoughFreeMemory, NotEnoughMemory
from penstock.types.model_spec import ModelSpec
from penstock.types.plan import Capacity

if TYPE_CHECKING:
    from penstock.backends.cuda.memory import Usage
    from penstock.machine import AddressSpace

DEFAULT_CAP_BYTES = 4 << 30
"""Largest KV cache without a set size: a server should not fill a workstation."""
RESERVE_BYTES = 256 << 20
"""Memory for the interpreter, activations, the vocabulary, and the part of a matrix that is being converted."""
STEP_RESERVE_BYTES = RESERVE_BYTES // 2
"""The part of the reserve for a step's activations. Those of most small models fit at the default sizes."""
LEAST_TOKENS_BESIDE = 4096
"""Length of the longest request below which a model does not shrink its KV cache to leave room for other models."""
LEAST_ROOM_BYTES = RESERVE_BYTES // 4
"""Room that `ulimit -v` must leave for a KV cache without a set size. The cache takes half of it: about a thousand tokens of a
small model."""
SLOT_BOOKS_BYTES = 450
"""Memory for a slot's index entry in the lower tier. Measured: at most 443, of 300,000 slots (`benchmarks/disk_start.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRoom:
    """The memory for adapters: packed adapters in host memory, and copies in the KV cache for running requests."""

    image_bytes: int = 0
    """Size of the largest expected adapter. Fewer larger ones fit."""
    read_bytes: int = 0
    """Memory for reading one adapter."""
    num_in_pool: int = 0
    num_in_memory: int = 0

    @property
    def num_bytes(self) -> int:
        """Bytes for adapters outside of the KV cache."""
        return self.num_in_memory * self.image_bytes + self.read_bytes


NO_ADAPTERS = AdapterRoom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The memory of a CPU's machine, and what a model takes of it beside the KV cache."""

    available_bytes: int
    """Free before the weights are loaded."""
    num_weight_bytes: int
    num_models: int = 1
    """Models in memory at once."""
    beside_bytes: int = 0
    """Weights of the other models."""
    adapters: AdapterRoom = NO_ADAPTERS


@dataclass(frozen=True, slots=True)
class KvPlan:
    capacity: Capacity
    num_bytes: int
    is_shortened: bool
    """Whether the cache, or the memory for an encoder's steps, is too small for the model's longest request."""
    num_step_bytes: int = 0
    """Memory for a step's experts, and for activations beyond `STEP_RESERVE_BYTES`."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit the cache, of all requests together."""
        return (self.capacity.num_blocks - 1) * self.capacity.block_size

    def num_requests_of(self, num_tokens: int) -> int:
        """Return how many requests of `num_tokens` each fit the cache."""
        return (self.capacity.num_blocks - 1) // self.capacity.most_blocks(num_tokens)


def plan_kv(
    wanted: Capacity,
    kv: KvConfig,
    *,
    is_exact: bool,
    block_bytes: int,
    step_bytes: int,
    room: Room,
) -> KvPlan:
    """Choose the number of KV blocks and the longest request on a CPU.

    `is_exact`: the longest request is a setting, so do not shorten it. `step_bytes`: for what a step computes. If the cache has
    no set size, leave memory for the other models, unless the cache would be too small. Raises NotEnoughMemory.
    """
    adapters = room.adapters
    instead = "Lower --max-num-batched-tokens or --max-num-seqs, keep a mixture's experts in a file (penstock serve "
    instead += "--experts-on-disk)"
    free_bytes = left_by_step(room, step_bytes, wanted.max_step_tokens, least_kv_bytes=2 * block_bytes, instead=instead)
    check_adapter_room(adapters, free_bytes, least_kv_bytes=2 * block_bytes)
    free_bytes -= adapters.num_bytes
    free_bytes -= _books_bytes("disk", kv.kv_disk_size_bytes, free_bytes, block_bytes)
    budget_bytes = kv.kv_cache_memory_bytes
    if budget_bytes is None:
        useful_bytes = _useful_bytes(wanted, block_bytes) + adapters.num_in_pool * adapters.image_bytes
        least_len = wanted.max_model_len if is_exact else min(wanted.max_model_len, LEAST_TOKENS_BESIDE)
        part_bytes = (free_bytes - room.beside_bytes) // (2 * room.num_models)
        if part_bytes < (wanted.most_blocks(least_len) + 1) * block_bytes:  # the models take turns in memory
            part_bytes = max(0, free_bytes) // (2 * room.num_models)
        budget_bytes = min(part_bytes, DEFAULT_CAP_BYTES, useful_bytes)
    elif budget_bytes > free_bytes:
        raise NotEnoughFreeMemory(
            f"kv_cache_memory {format_size(budget_bytes)} is more than the {format_size(max(0, free_bytes))} that are free "
            f"after the weights{' and the index of the disk tier' if kv.kv_disk_size_bytes else ''}.",
            instead="Lower --kv-cache-memory",
        )
    is_of_free = kv.kv_cache_memory_bytes is None
    found = _plan(wanted, block_bytes, budget_bytes, is_exact=is_exact, is_of_free=is_of_free)
    return replace(found, num_step_bytes=step_bytes)


def left_by_step(room: Room, step_bytes: int, num_tokens: int, *, least_kv_bytes: int = 0, instead: str) -> int:
    """Return the memory that weights, reserve and a step of `num_tokens` leave.

    Raises NotEnoughFreeMemory, with the remedy `instead`, if a step with `step_bytes` leaves less than `least_kv_bytes`.
    """
    free_bytes = room.available_bytes - room.num_weight_bytes - RESERVE_BYTES - step_bytes
    if step_bytes and free_bytes < least_kv_bytes:
        raise NotEnoughFreeMemory(
            f"Weights of {format_size(room.num_weight_bytes)} and what a step of {num_tokens} tokens takes, "
            f"{format_size(step_bytes)}, leave {'no KV cache' if least_kv_bytes else 'nothing'} of the "
            f"{format_size(room.available_bytes)} that are free.",
            instead=instead,
        )
    return free_bytes


def longest_text(room: Room, wanted: int, least_step: int, bytes_of_step: Callable[[int], int]) -> int:
    """Return the most tokens of a text of an encoder: `wanted`, halved until a step fits the memory, but at least `least_step`.

    Beside other models it may take as much as a KV cache. See `plan_kv`.
    """
    free_bytes = room.available_bytes - room.num_weight_bytes - RESERVE_BYTES
    if room.num_models > 1:
        part_bytes = (free_bytes - room.beside_bytes) // (2 * room.num_models)
        if part_bytes < bytes_of_step(min(wanted, LEAST_TOKENS_BESIDE)):  # the models take turns in memory
            part_bytes = free_bytes // (2 * room.num_models)
        free_bytes = part_bytes
    longest = wanted
    while longest > least_step and bytes_of_step(longest) > free_bytes:
        longest = max(least_step, longest // 2)
    return longest


def plan_gpu_kv(
    wanted: Capacity, kv: KvConfig, *, is_exact: bool, block_bytes: int, memory: Usage, adapters: AdapterRoom = NO_ADAPTERS
) -> KvPlan:
    """Choose the number of KV blocks and the longest request for a GPU with the measured `memory`. Raises ConfigError.

    Packed adapters are in host memory, and do not count here.
    """
    share = kv.gpu_memory_utilization or 0.9  # the rest is for the driver, and for what a profile misses, such as fragments
    limit_bytes = memory.free_bytes if kv.kv_cache_memory_bytes else int(share * memory.total_bytes)
    if limit_bytes > memory.free_bytes:
        raise ConfigError(
            f"gpu_memory_utilization {share:g} is {format_size(limit_bytes)} of the GPU's {format_size(memory.total_bytes)}, "
            f"of which {format_size(memory.free_bytes)} were free at the start.",
            remedy="Lower --gpu-memory-utilization, or end what else uses the GPU.",
        )
    left_bytes = max(0, limit_bytes - memory.used_bytes)
    left_words = (
        f"The weights and a step of the largest size take {format_size(memory.used_bytes)} of the GPU's memory, so of "
        f"{format_size(limit_bytes)} {format_size(left_bytes)} are left for the KV cache"
    )
    budget_bytes = kv.kv_cache_memory_bytes
    if budget_bytes is None:
        useful_bytes = _useful_bytes(wanted, block_bytes) + adapters.num_in_pool * adapters.image_bytes
        budget_bytes = min(left_bytes, useful_bytes)
    elif budget_bytes > left_bytes:
        raise ConfigError(
            f"{left_words}, and kv_cache_memory is {format_size(budget_bytes)}.",
            remedy="Lower --kv-cache-memory or --max-num-batched-tokens, or end what else uses the GPU.",
        )
    if left_bytes < 2 * block_bytes:
        raise ConfigError(
            f"{left_words}, less than two blocks of {format_size(block_bytes)}.",
            remedy="Raise --gpu-memory-utilization, lower --max-num-batched-tokens, or take a smaller model.",
        )
    growth = "--kv-cache-memory" if kv.kv_cache_memory_bytes else "--gpu-memory-utilization"
    return _plan(wanted, block_bytes, budget_bytes, is_exact=is_exact, growth=growth)


def check_adapter_room(adapters: AdapterRoom, free_bytes: int, *, least_kv_bytes: int = 0) -> None:
    """Raise NotEnoughMemory if the adapters and a KV cache of `least_kv_bytes` do not fit into `free_bytes`."""
    if adapters.num_bytes and free_bytes - adapters.num_bytes < least_kv_bytes:
        beside = " after the weights, with a KV cache beside them" if least_kv_bytes else ""
        raise NotEnoughFreeMemory(
            f"{adapters.num_in_memory} adapters of up to {format_size(adapters.image_bytes)} each, and "
            f"{format_size(adapters.read_bytes)} to read one, do not fit the {format_size(max(0, free_bytes))} of the "
            f"machine's memory that are free{beside}.",
            instead="Lower --max-cpu-loras or --max-lora-rank",
        )


def check_address_space(space: AddressSpace, planned_bytes: int) -> None:
    """Raise ConfigError if the process's limit of address space is too low for the program and `planned_bytes`."""
    needed_bytes = space.program_bytes + planned_bytes
    if needed_bytes > space.limit_bytes:
        needed_kib = math.ceil(needed_bytes / 1024)
        raise ConfigError(
            f"The address space of this process is limited to {space.limit_bytes // 1024} KiB, and {needed_kib} KiB are "
            f"needed: {format_size(planned_bytes)} for the model and {format_size(space.program_bytes)} for the program.",
            remedy=f"Set `ulimit -v {needed_kib}` or more (LimitAS= of a systemd unit), or `ulimit -v unlimited`.",
        )


def num_host_slots(kv: KvConfig, *, block_bytes: int, available_bytes: int) -> int:
    """Return how many KV blocks fit the tier in host memory. Raises ConfigError if the tier does not fit or is too small."""
    free_bytes = available_bytes - RESERVE_BYTES
    asked_bytes = kv.kv_host_size_bytes
    needed_bytes = asked_bytes + _books_bytes("host", asked_bytes, free_bytes, block_bytes)
    if needed_bytes > free_bytes:
        raise NotEnoughFreeMemory(
            f"kv_host_size {format_size(asked_bytes)} takes {format_size(needed_bytes)} with its index, and "
            f"{format_size(max(0, free_bytes))} of the machine's memory are free.",
            instead="Lower --kv-host-size",
        )
    if asked_bytes < block_bytes:
        raise ConfigError(
            f"kv_host_size {format_size(asked_bytes)} does not hold one block of {format_size(block_bytes)}.",
            remedy="Raise --kv-host-size.",
        )
    return asked_bytes // block_bytes


def wanted_len(spec: ModelSpec, max_model_len: int | None) -> int:
    """Return the most tokens of a request: the setting, or else the model's limit. Raises ConfigError above the limit."""
    if max_model_len is not None and max_model_len > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {max_model_len} is longer than the model's own {spec.max_model_len} positions.",
            remedy=f"Set --max-model-len to {spec.max_model_len} or less.",
        )
    return max_model_len or spec.max_model_len


def _useful_bytes(wanted: Capacity, block_bytes: int) -> int:
    """Return the size of a KV cache in which a full batch of the longest requests fits. More would stay empty."""
    return (wanted.max_rows * wanted.most_blocks(wanted.max_model_len) + 1) * block_bytes


def _plan(
    wanted: Capacity,
    block_bytes: int,
    budget_bytes: int,
    *,
    is_exact: bool,
    growth: str = "--kv-cache-memory",
    is_of_free: bool = False,
) -> KvPlan:
    """Divide a KV cache of `budget_bytes` into blocks. See `plan_kv`.

    `growth`: the flag that makes it larger, for errors. `is_of_free`: its size follows from the free memory of a CPU.
    """
    num_blocks = budget_bytes // block_bytes
    least = 2 + wanted.num_state_blocks
    if num_blocks < least:
        words = f" and a request's recurrent state of {wanted.num_state_blocks}" if wanted.num_state_blocks else ""
        message = f"The KV cache gets {format_size(budget_bytes)}, which is less than the minimum: two blocks of "
        message += f"{format_size(block_bytes)}{words}."
        if is_of_free:
            raise NotEnoughFreeMemory(message, instead="Take a smaller model")
        raise NotEnoughMemory(message, remedy=f"Raise {growth}.")
    wanted_len, most_blocks = wanted.max_model_len, wanted.most_blocks(wanted.max_model_len)
    is_shortened = most_blocks > num_blocks - 1
    longest = (num_blocks - 1 - wanted.num_state_blocks) * wanted.block_size if is_shortened else wanted_len
    if is_exact and is_shortened:
        needed_bytes = (most_blocks + 1) * block_bytes
        raise NotEnoughMemory(
            f"A request of max_model_len {wanted_len} tokens needs {format_size(needed_bytes)} of KV cache; "
            f"{format_size(budget_bytes)} holds {longest}.",
            remedy=f"Raise {growth} or lower --max-model-len.",
        )
    return KvPlan(replace(wanted, num_blocks=num_blocks, max_model_len=longest), num_blocks * block_bytes, is_shortened)


def _books_bytes(tier: str, size_bytes: int, free_bytes: int, block_bytes: int) -> int:
    """Return the memory for the index of a disk or host tier. Raises NotEnoughMemory if the index does not fit."""
    num_slots = size_bytes // block_bytes
    num_bytes = num_slots * SLOT_BOOKS_BYTES
    if num_slots and num_bytes > max(0, free_bytes) // 2:
        raise NotEnoughFreeMemory(
            f"The index of kv_{tier}_size {format_size(size_bytes)}, {num_slots} blocks, takes up to "
            f"{format_size(num_bytes)} of memory, more than half of the {format_size(max(0, free_bytes))} that are free.",
            instead=f"Lower --kv-{tier}-size, raise --block-size",
        )
    return num_bytes
