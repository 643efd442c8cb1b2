"""The paged KV cache in GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from penstock.backends.batch import NULL_BLOCK
from penstock.backends.cuda.stream import Mark, Stream
from penstock.backends.cuda.supported import key_groups
from penstock.types.kv_dtype import KvDtype

KV_DTYPES = (KvDtype.INT8, KvDtype.BF16)
"""The types of keys and values that the kernels compute with."""
KEY_SCALE_DTYPE = torch.bfloat16
"""The type of a key's scale, the same as in the reference backend."""
VALUE_SCALE_DTYPE = torch.float32
"""Scales are bf16 numbers, stored as float32: asynchronous copies need at least four bytes."""


@dataclass(slots=True, eq=False)
class KvLayer:
    """One layer's keys and values in the paged cache. `PagedKvCache.resize` replaces the tensors."""

    k: torch.Tensor
    """`k` and `v` are contiguous: [num_blocks, block_size, num_kv_heads, head_dim], int8 or the model's dtype."""
    v: torch.Tensor
    k_scale: torch.Tensor | None
    """One scale per `KEY_GROUP` columns, for int8. [num_blocks, block_size, num_kv_heads, key_groups]"""
    v_scale: torch.Tensor | None
    """One scale per head, for int8. [num_blocks, block_size, num_kv_heads]"""

    @property
    def block_size(self) -> int:
        return int(self.k.shape[1])


@dataclass(slots=True, eq=False)
class BlockRead:
    left: Mark
    """After this mark the blocks may be overwritten."""
    _arrived: Mark
    _staging: torch.Tensor | None
    """Pinned memory with the contents; None once they are copied to the caller."""
    _out: Sequence[memoryview]

    def wait(self) -> None:
        """Wait until the blocks are read, and copy them to the caller's memory."""
        if self._staging is None:
            return
        self._arrived.wait()
        for target, content in zip(self._out, self._staging.numpy(), strict=True):
            np.frombuffer(target, np.uint8)[:] = content
        self._staging = None


class PagedKvCache:
    """Keys and values of all layers, in blocks. `KvDtype.BF16` stores `dtype`: bf16, or float32 or float16 in tests.

    A position's heads are contiguous, so that a step writes a token in one piece. `poison` fills empty positions with NaN, for
    tests, except in the null block, because padding reads it.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        kv_dtype: KvDtype,
        dtype: torch.dtype,
        device: torch.device | str,
        poison: bool = False,
    ) -> None:
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"the kernels compute with {' and '.join(KV_DTYPES)} keys and values, not with {kv_dtype}")
        self.kv_dtype = kv_dtype
        self._block_size = block_size
        self._poison = poison
        self._device = torch.device(device)
        self._num_kv_heads, self._head_dim = num_kv_heads, head_dim
        self._dtype = torch.int8 if kv_dtype is KvDtype.INT8 else dtype
        self._scales: tuple[torch.Tensor, ...] = ()
        """Scales of keys, then of values; empty without int8."""
        self._allocate(num_layers, num_blocks)
        self._layers = [KvLayer(*self._of_layer(i)) for i in range(num_layers)]

    def _allocate(self, num_layers: int, num_blocks: int) -> None:
        shape = (num_layers, num_blocks, self._block_size, self._num_kv_heads)
        self._content = torch.zeros((2, *shape, self._head_dim), dtype=self._dtype, device=self._device)
        self._k, self._v = self._content
        if self.kv_dtype is KvDtype.INT8:
            k_scale = torch.zeros((*shape, key_groups(self._head_dim)), dtype=KEY_SCALE_DTYPE, device=self._device)
            self._scales = k_scale, torch.zeros(shape, dtype=VALUE_SCALE_DTYPE, device=self._device)
        self._poison_slots(slice(NULL_BLOCK + 1, None), 0)

    def resize(self, num_blocks: int) -> None:
        """Free all blocks, then allocate empty ones. Captured graphs become invalid. If it fails, the cache is unusable."""
        empty = self._k.new_empty(0)
        self._content = self._k = self._v = empty
        self._scales = ()
        for layer in self._layers:
            layer.k, layer.v, layer.k_scale, layer.v_scale = empty, empty, None, None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._allocate(len(self._layers), num_blocks)
        for i, layer in enumerate(self._layers):
            layer.k, layer.v, layer.k_scale, layer.v_scale = self._of_layer(i)

    @property
    def _parts(self) -> tuple[torch.Tensor, ...]:
        return (self._k, self._v, *self._scales)

    @property
    def num_pieces(self) -> int:
        """Number of contiguous pieces of a block: each layer's keys, then each layer's values, without scales."""
        return 2 * len(self._layers)

    @property
    def piece_bytes(self) -> int:
        return self._block_size * self._num_kv_heads * self._head_dim * int(self._dtype.itemsize)

    def pieces_as(self, dtype: torch.dtype) -> torch.Tensor:
        """View all blocks' pieces (see `num_pieces`) as one flat tensor. Piece p of block b has index p * num_blocks + b."""
        return self._content.view(-1).view(dtype)

    def layer(self, index: int) -> KvLayer:
        return self._layers[index]

    def _of_layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        k_scale, v_scale = (scale[index] for scale in self._scales) if self._scales else (None, None)
        return self._k[index], self._v[index], k_scale, v_scale

    @property
    def block_bytes(self) -> int:
        return sum(part[:, 0].numel() * part.dtype.itemsize for part in self._parts)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Queue copies of blocks, given as ids (source, destination), in order."""
        for source, destination in pairs:
            for part in self._parts:
                part[:, destination].copy_(part[:, source])

    def pack_blocks(self, block_ids: Sequence[int]) -> torch.Tensor:
        index, count = self._index(block_ids), len(block_ids)
        pieces = [part.index_select(1, index).transpose(0, 1).reshape(count, -1).view(torch.uint8) for part in self._parts]
        return torch.cat(pieces, 1)

    def unpack_blocks(self, block_ids: Sequence[int], packed: torch.Tensor) -> None:
        index = self._index(block_ids)
        widths = [part[:, 0].numel() * part.dtype.itemsize for part in self._parts]
        for part, piece in zip(self._parts, packed.split(widths, 1), strict=True):
            blocks = piece.contiguous().view(part.dtype).view(len(block_ids), part.shape[0], *part.shape[2:])
            part.index_copy_(1, index, blocks.transpose(0, 1))

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview], stream: Stream) -> BlockRead:
        """Queue copying blocks to the host on `stream`, which the caller has entered. The result's `wait` fills `out`."""
        packed = self.pack_blocks(block_ids)
        left = stream.mark()
        staging = self._staging(len(block_ids))
        staging.copy_(packed, non_blocking=True)
        return BlockRead(left, stream.mark(), staging, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        """Copy the contents to pinned memory now, and queue writing them to the blocks."""
        if not block_ids:
            return
        staging = self._staging(len(block_ids))
        for target, content in zip(staging.numpy(), contents, strict=True):
            target[:] = np.frombuffer(content, np.uint8)
        self.unpack_blocks(block_ids, staging.to(self._device, non_blocking=True))

    def _staging(self, num_blocks: int) -> torch.Tensor:
        """Return pinned memory. PyTorch does not reuse it before the device has copied it."""
        return torch.empty((num_blocks, self.block_bytes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(block_ids, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return index.to(self._device, non_blocking=True)

    def forget(self, block_ids: Sequence[int], num_kept: int) -> None:
        """With the test option `poison`, fill a block table's positions from `num_kept` on with NaN, to notice stale reads."""
        for i, block_id in enumerate(block_ids):
            if block_id != NULL_BLOCK:
                self._poison_slots(slice(block_id, block_id + 1), max(0, num_kept - i * self._block_size))

    def _poison_slots(self, blocks: slice, start: int) -> None:
        if self._poison:
            for part in self._scales or self._parts:
                part[:, blocks, start:] = torch.nan
