"""Adds the partial sums (splits) of a product, in order, and computes the next operation in the same kernel."""
# ruff: noqa: ANN001, ANN201, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.activation import activate_gate
from penstock.backends.cuda.kernels.launch import cdiv, jit, next_power_of_2
from penstock.backends.cuda.supported import ACTIVATIONS
from penstock.types.model_spec import Activation

BLOCK = 512


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """A matrix product as partial sums, which still must be added."""

    partials: torch.Tensor
    """float32 [num_splits, num_tokens, num_rows], flat."""
    num_splits: int
    num_tokens: int
    num_rows: int


def add_splits(out: torch.Tensor, splits: Splits, bias: torch.Tensor | None, residual: torch.Tensor | None) -> None:
    """Write the sum of splits (+ bias) (+ residual) to `out` [num_tokens, num_rows]. `residual` may be `out`."""
    _add_splits_kernel[(splits.num_tokens, cdiv(splits.num_rows, BLOCK))](
        out,
        splits.partials,
        bias,
        residual,
        splits.num_tokens,
        splits.num_rows,
        out.stride(0),
        0 if residual is None else residual.stride(0),
        SPLITS=splits.num_splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


def add_splits_and_norm(
    out: torch.Tensor,
    normed: torch.Tensor,
    splits: Splits,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    """Compute `add_splits`, and write out / sqrt(mean(out^2) + eps) * weight to `normed`; means are over whole rows."""
    _add_and_norm_kernel[(splits.num_tokens,)](
        out,
        normed,
        splits.partials,
        bias,
        residual,
        weight,
        splits.num_tokens,
        splits.num_rows,
        out.stride(0),
        normed.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SPLITS=splits.num_splits,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK=next_power_of_2(splits.num_rows),
        num_warps=min(16, max(1, next_power_of_2(splits.num_rows) // 512)),
    )


def add_splits_and_gate(out: torch.Tensor, splits: Splits, bias: torch.Tensor | None, kind: Activation) -> None:
    """Write activation(first half of the sum) * second half to `out` [num_tokens, num_rows / 2]."""
    width = splits.num_rows // 2
    _add_and_gate_kernel[(splits.num_tokens, cdiv(width, BLOCK))](
        out,
        splits.partials,
        bias,
        splits.num_tokens,
        width,
        out.stride(0),
        SPLITS=splits.num_splits,
        HAS_BIAS=bias is not None,
        KIND=ACTIVATIONS[kind],
        BLOCK=BLOCK,
        num_warps=4,
    )


@triton.jit
def finish(
    total, bias_ptr, residual_ptr, residual_at, rows, row_mask, mask, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _sum(partials_ptr, token, rows, mask, num_tokens, num_rows, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the sum of the splits. The loop is unrolled, so that loads do not wait for each other."""
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + (split * num_tokens + token) * num_rows + rows, mask=mask, other=0.0)
    return total


@jit(do_not_specialize=["num_tokens"])
def _add_splits_kernel(
    out_ptr,
    partials_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    out_stride,
    residual_stride,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < num_rows
    total = _sum(partials_ptr, token, rows, mask, num_tokens, num_rows, SPLITS, BLOCK)
    at = token * residual_stride + rows
    total = finish(total, bias_ptr, residual_ptr, at, rows, mask, mask, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out_ptr + token * out_stride + rows, total.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_tokens"])
def _add_and_norm_kernel(
    out_ptr,
    normed_ptr,
    partials_ptr,
    bias_ptr,
    residual_ptr,
    weight_ptr,
    num_tokens,
    num_rows,
    out_stride,
    normed_stride,
    residual_stride,
    eps,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, BLOCK)
    mask = rows < num_rows
    total = _sum(partials_ptr, token, rows, mask, num_tokens, num_rows, SPLITS, BLOCK)
    at = token * residual_stride + rows
    total = finish(total, bias_ptr, residual_ptr, at, rows, mask, mask, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out_ptr + token * out_stride + rows, total.to(out_ptr.dtype.element_ty), mask=mask)
    mean_square = tl.sum(total * total, axis=0) / num_rows
    weight = tl.load(weight_ptr + rows, mask=mask, other=0.0).to(tl.float32)
    normed = total / tl.sqrt(mean_square + eps) * weight
    tl.store(normed_ptr + token * normed_stride + rows, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_tokens"])
def _add_and_gate_kernel(
    out_ptr,
    partials_ptr,
    bias_ptr,
    num_tokens,
    width,
    out_stride,
    SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = rows < width
    gate = _sum(partials_ptr, token, rows, mask, num_tokens, 2 * width, SPLITS, BLOCK)
    up = _sum(partials_ptr, token, rows + width, mask, num_tokens, 2 * width, SPLITS, BLOCK)
    gate = finish(gate, bias_ptr, bias_ptr, rows, rows, mask, mask, HAS_BIAS, False)
    up = finish(up, bias_ptr, bias_ptr, rows, rows + width, mask, mask, HAS_BIAS, False)
    tl.store(out_ptr + token * out_stride + rows, activate_gate(gate, up, KIND).to(out_ptr.dtype.element_ty), mask=mask)
