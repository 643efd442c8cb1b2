"""Disentangled attention: the keys and queries of distances.

Sources: arXiv 2006.03654, and transformers' modeling_deberta_v2.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from penstock.models.program import Relative
from penstock.types.model_spec import ModelSpec, RelativeSpec

FloatArray = NDArray[np.float32]


def relative(spec: ModelSpec, layer: int) -> Relative | None:
    found, at = spec.layers[layer].attention.relative, f"layers.{layer}"
    if found is None:
        return None
    projections = f"{at}.k", f"{at}.k_bias", f"{at}.q", f"{at}.q_bias"
    return Relative(found, "relative", "relative_norm", "relative_norm_bias", *projections, spec.norm_eps)


def rows_of(spec: RelativeSpec, num_tokens: int) -> NDArray[np.int64]:
    """Return the table's row for each distance of a key from its query in a text, from 1 - `num_tokens` on."""
    behind = np.arange(num_tokens - 1, -num_tokens, -1)  # the query's position less the key's
    if spec.farthest:
        middle = spec.span // 2
        far, growth = np.abs(behind).clip(min=middle).astype(np.float32), np.float32((spec.farthest - 1) / middle)
        # In float32, as transformers has it.
        grown = np.ceil(np.log(far / np.float32(middle)) / np.log(growth) * np.float32(middle - 1)).astype(np.int64)
        behind = np.where(np.abs(behind) <= middle, behind, np.sign(behind) * (middle + grown))
    return (behind + spec.span).clip(0, 2 * spec.span - 1)


def keys_and_queries(relative: Relative, matrix: Callable[[str], FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Return the keys and queries of the table's rows. [rows, width of q] `matrix` returns a weight; vectors are [1, n]."""
    table = matrix(relative.table)
    with np.errstate(all="ignore"):  # inf and NaN pass, as on every backend
        centred = table - table.mean(axis=1, keepdims=True)
        variance = np.mean(centred * centred, axis=1, keepdims=True)
        normed = centred / np.sqrt(variance + np.float32(relative.eps)) * matrix(relative.norm) + matrix(relative.norm_bias)
        keys = normed @ matrix(relative.k).T + matrix(relative.k_bias)
        return keys, normed @ matrix(relative.q).T + matrix(relative.q_bias)
