"""Disentangled attention: the keys and queries of distances.

Sources: arXiv 2006.03654, and transformers' modeling_deberta_v2.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Relative
from penstock.types.model_spec import ModelSpec, RelativeSpec

FloatArray = NDArray[np.float32]


def relative(spec: ModelSpec, layer: int) -> Relative | None:
    """Return what a layer's attention knows of distances, or None."""
    found, at = spec.layers[layer].attention.relative, f"layers.{layer}"
    if found is None:
        return None
    projections = f"{at}.k", f"{at}.k_bias", f"{at}.q", f"{at}.q_bias"
    norm = "relative_norm", "relative_norm_bias"
    return Relative("relative", 2 * found.span, *norm, *projections, spec.norm_eps, rows_of(found, spec.max_model_len))


@cache
def rows_of(spec: RelativeSpec, max_model_len: int) -> tuple[int, ...]:
    """Return the table's row for each distance of a key from its query, from 1 - `max_model_len` on."""
    behind = np.arange(max_model_len - 1, -max_model_len, -1)  # the query's position less the key's
    if spec.farthest:
        middle = spec.span // 2
        far, growth = np.abs(behind).clip(min=middle).astype(np.float32), np.float32((spec.farthest - 1) / middle)
        # In float32, as transformers has it.
        grown = np.ceil(np.log(far / np.float32(middle)) / np.log(growth) * np.float32(middle - 1)).astype(np.int64)
        behind = np.where(np.abs(behind) <= middle, behind, np.sign(behind) * (middle + grown))
    return tuple((behind + spec.span).clip(0, 2 * spec.span - 1).tolist())


def keys_and_queries(relative: Relative, matrix: Callable[[str], FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the keys and queries of the table's rows. [num_rows, width of q] `matrix` returns a weight; vectors are [1, n]."""
    table = matrix(relative.table)
    centred = table - table.mean(axis=1, keepdims=True)
    variance = np.mean(centred * centred, axis=1, keepdims=True)
    normed = centred / np.sqrt(variance + np.float32(relative.eps)) * matrix(relative.norm) + matrix(relative.norm_bias)
    keys = normed @ matrix(relative.k).T + matrix(relative.k_bias)
    return keys, normed @ matrix(relative.q).T + matrix(relative.q_bias)
