"""The paged keys and values of the reference backend."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backends.batch import NULL_BLOCK
from penstock.models.program import KvShape, StateShape
from penstock.types.kv_dtype import KEY_GROUP, KvDtype

F32 = NDArray[np.float32]

SMALLEST_SCALE = np.float32(1e-24)  # its inverse is finite


class KvCache:
    """Keys and values of each layer, rounded to `dtype`, and recurrent states, in float32.

    Raises ValueError if a block has more columns of state than positions. With `poison`, slots that hold no KV are NaN, except
    those of the null block, which padding reads.
    """

    def __init__(
        self,
        *,
        shapes: Sequence[KvShape],
        num_blocks: int,
        block_size: int,
        dtype: KvDtype,
        state: StateShape | None = None,
        poison: bool = False,
    ) -> None:
        self._block_size = block_size
        self.dtype = dtype
        self._poison = poison

        def empty(*shape: int) -> F32:
            cache = np.full((num_blocks, *shape), np.nan if poison else 0.0, np.float32)
            cache[NULL_BLOCK] = 0
            return cache

        self._num_latent = [shape.num_latent for shape in shapes]
        self._layers = [
            tuple(empty(block_size, shape.num_kv_heads, shape.head_dim) for _ in range(1 if shape.num_latent else 2))
            for shape in shapes
        ]
        """Keys and values of each layer, or only keys. [num_blocks, block_size, num_kv_heads, head_dim]"""
        state = state or StateShape(0, 0, 0)
        self._num_columns = state.num_columns
        if self._num_columns > block_size:
            raise ValueError(f"blocks of {block_size} positions can't hold {self._num_columns} columns of recurrent state")
        self._states = empty(state.num_layers, state.num_columns, state.width)

    @property
    def _caches(self) -> tuple[F32, ...]:
        """Everything that a block stores, in order. [num_blocks, ...]"""
        return (*itertools.chain(*self._layers), self._states)

    def write(self, layer: int, slots: NDArray[np.int64], k: F32, v: F32) -> None:
        """Store k and v [num_tokens, num_kv_heads * head_dim], rounded to the cache's type, in cache slots [num_tokens]."""
        shape = self._layers[layer][0].shape[2:]
        k, v = k.reshape(-1, *shape), v.reshape(-1, *shape)
        if self.dtype is KvDtype.INT8:
            k, v = round_to_int8(k, KEY_GROUP), round_to_int8(v, v.shape[-1])
        elif self.dtype is KvDtype.INT4:
            k, v = round_rotated(k, num_levels=32), round_rotated(v, num_levels=16)
        else:
            k, v = round_to_bf16(k), round_to_bf16(v)
        for cache, new in zip(self._layers[layer], (k, v), strict=True):
            cache[slots // self._block_size, slots % self._block_size] = new

    def write_latents(self, layer: int, slots: NDArray[np.int64], latents: F32, keys: F32) -> None:
        """Store latents and rotated keys [num_tokens, columns], rounded to the cache's type. A whole latent has one scale."""
        if self.dtype is KvDtype.INT8:
            parts = [round_to_int8(latents, latents.shape[-1]), round_to_int8(keys, KEY_GROUP)]
        else:
            parts = [round_to_bf16(latents), round_to_bf16(keys)]
        (cache,) = self._layers[layer]
        cache[slots // self._block_size, slots % self._block_size, 0] = np.concatenate(parts, axis=-1)

    def read(self, layer: int, block_table: NDArray[np.int32], seq_len: int) -> tuple[F32, F32]:
        """Return keys and values of the first `seq_len` positions of a row, [seq_len, num_kv_heads, columns] each."""
        blocks = block_table[: -(-seq_len // self._block_size)]
        found = [cache[blocks].reshape(-1, *cache.shape[2:])[:seq_len] for cache in self._layers[layer]]
        return found[0], found[1] if len(found) > 1 else found[0][..., : self._num_latent[layer]]

    def write_state(self, layer: int, slots: NDArray[np.int64], columns: F32) -> None:
        """Store columns [num_tokens, width] of the recurrent state. A block keeps only those of its last positions."""
        blocks, offsets = slots // self._block_size, slots % self._block_size
        later = blocks[self._num_columns :]
        is_kept = np.full(len(slots), True)
        is_kept[: len(later)] = blocks[: len(later)] != later  # else a later column overwrites this one
        self._states[blocks[is_kept], layer, offsets[is_kept] % self._num_columns] = columns[is_kept]

    def read_state(self, layer: int, block_table: NDArray[np.int32], context_len: int) -> F32:
        """Return the recurrent state's columns before `context_len`; 0 before the first position. [num_columns, width]"""
        positions = context_len - self._num_columns + np.arange(self._num_columns)
        blocks, places = block_table[positions // self._block_size], positions % self._block_size % self._num_columns
        columns: F32 = self._states[blocks, layer, places]
        return np.where(positions[:, None] < 0, np.float32(0), columns)

    def copy_block(self, source: int, destination: int) -> None:
        for cache in self._caches:
            cache[destination] = cache[source]

    @property
    def block_bytes(self) -> int:
        return int(sum(cache[0].nbytes for cache in self._caches))

    def read_block(self, block_id: int, out: memoryview) -> None:
        """Copy each layer's keys and values, then the recurrent state of a block to `out`."""
        out[:] = b"".join(cache[block_id].tobytes() for cache in self._caches)

    def write_block(self, block_id: int, content: memoryview) -> None:
        numbers, start = np.frombuffer(content, np.float32), 0
        for cache in self._caches:
            size = cache[block_id].size
            cache[block_id] = numbers[start : start + size].reshape(cache[block_id].shape)
            start += size

    def read_numbers(self, block_ids: Sequence[int], count: int) -> F32:
        """Return the first `count` numbers of what `write_numbers` put into these blocks."""
        blocks = [cache[block_id].reshape(-1) for block_id in block_ids for cache in itertools.chain(*self._layers)]
        return np.concatenate(blocks)[:count]

    def write_numbers(self, block_ids: Sequence[int], numbers: F32) -> None:
        """Store numbers in blocks that hold no keys and values. The numbers must fit."""
        start = 0
        for block_id in block_ids:
            for cache in itertools.chain(*self._layers):
                part = numbers[start : start + cache[block_id].size]
                block = np.full(cache[block_id].size, np.nan, np.float32)
                block[: len(part)] = part
                cache[block_id] = block.reshape(cache[block_id].shape)
                start += len(block)

    def forget(self, block_ids: Sequence[int], num_kept: int) -> None:
        """With `poison`, set all positions of these blocks after the first `num_kept` to NaN.

        The recurrent state of a block is set to NaN if none of its positions is kept.
        """
        if not self._poison:
            return
        for i, block_id in enumerate(block_ids):
            if block_id == NULL_BLOCK:
                continue
            start = max(0, num_kept - i * self._block_size)
            for cache in itertools.chain(*self._layers):
                cache[block_id, start:] = np.nan
            if start == 0:
                self._states[block_id] = np.nan


def round_to_int8(x: F32, group: int) -> F32:
    """Round to integers times a scale per `group` columns: their largest magnitude / 127, rounded up to bf16."""
    rounded = np.empty_like(x)
    for begin in range(0, x.shape[-1], group):
        part = x[..., begin : begin + group]
        wanted = np.maximum(np.abs(part).max(-1, keepdims=True) / np.float32(127), SMALLEST_SCALE)
        is_sound = np.isfinite(wanted)
        bits = np.where(is_sound, wanted, 1).astype(np.float32).view(np.uint32)
        scale = ((bits + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
        integers = np.rint(np.where(is_sound, part, 0) * (1 / scale))
        rounded[..., begin : begin + group] = np.where(is_sound, integers * scale, np.nan)
    return rounded


def round_rotated(x: F32, num_levels: int) -> F32:
    """Round each rotated head to odd integers below `num_levels` in magnitude, times one scale, and rotate it back.

    The scale is the least that reaches the largest column, rounded up to 3 bits of mantissa, within [2^-21, 2^10 * 1.75].
    """
    rotated = rotate(x)
    largest = np.abs(rotated).max(-1, keepdims=True)
    is_sound = np.isfinite(largest)
    bits = np.where(is_sound, largest / np.float32(num_levels - 1), 1).astype(np.float32).view(np.int32)
    scale = (((bits + 0xFFFFF) >> 20).clip(106 << 3, (106 << 3) + 254) << 20).view(np.float32)
    levels = np.rint(np.where(is_sound, rotated, 0) * (np.float32(0.5) / scale) + np.float32((num_levels - 1) / 2))
    integers = 2 * levels.clip(0, num_levels - 1) + np.float32(1 - num_levels)
    return np.where(is_sound, rotate(integers * scale), np.float32(np.nan))


def rotate(x: F32) -> F32:
    """Multiply columns by a Hadamard matrix, which is its own inverse.

    A group has as many columns as the largest power of two that divides their number.
    """
    columns = x.shape[-1]
    size = columns & -columns
    rotated: F32 = x.reshape(*x.shape[:-1], columns // size, size)
    apart = 1
    while apart < size:
        pairs = rotated.reshape(*rotated.shape[:-1], size // (2 * apart), 2, apart)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        rotated = np.stack([first + second, first - second], axis=-2).reshape(rotated.shape)
        apart *= 2
    rotated = rotated.reshape(x.shape) / np.sqrt(np.float32(size))
    return rotated


def round_to_bf16(x: F32) -> F32:
    """Return the nearest bfloat16, as float32; ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
