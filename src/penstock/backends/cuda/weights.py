"""Loads weight matrices in the layout that `linear` and its kernels read.

Floats become one dtype, or fp8 with row scales. Quantised weights stay integers, with value = scale * integer (+ offset) per
group; only scales are rounded, to half precision. fp8 stays fp8.

For contiguous reads, a tile of 128 rows stores its columns in steps of 64. A 16-bit word packs 4 (or 2) columns, 16 apart: a
shift and a mask turn two words into a tensor-core register.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda import float8
from penstock.models import formats
from penstock.models.formats import BLOCKS, GROUP_OF_16, GroupedIntegers, WeightFormat, grouped_integers, padded
from penstock.models.weights import BlockScales, WeightTensor
from penstock.types.errors import ModelError

TILE_ROWS = 128
"""Rows of a tile. A program of a product computes one tile."""
STEP_COLS = 64
QUARTER_COLS = 16
"""Columns that tensor cores multiply at once."""
FOUR_BITS = formats.FOUR_BITS | {WeightFormat.Q2_K, WeightFormat.Q3_K}
"""Formats that are stored as 4-bit integers. Other quantised formats become 8-bit integers."""
SIGNED_ZERO = 8
"""Offset that makes signed 4-bit integers unsigned."""
CENTRES = {WeightFormat.Q2_K: 2, WeightFormat.Q4_1: 8, WeightFormat.Q4_K: 8, WeightFormat.Q5_1: 16, WeightFormat.Q5_K: 16}
"""Centres of the range of unsigned integers. Subtracting them makes offsets, and so bf16 rounding errors, smaller."""
LARGEST_HALF = 65504.0
FLOAT8_GROUP = 32
"""Columns per scale, if fp8 rows have several scales. It divides the block sizes of files."""
CHUNK_ROWS = 2048


@dataclass(frozen=True, slots=True, eq=False)
class DenseMatrix:
    values: torch.Tensor
    """[num_rows, num_cols]"""
    column_order: torch.Tensor | None = None
    """For each column of `values`, the column of x that it multiplies; None: the same one. int64 [num_cols]"""

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
    """A weight matrix of integers or fp8, in tiles of `TILE_ROWS` rows and `STEP_COLS` columns, padded with 0.

    Value = (number * group scale (+ group offset)) * row scale. Either scale may be absent.
    """

    num_rows: int
    num_cols: int
    bits: int
    group: int
    """Columns per scale: 32 or 16, or 0 if only rows have scales."""
    values: torch.Tensor
    """int16 words. `place` is the last index; columns count within a step.

    - 4 bits: [num_tiles, num_steps, TILE_ROWS, 16]; bits 4 i to 4 i + 3 are column 16 i + place
    - 8 bits: [num_tiles, num_steps, half, TILE_ROWS, 16], half 0 or 1; byte i is column 32 half + 16 i + place
    """
    scales: torch.Tensor | None
    """float16, or float32 if x is. [num_steps, num_tiles * TILE_ROWS, STEP_COLS / group]"""
    offsets: torch.Tensor | None = None
    """As `scales`."""
    row_scales: torch.Tensor | None = None
    """float32 [num_tiles * TILE_ROWS]"""
    is_float: bool = False
    """Whether the 8-bit numbers are fp8 (e4m3), without NaN."""
    column_order: torch.Tensor | None = None
    """As in `DenseMatrix`."""

    @property
    def num_steps(self) -> int:
        return int(self.values.shape[1])

    @property
    def padded_rows(self) -> int:
        return int(self.values.shape[0]) * TILE_ROWS

    @property
    def zero(self) -> int:
        """The number to subtract from stored 4-bit integers, which are unsigned."""
        return SIGNED_ZERO if self.bits == 4 else 0

    @property
    def num_bytes(self) -> int:
        parts = (self.values, self.scales, self.offsets, self.row_scales)
        return sum(_num_bytes(part) for part in parts if part is not None)


Matrix = DenseMatrix | QuantisedMatrix


def load_matrices(
    tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device, *, round_to_fp8: bool = False
) -> list[Matrix]:
    """Load tensors of equal `num_cols`, and stack their rows into as few matrices as layouts allow.

    Raises `ModelError` for a scale or fp8 number that is not finite.
    """
    loaders: dict[_Kind, Callable[[Sequence[WeightTensor], torch.dtype, torch.device], Matrix]] = {
        _Kind.DENSE: _load_dense,
        _Kind.FLOAT8: _load_float8,
        _Kind.INTEGERS: _load_quantised,
    }
    matrices: list[Matrix] = []
    for ((kind, _, _), order), run in groupby(tensors, key=partial(_layout_and_order, round_to_fp8=round_to_fp8)):
        matrix = loaders[kind](list(run), dtype, device)
        if order is not None:
            matrix = replace(matrix, column_order=torch.tensor(order, device=device))
        matrices.append(matrix)
    return matrices


def load_vector(tensor: WeightTensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(tensor.dequantize().reshape(-1).copy()).to(device=device, dtype=dtype)


class _Kind(Enum):
    DENSE = auto()
    FLOAT8 = auto()
    INTEGERS = auto()


def _layout(tensor: WeightTensor, *, round_to_fp8: bool) -> tuple[_Kind, int, int]:
    if tensor.format in BLOCKS:
        return _Kind.INTEGERS, 4 if tensor.format in FOUR_BITS else 8, 16 if tensor.format in GROUP_OF_16 else 32
    if tensor.scales is not None:
        return _Kind.FLOAT8, 8, FLOAT8_GROUP if tensor.scales.values.shape[1] > 1 else 0
    return (_Kind.FLOAT8, 8, 0) if round_to_fp8 else (_Kind.DENSE, 16, 0)


def _layout_and_order(tensor: WeightTensor, *, round_to_fp8: bool) -> tuple[tuple[_Kind, int, int], list[int] | None]:
    order = None if tensor.column_order is None else tensor.column_order.tolist()
    return _layout(tensor, round_to_fp8=round_to_fp8), order


def _chunks(tensor: WeightTensor) -> Iterator[tuple[int, NDArray[np.generic]]]:
    """Yield (first row, raw rows in column order) in chunks, because a full copy would double the memory."""
    for begin in range(0, tensor.num_rows, CHUNK_ROWS):
        yield begin, tensor.ordered_rows(begin, min(begin + CHUNK_ROWS, tensor.num_rows))


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
    # Copied, because torch warns about read-only arrays, and mapped files are read-only.
    found = torch.from_numpy(np.array(rows.view(np.int16) if fmt is WeightFormat.BF16 else rows))
    return found.view(torch.bfloat16) if fmt is WeightFormat.BF16 else found


def _load_quantised(tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device) -> QuantisedMatrix:
    _, bits, group = _layout(tensors[0], round_to_fp8=False)
    num_rows, num_cols = sum(t.num_rows for t in tensors), tensors[0].num_cols
    padded_rows, padded_cols = padded(num_rows, TILE_ROWS), padded(num_cols, STEP_COLS)
    integers = torch.zeros((padded_rows, padded_cols), dtype=torch.int8, device=device)
    scales = np.zeros((padded_rows, padded_cols // group), np.float32)
    offsets = np.zeros_like(scales)
    has_offset, at = False, 0
    for tensor in tensors:
        for begin, parts in _read_integers(tensor):
            own = slice(at + begin, at + begin + len(parts.scales))
            integers[own, :num_cols] = torch.from_numpy(np.ascontiguousarray(parts.integers)).to(device)
            integers[own] += (SIGNED_ZERO if bits == 4 else 0) - CENTRES.get(tensor.format, 0)
            scales[own, : parts.scales.shape[1]] = parts.scales
            if parts.offsets is not None:
                with np.errstate(invalid="ignore"):  # scales that are not finite are refused below
                    offsets[own, : parts.scales.shape[1]] = parts.offsets + CENTRES[tensor.format] * parts.scales
                has_offset = True
        if not (np.abs(scales).max() <= LARGEST_HALF and np.abs(offsets).max() <= LARGEST_HALF):
            raise ModelError(
                f"the matrix {tensor.name!r} has a scale that is no finite number, or a very large one.",
                remedy="Fetch the model again.",
            )
        at += tensor.num_rows
        tensor.forget()
    scale_dtype = torch.float32 if dtype is torch.float32 else torch.float16
    return QuantisedMatrix(
        num_rows,
        num_cols,
        bits,
        group,
        _packed(integers, bits),
        _in_steps(scales, group, scale_dtype, device),
        _in_steps(offsets, group, scale_dtype, device) if has_offset else None,
    )


def _load_float8(tensors: Sequence[WeightTensor], dtype: torch.dtype, device: torch.device) -> QuantisedMatrix:
    num_rows, num_cols = sum(t.num_rows for t in tensors), tensors[0].num_cols
    padded_rows, padded_cols = padded(num_rows, TILE_ROWS), padded(num_cols, STEP_COLS)
    _, bits, group = _layout(tensors[0], round_to_fp8=True)
    codes = torch.zeros((padded_rows, padded_cols), dtype=torch.int8, device=device)
    row_scales = torch.zeros(padded_rows, dtype=torch.float32, device=device)
    shares = np.zeros((padded_rows, padded_cols // group if group else 0), np.float32)
    at = 0
    for tensor in tensors:
        for begin, rows in _chunks(tensor):
            own = slice(at + begin, at + begin + len(rows))
            if tensor.scales is None:
                codes[own, :num_cols], row_scales[own] = float8.round_rows(_floats(tensor.format, rows).to(device))
            else:
                codes[own, :num_cols] = torch.from_numpy(np.array(rows.view(np.int8))).to(device)
                of_rows, shares[own] = _parted(tensor.scales, begin, begin + len(rows), shares.shape[1])
                row_scales[own] = torch.from_numpy(of_rows).to(device)
        if float8.has_no_number(codes[at : at + tensor.num_rows]):
            raise ModelError(
                f"the matrix {tensor.name!r} has a weight that is no finite number.", remedy="Fetch the model again."
            )
        at += tensor.num_rows
        tensor.forget()
    scale_dtype = torch.float32 if dtype is torch.float32 else torch.float16
    scales = _in_steps(shares, group, scale_dtype, device) if group else None
    return QuantisedMatrix(num_rows, num_cols, bits, group, _packed(codes, bits), scales, row_scales=row_scales, is_float=True)


def _parted(scales: BlockScales, begin: int, end: int, num_groups: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Split fp8 scales into row scales [end - begin] and group scales [end - begin, num_groups].

    Group scales are relative to their row's scale and at most 1, to fit half precision.
    """
    found = scales.of_rows(begin, end)
    if not num_groups:
        return found[:, 0], np.zeros((len(found), 0), np.float32)
    largest = np.abs(found).max(axis=1, keepdims=True)
    shares = np.divide(found, largest, out=np.zeros_like(found), where=largest > 0)
    wide = np.repeat(shares, scales.block_cols // FLOAT8_GROUP, axis=1)[:, :num_groups]
    return largest[:, 0], np.pad(wide, ((0, 0), (0, num_groups - wide.shape[1])))


def _read_integers(tensor: WeightTensor) -> Iterator[tuple[int, GroupedIntegers]]:
    """Yield (first row, integers of a chunk) in order. Threads help, because NumPy releases the GIL."""

    def read(chunk: tuple[int, NDArray[np.generic]]) -> tuple[int, GroupedIntegers]:
        return chunk[0], grouped_integers(chunk[1], tensor.format, tensor.num_cols)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from pool.map(read, _chunks(tensor))


def _packed(integers: torch.Tensor, bits: int) -> torch.Tensor:
    shape = (len(integers) // TILE_ROWS, TILE_ROWS, -1, STEP_COLS // QUARTER_COLS, QUARTER_COLS)
    quarters = integers.view(shape).permute(0, 2, 3, 1, 4)  # [tile, step, quarter, row, place]
    if bits == 4:
        low, high = (quarters[:, :, i] | quarters[:, :, i + 1] << 4 for i in (0, 2))
    else:
        low, high = quarters[:, :, 0::2], quarters[:, :, 1::2]
    return torch.stack([low, high], dim=-1).view(torch.int16).squeeze(-1)


def _in_steps(parts: NDArray[np.float32], group: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    found = torch.from_numpy(parts).to(device=device, dtype=dtype)
    return found.view(len(parts), -1, STEP_COLS // group).permute(1, 0, 2).contiguous()


def _num_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.nbytes)
