"""Matrices of experts in MXFP4, as in gpt-oss. Rows become GGML's blocks of the same numbers when they are read.

In the file a byte has two neighbouring columns, in GGML's blocks two that are 16 apart.
Sources: OCP Microscaling Formats 1.0; integrations/mxfp4.py of transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.weights import WeightTensor, convert_rows
from penstock.types.errors import ModelError

U8 = NDArray[np.uint8]
_COLS, _BLOCK_BYTES = BLOCKS[WeightFormat.MXFP4]
_HALF = _COLS // 2
_NO_NUMBER = 255
"""The scale that means NaN."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Cube:
    """One matrix for each expert. `path` and `name`, of the tensor of blocks, are for error messages."""

    path: Path
    name: str
    blocks: U8
    """[num_experts, num_rows, groups, 16]"""
    scales: U8
    """[num_experts, num_rows, groups]"""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(num_experts, num_rows, num_cols)"""
        num_experts, num_rows, groups = self.scales.shape
        return num_experts, num_rows, groups * _COLS

    def matrices(self) -> Sequence[WeightTensor]:
        _, num_rows, num_cols = self.shape
        return [
            WeightTensor(self.name, num_rows, num_cols, WeightFormat.MXFP4, _Rows(self.path, self.name, *parts))
            for parts in zip(self.blocks, self.scales, strict=True)
        ]


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The rows of one matrix: `packed` [num_rows, groups, 16], `scales` [num_rows, groups]."""

    path: Path
    name: str
    packed: U8
    scales: U8

    def __getitem__(self, rows: slice | NDArray[np.intp]) -> U8:
        """Return some rows, uint8 [n, groups * 17]. Raises ModelError for a scale that is NaN."""
        packed, scales = self.packed[rows], self.scales[rows]
        if (scales == _NO_NUMBER).any():
            raise ModelError(f"{self.path}: a scale of {self.name} is not a number.", remedy="Fetch the model again.")
        groups = scales.shape[1]

        def blocks(part: slice) -> U8:
            first, second = packed[part, :, : _HALF // 2], packed[part, :, _HALF // 2 :]
            found = np.empty((*scales[part].shape, _BLOCK_BYTES), np.uint8)
            found[..., 0] = scales[part]
            found[..., 1::2] = first & 15 | second << 4
            found[..., 2::2] = first >> 4 | second & 0xF0
            return found.reshape(-1, groups * _BLOCK_BYTES)

        return convert_rows(blocks, np.empty((len(scales), groups * _BLOCK_BYTES), np.uint8), groups * _COLS)


def mxfp4_cube(path: Path, name: str, blocks: NDArray[np.generic], scales: NDArray[np.generic]) -> Mxfp4Cube:
    """Combine two tensors of bytes without reading them. Raises ModelError if their shapes do not fit."""
    if blocks.ndim != 4 or blocks.shape[3] != _HALF or blocks.shape[:3] != scales.shape or not scales.size:
        raise ModelError(
            f"{path}: {name} is {blocks.shape}, and its scales are {scales.shape}: blocks of 16 bytes have a scale each.",
            remedy="Fetch the model again.",
        )
    return Mxfp4Cube(path, name, blocks.astype(np.uint8, copy=False), scales.astype(np.uint8, copy=False))
