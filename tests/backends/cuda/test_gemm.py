"""Products on the device against those of the values in float64: every layout, any number of tokens, alone or in splits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from penstock.backends.cuda.kernels import gemm
from penstock.backends.cuda.linear import Linear, Workspace
from penstock.backends.cuda.weights import load_matrices
from penstock.models.formats import BLOCKS, WeightFormat
from penstock.models.weights import WeightTensor
from support.backends.cuda.float8_weights import float8_blocks, float8_rows
from support.backends.cuda.gemm import F32, activations, dense, expected, product
from support.backends.cuda.weights import quantised
from support.interpreted import DEVICE

LAYOUTS = (
    WeightFormat.F32,
    WeightFormat.F8_E4M3,
    WeightFormat.Q4_0,
    WeightFormat.Q4_1,
    WeightFormat.Q8_0,
    WeightFormat.Q5_1,
    WeightFormat.Q6_K,
)
"""Floats of 32 and 8 bits; 4 and 8 bits with and without offsets; groups of 16."""


def weights(fmt: WeightFormat, rows: int, cols: int, seed: int = 0) -> WeightTensor:
    if fmt is WeightFormat.F8_E4M3:
        return float8_rows(rows, cols, seed)
    return quantised(fmt, rows, cols // BLOCKS[fmt][0], seed) if fmt in BLOCKS else dense(rows, cols, seed)


def on_device(array: F32 | None) -> torch.Tensor | None:
    return None if array is None else torch.from_numpy(array.copy()).to(DEVICE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("fmt", LAYOUTS)
def test_a_product_is_that_of_the_values(fmt: WeightFormat, tokens: int, deterministic: bool) -> None:
    tensors, x = [weights(fmt, 130, 256)], activations(tokens, 256)
    found = product(tensors, x, deterministic=deterministic)
    np.testing.assert_allclose(found, expected(tensors, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.Q4_1])
def test_bias_and_residual_are_added(fmt: WeightFormat, deterministic: bool, in_place: bool) -> None:
    tensors, x = [weights(fmt, 40, 64)], activations(3, 64)
    bias, residual = activations(1, 40, 2)[0], activations(3, 40, 3)
    for b, r in ((bias, None), (None, residual), (bias, residual)):
        found = product(tensors, x, bias=b, residual=r, deterministic=deterministic, in_place=in_place)
        np.testing.assert_allclose(found, expected(tensors, x, b, r), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_columns_that_fill_no_step(deterministic: bool) -> None:
    for tensor in (
        dense(20, 70),
        quantised(WeightFormat.Q4_0, 20, 3),
        quantised(WeightFormat.Q8_0, 20, 1),
        float8_rows(20, 70),
        float8_blocks(20, 150, 16, 64),
        float8_blocks(20, 70, 16, 32),
    ):
        x = activations(2, tensor.num_cols)
        found = product([tensor], x, deterministic=deterministic)
        np.testing.assert_allclose(found, expected([tensor], x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_stacked_matrices_of_several_layouts_fill_their_columns(deterministic: bool) -> None:
    kinds = (WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.F8_E4M3, WeightFormat.F32)
    tensors = [weights(fmt, 9 + i, 64, seed=i) for i, fmt in enumerate(kinds)]
    x, bias = activations(2, 64), activations(1, sum(t.num_rows for t in tensors), 5)[0]
    found = product(tensors, x, bias=bias, deterministic=deterministic)
    np.testing.assert_allclose(found, expected(tensors, x, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.F8_E4M3])
def test_many_tokens_unpack_a_quantised_matrix_in_parts(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.cuda.linear.MAX_FUSED_TOKENS", 2)
    monkeypatch.setattr("penstock.backends.cuda.linear.UNPACKED_BYTES", 1)
    tensors, x = [weights(fmt, 1030, 32)], activations(3, 32)  # 1,024 rows at a time
    bias, residual = activations(1, 1030, 2)[0], activations(3, 1030, 3)
    found = product(tensors, x, bias=bias, residual=residual)
    np.testing.assert_allclose(found, expected(tensors, x, bias, residual), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.F8_E4M3, WeightFormat.Q4_1, WeightFormat.Q6_K])
def test_a_rows_bits_do_not_depend_on_the_batch(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "LEAST_STEPS", 1)
    monkeypatch.setattr(gemm, "MAX_PARALLEL_TOKENS", 66)  # all 70 are computed by one program each, fewer by one for each split
    cols = 256
    tensor = weights(fmt, 20, cols)
    (matrix,) = load_matrices([tensor], torch.float32, torch.device(DEVICE))
    assert gemm.is_split(matrix, 66)
    assert not gemm.is_split(matrix, 70)
    x, bias, residual = activations(70, cols), activations(1, 20, 2)[0], activations(70, 20, 3)
    together = product([tensor], x, bias=bias, residual=residual, deterministic=True)
    np.testing.assert_allclose(together, expected([tensor], x, bias, residual), rtol=1e-4, atol=1e-4)
    for begin, end in ((0, 1), (63, 66), (5, 69)):
        part = product([tensor], x[begin:end], bias=bias, residual=residual[begin:end], deterministic=True)
        assert np.array_equal(part, together[begin:end])


def test_splits_cover_all_steps_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "LEAST_STEPS", 1)
    for num_blocks in (1, 3, 7):
        tensor = quantised(WeightFormat.Q4_0, 10, num_blocks)
        x = activations(2, tensor.num_cols)
        np.testing.assert_allclose(product([tensor], x), expected([tensor], x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fmt", [WeightFormat.Q4_0, WeightFormat.Q4_1, WeightFormat.Q8_0, WeightFormat.F8_E4M3])
def test_half_precision(fmt: WeightFormat) -> None:
    tensors, x = [weights(fmt, 20, 64)], activations(3, 64).astype(np.float16).astype(np.float32)
    found = product(tensors, x, dtype=torch.float16)
    np.testing.assert_allclose(found, expected(tensors, x), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.F8_E4M3, WeightFormat.Q4_1])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("is_split", [False, True])
def test_what_follows_a_product_is_the_same_in_one_kernel(
    fmt: WeightFormat, deterministic: bool, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split:
        monkeypatch.setattr(gemm, "LEAST_STEPS", 1)
    device = torch.device(DEVICE)
    tensor, x = weights(fmt, 40, 192), activations(3, 192)
    bias, residual, scale = activations(1, 40, 2)[0], activations(3, 40, 3), activations(1, 40, 4)[0]
    workspace = Workspace(device, torch.float32)
    matrices = load_matrices([tensor], torch.float32, device)
    linear = Linear(matrices, torch.from_numpy(bias).to(device), workspace, deterministic=deterministic)
    linear.reserve(3)
    workspace.allocate()
    assert gemm.is_split(linear.matrices[0], 3) == is_split

    x_there, out = torch.from_numpy(x).to(device), torch.from_numpy(residual.copy()).to(device)
    normed = torch.full((3, 40), torch.nan, device=device)
    linear.and_norm(out, normed, x_there, out, torch.from_numpy(scale).to(device), 1e-3)
    total = expected([tensor], x, bias, residual)
    np.testing.assert_allclose(out.cpu().numpy(), total, rtol=1e-4, atol=1e-4)
    wanted = total / np.sqrt((total**2).mean(1, keepdims=True) + 1e-3) * scale
    np.testing.assert_allclose(normed.cpu().numpy(), wanted, rtol=1e-4, atol=1e-4)

    gated, both = torch.full((3, 20), torch.nan, device=device), torch.full((3, 40), torch.nan, device=device)
    linear.and_gate(gated, both, x_there, "silu")
    gate, up = np.split(expected([tensor], x, bias), 2, axis=1)
    np.testing.assert_allclose(gated.cpu().numpy(), gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 60, 100, 300])
@pytest.mark.parametrize("fmt", [WeightFormat.F32, WeightFormat.F8_E4M3, *BLOCKS])
def test_bf16_on_the_device(fmt: WeightFormat, tokens: int, deterministic: bool) -> None:
    """The interpreter has no arithmetic of bf16, and no assembler."""
    tensors, x = [weights(fmt, 300, 1024)], activations(tokens, 1024)
    found, wanted = product(tensors, x, deterministic=deterministic, dtype=torch.bfloat16), expected(tensors, x)
    assert np.sqrt(((found - wanted) ** 2).mean()) < 0.01 * np.sqrt((wanted**2).mean())


@pytest.mark.parametrize("fmt", LAYOUTS)
def test_only_scales_of_rows_forbid_fused_operations(fmt: WeightFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking for cuBLAS and the own kernel fuse alike, so that a weight is the same in both."""
    kernel, found = gemm._matmul_kernel, []

    class Launches:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*args: Any, **options: Any) -> None:
                found.append(options["enable_fp_fusion"])
                kernel[grid](*args, **options)

            return launch

    monkeypatch.setattr(gemm, "_matmul_kernel", Launches())
    product([weights(fmt, 32, 256)], activations(2, 256), deterministic=True)
    assert found == [fmt is not WeightFormat.F8_E4M3]


def test_no_token_is_no_launch() -> None:
    for deterministic in (False, True):
        assert product([dense(4, 32)], activations(0, 32), deterministic=deterministic).shape == (0, 4)
