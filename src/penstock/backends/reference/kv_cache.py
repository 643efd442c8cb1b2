"""Owns the paged keys and values of the reference backend; the interpreter writes and reads them through block tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


class KvCache:
    """Keys and values of every layer as float32 that hold bf16 values. [num_blocks, block_size, num_kv_heads, head_dim]

    With `poison`, slots that hold no KV are NaN: whoever reads one gets NaN for an answer.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, poison: bool = False
    ) -> None:
        shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._block_size = block_size
        self._poison = poison
        self._keys: F32 = np.full(shape, np.nan, np.float32) if poison else np.zeros(shape, np.float32)
        self._values = self._keys.copy()

    def write(self, layer: int, slots: NDArray[np.int64], k: F32, v: F32) -> None:
        """Store k and v [num_tokens, num_kv_heads, head_dim], rounded to bf16, at `slots` [num_tokens]."""
        for cache, new in ((self._keys, k), (self._values, v)):
            cache[layer, slots // self._block_size, slots % self._block_size] = round_to_bf16(new)

    def read(self, layer: int, block_table: NDArray[np.int32], seq_len: int) -> tuple[F32, F32]:
        """Keys and values of the first `seq_len` positions of a row. ([seq_len, num_kv_heads, head_dim], the same)"""
        blocks = block_table[: -(-seq_len // self._block_size)]
        k, v = self._keys[layer, blocks], self._values[layer, blocks]
        return k.reshape(-1, *k.shape[2:])[:seq_len], v.reshape(-1, *v.shape[2:])[:seq_len]

    def copy_block(self, source: int, destination: int) -> None:
        for cache in (self._keys, self._values):
            cache[:, destination] = cache[:, source]

    def forget(self, block_ids: Sequence[int], num_kept: int) -> None:
        """What these blocks hold after their first `num_kept` positions has no meaning any more: poison it, if asked to."""
        if not self._poison:
            return
        for i, block_id in enumerate(block_ids):
            start = max(0, num_kept - i * self._block_size)
            for cache in (self._keys, self._values):
                cache[:, block_id, start:] = np.nan


def round_to_bf16(x: F32) -> F32:
    """The nearest bfloat16, as float32; ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32))
