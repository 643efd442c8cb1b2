"""Owns how matrices lie in the device's memory; made once, at load, of what a file has, and read by `linear` and its kernels.

Floats become one type. Quantised formats stay integers of 4 or 8 bits, value = scale * integer (+ offset) with a scale per
group of 32 or 16 columns, which is what the file says. They are laid out in the order in which the kernels read them: 128 rows
at a time (a tile), and of these one pair of neighbouring groups after the other, so that a program of a product reads one
contiguous run of memory. Never computes products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.models.formats import BLOCKS, WeightFormat, grouped_integers
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError

TILE_ROWS = 128
"""Rows that lie together, and that one program of a product computes."""
FOUR_BITS = frozenset({WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q4_K, WeightFormat.Q2_K, WeightFormat.Q3_K})
"""Formats whose integers fit into 4 bits; those of all other quantised ones fit into 8."""
SIGNED_ZERO = 8
"""What is added to signed 4-bit integers, which the formats without offsets have."""
CHUNK_ROWS = 2048
"""Rows that are read from the file at a time."""
LARGEST_HALF = 65504.0


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    """Rows of floats; a row is one output channel."""

    values: torch.Tensor
    """[num_rows, num_cols]"""

    @property
    def num_rows(self) -> int:
        return int(self.values.shape[0])

    @property
    def num_cols(self) -> int:
        return int(self.values.shape[1])

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.values)


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """Integers, scales and offsets in tiles of `TILE_ROWS` rows and pairs of groups; what pads them has scale and offset 0."""

    num_rows: int
    num_cols: int
    bits: int
    group: int
    values: torch.Tensor
    """4 bits: uint8 [num_tiles, num_pairs, TILE_ROWS, group], the pair's first group in the low nibbles, the second in the high
    ones. 8 bits: int8 [num_tiles, num_pairs, 2, TILE_ROWS, group]."""
    scales: torch.Tensor
    """float16 or float32 [num_pairs, num_tiles * TILE_ROWS, 2]"""
    offsets: torch.Tensor | None
    """As `scales`. Without them, a nibble is `SIGNED_ZERO` more than its integer."""

    @property
    def num_pairs(self) -> int:
        return int(self.values.shape[1])

    @property
    def padded_rows(self) -> int:
        return int(self.scales.shape[1])

    @property
    def zero(self) -> int:
        """What is to be taken off the stored integers."""
        return SIGNED_ZERO if self.bits == 4 and self.offsets is None else 0

    @property
    def num_bytes(self) -> int:
        return sum(_num_bytes(part) for part in (self.values, self.scales, self.offsets) if part is not None)


Matrix = DenseMatrix | QuantisedMatrix


def load_matrices(tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device) -> list[Matrix]:
    """The rows of all tensors, one below the other, in as few matrices as have one layout. All have the same `num_cols`.

    Raises `ModelError` for a scale that is no finite number.
    """
    matrices: list[Matrix] = []
    for (bits, _), run in groupby(tensors, key=_layout):
        load = _load_dense if bits == 16 else _load_quantised
        matrices.append(load(list(run), dtype, device))
    return matrices


def load_vector(tensor: WeightTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A norm's weight or a bias. [n]"""
    return torch.from_numpy(tensor.dequantize().reshape(-1).copy()).to(device=device, dtype=dtype)


def _layout(tensor: WeightTensor) -> tuple[int, int]:
    """Bits of a value and columns of a group."""
    if tensor.format not in BLOCKS:
        return 16, 0
    group = 16 if tensor.format in (WeightFormat.Q2_K, WeightFormat.Q3_K, WeightFormat.Q6_K) else 32
    return 4 if tensor.format in FOUR_BITS else 8, group


def _chunks(tensor: WeightTensor) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """(first row, raw rows) of a tensor, a part at a time: a copy of a whole matrix would be as large as the matrix."""
    for begin in range(0, tensor.num_rows, CHUNK_ROWS):
        yield begin, tensor.data[begin : begin + CHUNK_ROWS]


def _load_dense(tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device) -> DenseMatrix:
    values = torch.empty((sum(t.num_rows for t in tensors), tensors[0].num_cols), dtype=dtype, device=device)
    at = 0
    for tensor in tensors:
        for begin, rows in _chunks(tensor):
            values[at + begin : at + begin + len(rows)].copy_(_floats(tensor.format, rows))
        at += tensor.num_rows
        tensor.forget()
    return DenseMatrix(values)


def _floats(fmt: WeightFormat, rows: NDArray[np.generic]) -> torch.Tensor:
    # A copy, because torch warns of arrays that can't be written, as those of a mapped file.
    found = torch.from_numpy(np.array(rows.view(np.int16) if fmt is WeightFormat.BF16 else rows))
    return found.view(torch.bfloat16) if fmt is WeightFormat.BF16 else found


def _load_quantised(tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device) -> QuantisedMatrix:
    bits, group = _layout(tensors[0])
    num_rows, num_cols = sum(t.num_rows for t in tensors), tensors[0].num_cols
    padded_rows, num_pairs = _padded(num_rows, TILE_ROWS), -(-num_cols // (2 * group))
    integers = torch.zeros((padded_rows, num_pairs * 2 * group), dtype=torch.int8, device=device)
    scales = np.zeros((padded_rows, num_pairs * 2), np.float32)
    offsets = np.zeros_like(scales)
    has_offset, at = False, 0
    for tensor in tensors:
        for begin, rows in _chunks(tensor):
            parts = grouped_integers(rows, tensor.format, num_cols)
            own = slice(at + begin, at + begin + len(rows))
            integers[own, :num_cols] = torch.from_numpy(np.ascontiguousarray(parts.integers)).to(device)
            scales[own, : parts.scales.shape[1]] = parts.scales
            if parts.offsets is not None:
                offsets[own, : parts.scales.shape[1]] = parts.offsets
                has_offset = True
            elif bits == 4:
                # As nibbles from 0 on, and an offset for the difference, in case that a neighbour in the stack has offsets.
                integers[own] += SIGNED_ZERO
                offsets[own] = -SIGNED_ZERO * scales[own]
        if not (np.isfinite(scales).all() and np.isfinite(offsets).all()):
            raise ModelError(
                f"the matrix {tensor.name!r} has a scale that is no finite number.", remedy="Fetch the model again."
            )
        at += tensor.num_rows
        tensor.forget()
    scale_dtype = _scale_dtype(dtype, scales, offsets)
    return QuantisedMatrix(
        num_rows,
        num_cols,
        bits,
        group,
        _packed(integers, bits, group),
        _in_pairs(scales, scale_dtype, device),
        _in_pairs(offsets, scale_dtype, device) if has_offset else None,
    )


def _scale_dtype(dtype: torch.dtype, scales: NDArray[np.float32], offsets: NDArray[np.float32]) -> torch.dtype:
    """Half precision, which is what the files' scales are or are products of; exact where everything else is float32."""
    largest = max(np.abs(scales).max(initial=0), np.abs(offsets).max(initial=0))
    return torch.float32 if dtype is torch.float32 or largest > LARGEST_HALF else torch.float16


def _packed(integers: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    """int8 [padded_rows, padded_cols] -> `QuantisedMatrix.values`."""
    num_tiles, num_pairs = integers.shape[0] // TILE_ROWS, integers.shape[1] // (2 * group)
    pairs = integers.view(num_tiles, TILE_ROWS, num_pairs, 2, group).permute(0, 2, 3, 1, 4)
    if bits == 8:
        return pairs.contiguous()
    nibbles = pairs.to(torch.uint8)
    return (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).contiguous()


def _in_pairs(parts: NDArray[np.float32], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[padded_rows, num_groups] -> [num_pairs, padded_rows, 2]."""
    found = torch.from_numpy(parts).to(device=device, dtype=dtype)
    return found.view(len(parts), -1, 2).permute(1, 0, 2).contiguous()


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)
