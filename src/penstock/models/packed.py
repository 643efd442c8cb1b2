"""Quantised matrices in packings that backends can't read: integers and MXFP4. Rows become GGML's blocks when they are read.

Sources: GPTQ, arXiv 2210.17323, https://github.com/ModelCloud/GPTQModel; AWQ, arXiv 2306.00978,
https://github.com/casper-hansen/AutoAWQ; https://github.com/vllm-project/compressed-tensors. A weight is scale * (q - zero).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import BLOCKS, WeightFormat, dequantize
from penstock.models.weights import WeightTensor, convert_rows
from penstock.types.errors import ModelError, damaged

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]
Index = NDArray[np.intp]

GROUP = 32  # columns of a block of Q4_0, Q4_1, Q8_0 or MXFP4
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of a word for each of eight consecutive rows


@dataclass(frozen=True, slots=True, eq=False)
class Integers:
    """A matrix [num_rows, num_cols] of unsigned integers, packed in 32-bit words, the first in the lowest bits."""

    words: NDArray[np.generic]
    """int32 [num_rows, words], or [words, num_cols] with `is_of_columns`; or int8, not packed."""
    bits: int  # 4 or 8
    is_of_columns: bool = False  # a word has consecutive rows of one column, not consecutive columns of one row
    nibbles: tuple[int, ...] | None = None  # the nibble of each row of a word; None: in order

    @property
    def shape(self) -> tuple[int, int]:
        """(num_rows, num_cols), including unused integers of a last word."""
        rows, cols = self.words.shape
        if self.words.dtype == np.int8:
            return rows, cols
        each = 32 // self.bits
        return (rows * each, cols) if self.is_of_columns else (rows, cols * each)

    def take(self, rows: Index) -> U8:
        """Return the unpacked integers of some rows, at least one."""
        if self.words.dtype == np.int8:
            return (self.words[rows].astype(np.int16) + (1 << self.bits - 1)).astype(np.uint8)
        if not self.is_of_columns:
            return self._unpacked(self.words[rows])
        each = 32 // self.bits
        first, last = int(rows.min()) // each, int(rows.max()) // each
        found = self._unpacked(self.words[first : last + 1].T)
        if self.nibbles is not None:
            found = found.reshape(len(found), -1, each)[:, :, self.nibbles].reshape(len(found), -1)
        return found.T[rows - first * each]

    def _unpacked(self, words: NDArray[np.generic]) -> U8:
        data = np.ascontiguousarray(words.astype("<i4", copy=False)).view(np.uint8)
        if self.bits == 8:
            return data
        found = np.empty((len(data), 2 * data.shape[1]), np.uint8)
        np.bitwise_and(data, 15, out=found[:, 0::2])
        np.right_shift(data, 4, out=found[:, 1::2])
        return found


@dataclass(frozen=True, slots=True, eq=False)
class PackedIntegers:
    """A matrix of GPTQ, AWQ or compressed-tensors. Reading its rows gives

    - floats if half precision can't hold the scales
    - Q4_0 or Q8_0 if all zero points are the middle of the range
    - otherwise Q4_1, with the offset -scale * zero
    """

    path: Path
    shape: tuple[int, int]
    format: WeightFormat
    packed: NDArray[np.generic]  # the file's array
    _integers: Integers
    _scales: NDArray[np.generic]  # [num_rows, num_groups] as in the file
    _scale_format: WeightFormat
    _zeros: Integers | None  # [num_rows, num_groups]; None: all zero points are the middle of the range
    _zero_shift: int
    _order: Index | None  # columns in the order of their groups; None: they are in order

    @property
    def num_groups(self) -> int:
        return int(self._scales.shape[1])

    @property
    def column_order(self) -> Index | None:
        """Column j of the rows that are read is column `column_order[j]` of the matrix. None: column j."""
        return None if self.format is WeightFormat.F32 else self._order

    def __getitem__(self, rows: slice | Index) -> NDArray[np.generic]:
        """Return some rows in `format`: uint8 [n, bytes of its blocks], or float32 [n, num_cols]."""
        index = np.arange(self.shape[0])[rows]
        is_float = self.format is WeightFormat.F32
        cols, num_bytes = (1, 1) if is_float else BLOCKS[self.format]
        out = np.empty((len(index), self.shape[1] // cols * num_bytes), np.float32 if is_float else np.uint8)
        make = self._floats if is_float else self._blocks
        return convert_rows(lambda part: make(index[part]), out, self.shape[1]) if len(index) else out

    def _floats(self, index: Index) -> NDArray[np.generic]:
        scales, zeros = self._scales_of(index), self._zeros_of(index)
        integers = self._integers_of(index).reshape(*scales.shape, -1)
        values: F32 = (integers.astype(np.float32) - zeros[..., None]) * scales[..., None]
        found = np.empty((len(index), self.shape[1]), np.float32)
        found[:, slice(None) if self._order is None else self._order] = values.reshape(len(index), -1)
        return found

    def _blocks(self, index: Index) -> NDArray[np.generic]:
        scales = self._scales_of(index)
        groups = self._integers_of(index).reshape(len(index), -1, GROUP)
        blocks = np.empty((*groups.shape[:2], BLOCKS[self.format][1]), np.uint8)
        repeats = groups.shape[1] // scales.shape[1]
        blocks[..., :2] = _half_bytes(scales, repeats)
        if self.format is WeightFormat.Q8_0:
            np.bitwise_xor(groups, 0x80, out=blocks[..., 2:])
        else:
            np.bitwise_or(groups[..., :16], groups[..., 16:] << 4, out=blocks[..., -16:])
        if self.format is WeightFormat.Q4_1:
            blocks[..., 2:4] = _half_bytes(-scales * self._zeros_of(index), repeats)
        return blocks.reshape(len(index), -1)

    def _integers_of(self, index: Index) -> U8:
        return self._integers.take(index)[:, slice(self.shape[1]) if self._order is None else self._order]

    def _scales_of(self, index: Index) -> F32:
        return dequantize(self._scales[index], self._scale_format, self.num_groups)

    def _zeros_of(self, index: Index) -> F32:
        return _zero_points(self._zeros, self._zero_shift, self._integers.bits, index)


def packed_integers(
    name: str,
    path: Path,
    num_cols: int,
    integers: Integers,
    scales: tuple[NDArray[np.generic], WeightFormat],
    zeros: Integers | None,
    *,
    zero_shift: int = 0,
    order: Index | None = None,
) -> PackedIntegers:
    """Return the matrix `name` of these integers. Reads scales and zero points, but no integers. Raises ModelError.

    - `scales`: [num_rows, num_groups] and their format
    - `zero_shift`: added to zero points
    - `order`: indices of columns, those of the first group first; None: the columns are in this order
    """
    values, scale_format = scales
    num_rows, num_groups = values.shape
    rows, cols = integers.shape
    if rows != num_rows or not 0 <= cols - num_cols < 32 // integers.bits or not num_rows or not num_groups:
        found = f"{rows} x {cols} integers and {num_rows} x {num_groups} scales for {num_cols} columns"
        raise damaged(path, f"{name} has {found}")
    if num_cols % (num_groups * GROUP):
        raise ModelError(
            f"{path}: {name} has {num_cols} columns in {num_groups} groups; group sizes must be multiples of 32.",
            remedy="Use a checkpoint with groups of 32 or 128 columns, or the bf16 original.",
        )
    if zeros is not None and not (num_rows <= zeros.shape[0] < num_rows + 8 and zeros.shape[1] == num_groups):
        found = f"{zeros.shape[0]} x {zeros.shape[1]} zero points for {num_rows} x {num_groups} groups"
        raise damaged(path, f"{name} has {found}")
    wide = dequantize(values, scale_format, num_groups)
    if not np.isfinite(wide).all():
        raise damaged(path, f"a scale of {name} is not a finite number")
    points = _zero_points(zeros, zero_shift, integers.bits, np.arange(num_rows))
    if zero_shift and (points > (1 << integers.bits) - 1).any():
        raise ModelError(
            f"{path}: the zero points of {name} overflowed when they were written: this version of GPTQ can't store 0.",
            remedy="Use a checkpoint in the format gptq_v2, another quantisation, or the bf16 original.",
        )
    if (points == 1 << integers.bits - 1).all():
        zeros = None
    if integers.bits == 8 and zeros is not None:
        raise ModelError(
            f"{path}: {name} has 8 bits and zero points, which is not supported.",
            remedy="Use a symmetric checkpoint of 8 bits, one of 4 bits, or the bf16 original.",
        )
    if not _is_half(wide) or (zeros is not None and not _is_half(wide * points)):
        fmt = WeightFormat.F32
    elif integers.bits == 8:
        fmt = WeightFormat.Q8_0
    else:
        fmt = WeightFormat.Q4_0 if zeros is None else WeightFormat.Q4_1
    shape = num_rows, num_cols
    return PackedIntegers(path, shape, fmt, integers.words, integers, values, scale_format, zeros, zero_shift, order)


def _zero_points(zeros: Integers | None, shift: int, bits: int, index: Index) -> F32:
    if zeros is None:
        return np.full((len(index), 1), 1 << bits - 1, np.float32)
    return zeros.take(index).astype(np.float32) + np.float32(shift)


def _half_bytes(values: F32, repeats: int) -> U8:
    return np.repeat(values.astype(np.float16), repeats, axis=1)[..., None].view(np.uint8)


def _is_half(values: F32) -> bool:
    """Return whether float16 is precise enough: no value changes by more than 2^-11 of its row's largest."""
    with np.errstate(over="ignore"):
        moved = np.abs(values.astype(np.float16).astype(np.float32) - values)
    return bool((moved <= 2.0**-11 * np.abs(values).max(axis=1, keepdims=True)).all())


# MXFP4, as in gpt-oss. In the file a byte has two neighbouring columns, in GGML's blocks two that are 16 apart.
# Sources: OCP Microscaling Formats 1.0; integrations/mxfp4.py of transformers.


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Cube:
    """The MXFP4 matrices of all experts of a layer, stored as one tensor."""

    path: Path
    name: str
    blocks: U8  # [num_experts, num_rows, groups, 16]
    scales: U8  # [num_experts, num_rows, groups]

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, num_rows, groups = self.scales.shape
        return num_experts, num_rows, groups * GROUP

    def matrices(self) -> Sequence[WeightTensor]:
        _, num_rows, num_cols = self.shape
        return [
            WeightTensor(self.name, num_rows, num_cols, WeightFormat.MXFP4, _Mxfp4Rows(self.path, self.name, *parts))
            for parts in zip(self.blocks, self.scales, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Mxfp4Rows:
    path: Path
    name: str
    packed: U8  # [num_rows, groups, 16]
    scales: U8  # [num_rows, groups]

    def __getitem__(self, rows: slice | Index) -> U8:
        """Return some rows as GGML's blocks, uint8 [n, groups * 17]. Raises ModelError for a scale that is NaN."""
        packed, scales = self.packed[rows], self.scales[rows]
        if (scales == 255).any():  # the code of NaN
            raise damaged(self.path, f"a scale of {self.name} is not a number")
        groups, block_bytes = scales.shape[1], BLOCKS[WeightFormat.MXFP4][1]

        def blocks(part: slice) -> U8:
            first, second = packed[part, :, :8], packed[part, :, 8:]
            found = np.empty((*scales[part].shape, block_bytes), np.uint8)
            found[..., 0] = scales[part]
            found[..., 1::2] = first & 15 | second << 4
            found[..., 2::2] = first >> 4 | second & 0xF0
            return found.reshape(-1, groups * block_bytes)

        return convert_rows(blocks, np.empty((len(scales), groups * block_bytes), np.uint8), groups * GROUP)


def mxfp4_cube(path: Path, name: str, blocks: NDArray[np.generic], scales: NDArray[np.generic]) -> Mxfp4Cube:
    """Combine the tensors of blocks and of scales without reading them. Raises ModelError if they do not fit."""
    if blocks.ndim != 4 or blocks.shape[3] != 16 or blocks.shape[:3] != scales.shape or not scales.size:
        shapes = f"{name} is {blocks.shape}, and its scales are {scales.shape}"
        raise damaged(path, f"{shapes}: blocks of 16 bytes have a scale each")
    return Mxfp4Cube(path, name, blocks.astype(np.uint8, copy=False), scales.astype(np.uint8, copy=False))
