"""Tensors of a GGUF file made into weights. Called by `models.gguf`; reads no metadata and converts no matrix.

A matrix stays as it is, memory-mapped; vectors become F32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import Floats, WeightFormat, dequantize, held_bytes
from penstock.models.gguf_file import GgufFile, TensorEntry
from penstock.models.weights import WeightTensor

_FLOATS: Mapping[WeightFormat, type[np.generic]] = {
    WeightFormat.F32: np.float32,
    WeightFormat.F16: np.float16,
    WeightFormat.BF16: np.uint16,
}


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """(num_rows, num_cols); a vector is one row. Leading dimensions of 1 are dropped, others count as rows."""
    return math.prod(entry.shape[:-1]), entry.shape[-1]


def loaded_bytes(entry: TensorEntry, floats: Floats = Floats.BF16) -> int:
    """Bytes of the weight that `load_tensor` makes of it, as the native backend holds it, but for its `floats`."""
    return held_bytes(WeightFormat.F32 if len(entry.shape) == 1 else entry.format, *matrix_shape(entry), floats)


def load_tensor(file: GgufFile, entry: TensorEntry, name: str, order: NDArray[np.intp] | None = None) -> WeightTensor:
    """The weight called `name`, whose row (or number, of a vector) i is the file's `order[i]`; None: i."""
    num_rows, num_cols = matrix_shape(entry)
    stored = file.tensor_bytes(entry).view(_FLOATS.get(entry.format, np.uint8)).reshape(num_rows, -1)
    if len(entry.shape) == 1:
        values = dequantize(stored, entry.format, num_cols)
        return WeightTensor(name, num_rows, num_cols, WeightFormat.F32, values if order is None else values[:, order])
    return WeightTensor(name, num_rows, num_cols, entry.format, stored, order=order)
