"""Random matrices in fp8 with scales of rows and of blocks, for tests of the cuda backend."""

from __future__ import annotations

import numpy as np

from penstock.models.formats import E4M3_VALUES, WeightFormat
from penstock.models.weights import BlockScales, WeightTensor
from support.fp8_models import to_e4m3


def float8_rows(rows: int, cols: int, seed: int = 0) -> WeightTensor:
    """Every code there is but NaN, equally often; scales so that values are about 1 / sqrt(cols), one of them 0."""
    return float8_blocks(rows, cols, 1, cols, seed)


def float8_blocks(rows: int, cols: int, block_rows: int, block_cols: int, seed: int = 0) -> WeightTensor:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 127, (rows, cols)).astype(np.uint8) | rng.integers(0, 2, (rows, cols)).astype(np.uint8) << 7
    shape = (-(-rows // block_rows), -(-cols // block_cols))
    scales = (rng.uniform(0.5, 2.0, shape) / 150 / np.sqrt(cols)).astype(np.float32)
    scales[shape[0] // 2, 0] = 0
    return WeightTensor("w", rows, cols, WeightFormat.F8_E4M3, codes, BlockScales(scales, block_rows, block_cols))


def rounded(tensor: WeightTensor) -> WeightTensor:
    """In float32, as `--weight-dtype fp8` rounds a matrix: scales of rows are powers of two, the least with which all fit."""
    values = tensor.dequantize()
    scales = np.exp2(np.ceil(np.log2(np.abs(values).max(axis=1, keepdims=True) / 448))).astype(np.float32)
    numbers = np.array(E4M3_VALUES, np.float32)[to_e4m3(values / scales)]
    return WeightTensor(tensor.name, tensor.num_rows, tensor.num_cols, WeightFormat.F32, numbers * scales)
