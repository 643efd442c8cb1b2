"""The keys and queries of distances of disentangled attention, as text_attention.cpp reads them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native._native import Engine
from penstock.models.program import TextAttention
from penstock.models.relative import FloatArray, keys_and_queries, rows_of

_BLOCK = 32  # `kBlock` of text_attention.cpp: positions are computed by so many
_LARGEST_INTEGER, _LARGEST_NORM = np.float32(32767), np.float32(46000)  # as in native/kernels/kernels.h


def add_relative(
    engine: Engine, op: TextAttention, num_positions: int, matrix: Callable[[str], FloatArray]
) -> tuple[int, int, int, int, int]:
    """Give the engine the distances within texts of up to `num_positions` tokens, if the operation has any.

    `matrix` returns a weight. Returns the ids of keys, queries and scales, the number of distances, and which is 0.
    """
    if op.relative is None:
        return -1, -1, -1, 0, 0
    rows = np.pad(rows_of(op.relative.spec, num_positions), (0, -num_positions % _BLOCK), mode="edge")
    ids: list[int] = []
    scales: list[FloatArray] = []
    for part in keys_and_queries(op.relative, matrix):
        integers, scale = _rounded(part.reshape(-1, op.num_heads, op.head_dim))
        pairs = np.pad(integers, ((0, 0), (0, 0), (0, op.head_dim % 2))).view(np.int32)
        ids.append(engine.add_integers(pairs.transpose(1, 2, 0).take(rows, axis=2).view(np.int16).reshape(-1)))
        scales.append(scale)
    return ids[0], ids[1], engine.add_vector(np.concatenate(scales)), len(rows), num_positions - 1


def _rounded(heads: FloatArray) -> tuple[NDArray[np.int16], FloatArray]:
    """Return integers [rows, heads, columns] of 16 bits whose products' sums fit 32 bits, and the scale of each head."""
    with np.errstate(all="ignore"):  # NaN becomes an arbitrary integer, but its scale is NaN
        norms, largest = np.sqrt(np.square(heads).sum(axis=-1)).max(axis=0), np.abs(heads).max(axis=(0, 2))
        scale = np.maximum(np.maximum(norms / _LARGEST_NORM, largest / _LARGEST_INTEGER), np.float32(1e-24))
        return np.rint(heads / scale[:, None]).astype(np.int16), scale
