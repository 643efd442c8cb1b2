"""Helpers that `backends/cuda/test_weights.py` shares with other tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.kernels import dequantise
from penstock.backends.cuda.weights import Matrix, load_matrices
from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.weights import WeightTensor
from support.backends.format_blocks import random_blocks
from support.interpreted import DEVICE


def quantised(fmt: WeightFormat, rows: int, num_blocks: int, seed: int = 0) -> WeightTensor:
    raw = random_blocks(np.random.default_rng(seed), fmt, rows, num_blocks * BLOCKS[fmt][0])
    return WeightTensor("w", rows, num_blocks * BLOCKS[fmt][0], fmt, raw)


def load(*tensors: WeightTensor, dtype: torch.dtype = torch.float32) -> list[Matrix]:
    return load_matrices(tensors, dtype, torch.device(DEVICE))


def values(matrix: Matrix) -> NDArray[np.float32]:
    """All rows, looked up the last one first, in order."""
    out = torch.full((matrix.num_rows, matrix.num_cols), torch.nan, device=DEVICE)
    ids = torch.arange(matrix.num_rows - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    dequantise.look_up(out, matrix, ids)
    return out.cpu().numpy()[::-1]
