"""Rounding of floating-point weights to bf16, slice by slice to bound memory. Called by the loaders; knows no file format."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_CACHED_VALUES = 1 << 16
"""Values rounded at a time: what NumPy makes on the way stays in the second-level cache."""
_SLICE_VALUES = 1 << 22
"""Values converted at a time: 16 MiB of float32."""


def row_slices(num_rows: int, num_cols: int) -> Iterator[slice]:
    """Consecutive slices of rows that cover all of them, of a bounded number of values each (but one row at least)."""
    step = max(1, _SLICE_VALUES // max(1, num_cols))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def to_bf16(values: NDArray[np.generic]) -> NDArray[np.uint16]:
    """float16 or float32 [num_rows, num_cols], rounded to the nearest bf16, ties to even; the result is uint16 bit patterns.

    A relative error of at most 2^-9 for values of float16's or float32's normal range; NaN stays NaN.
    """
    source = np.ascontiguousarray(values).reshape(-1)
    out = np.empty(source.size, dtype=np.uint16)
    is_half = values.dtype == np.float16
    table = _round(np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)) if is_half else out
    for begin in range(0, source.size, _CACHED_VALUES):
        part = source[begin : begin + _CACHED_VALUES]
        out[begin : begin + _CACHED_VALUES] = table[part.view(np.uint16)] if is_half else _round(part)
    return out.reshape(values.shape)


def _round(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    if not np.isfinite(values).all():
        is_nan = np.isnan(values)
        rounded[is_nan] = (bits[is_nan] >> 16) | 0x40
    return rounded
