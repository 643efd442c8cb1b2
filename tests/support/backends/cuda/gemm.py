"""Helpers that `backends/cuda/test_gemm.py` shares with other tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.cuda.linear import Linear, Workspace
from penstock.backends.cuda.weights import load_matrices
from penstock.models.formats import WeightFormat
from penstock.models.weights import WeightTensor
from support.interpreted import DEVICE

F32 = NDArray[np.float32]


def dense(rows: int, cols: int, seed: int = 0) -> WeightTensor:
    numbers = np.random.default_rng(seed).standard_normal((rows, cols)).astype(np.float32) / np.float32(np.sqrt(cols))
    return WeightTensor("w", rows, cols, WeightFormat.F32, numbers)


def activations(tokens: int, cols: int, seed: int = 1) -> F32:
    return np.random.default_rng(seed).standard_normal((tokens, cols)).astype(np.float32)


def product(
    tensors: list[WeightTensor],
    x: F32,
    *,
    bias: F32 | None = None,
    residual: F32 | None = None,
    deterministic: bool = False,
    in_place: bool = False,
    dtype: torch.dtype = torch.float32,
) -> F32:
    """The result of `Linear`, written into the middle of wider rows."""
    device = torch.device(DEVICE)
    workspace = Workspace(device, dtype)
    bias_on_device = None if bias is None else torch.from_numpy(bias).to(device, dtype)
    linear = Linear(load_matrices(tensors, dtype, device), bias_on_device, workspace, deterministic=deterministic)
    linear.reserve(len(x))
    workspace.allocate()
    workspace.partials.fill_(torch.nan)
    wide = torch.full((len(x), linear.num_rows + 6), torch.nan, dtype=dtype, device=device)
    out = wide[:, 2 : 2 + linear.num_rows]
    added = None if residual is None else torch.from_numpy(residual).to(device, dtype)
    if in_place and added is not None:
        out.copy_(added)
        added = out
    wide_x = torch.full((len(x), x.shape[1] + 16), torch.nan, dtype=dtype, device=device)
    wide_x[:, : x.shape[1]] = torch.from_numpy(x)
    linear(out, wide_x[:, : x.shape[1]], added)
    assert wide[:, :2].isnan().all()
    assert wide[:, -4:].isnan().all()
    return out.float().cpu().numpy()


def expected(tensors: list[WeightTensor], x: F32, bias: F32 | None = None, residual: F32 | None = None) -> F32:
    matrix = np.concatenate([tensor.dequantize() for tensor in tensors]).astype(np.float64)
    out = x.astype(np.float64) @ matrix.T
    return np.asarray(out + (0 if bias is None else bias) + (0 if residual is None else residual), np.float32)
