"""Norms, one program per row or group, so that bits do not depend on the batch. Arithmetic is float32; rows may be strided."""

# ruff: noqa: ANN001, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton.language as tl

from penstock.backends.cuda.kernels.launch import jit, next_power_of_2


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, group: int = 0) -> None:
    """Write x / sqrt(mean(x^2) + eps) * weight to `out`; means are over `group` columns (0: whole rows).

    x, out [rows, width], may be the same. `weight` [group].
    """
    num_rows, width = x.shape
    group = group or width
    if num_rows:
        _rms_norm_kernel[(num_rows, width // group)](
            out,
            x,
            weight,
            out.stride(0),
            x.stride(0),
            group,
            eps,
            BLOCK=next_power_of_2(group),
            num_warps=_num_warps(group),
        )


def layer_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
    """Write (x - mean) / sqrt(var + eps) * weight (+ bias) to `out`; x, out [rows, width], may be the same."""
    num_rows, width = x.shape
    if num_rows:
        _layer_norm_kernel[(num_rows,)](
            out,
            x,
            weight,
            bias,
            out.stride(0),
            x.stride(0),
            width,
            eps,
            HAS_BIAS=bias is not None,
            BLOCK=next_power_of_2(width),
            num_warps=_num_warps(width),
        )


def unit_rows(out: torch.Tensor, x: torch.Tensor) -> None:
    """Scale each row of x to length 1: divide it by max(its Euclidean length, 1e-12). x, out [rows, width]."""
    num_rows, width = x.shape
    if num_rows:
        _unit_rows_kernel[(num_rows,)](
            out, x, out.stride(0), x.stride(0), width, BLOCK=next_power_of_2(width), num_warps=_num_warps(width)
        )


def _num_warps(width: int) -> int:
    """Return the number of warps per program. Only the width decides, because warps decide the order of summation."""
    return min(16, max(1, next_power_of_2(width) // 512))


@jit()
def _rms_norm_kernel(out_ptr, x_ptr, weight_ptr, out_stride, x_stride, group, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    cols = tl.arange(0, BLOCK)
    mask = cols < group
    x = tl.load(x_ptr + row * x_stride + first + cols, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=0) / group
    normed = x / tl.sqrt(mean_square + eps) * weight
    tl.store(out_ptr + row * out_stride + first + cols, normed.to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _layer_norm_kernel(
    out_ptr, x_ptr, weight_ptr, bias_ptr, out_stride, x_stride, width, eps, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / width, 0.0)
    variance = tl.sum(centred * centred, axis=0) / width
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    normed = centred / tl.sqrt(variance + eps) * weight
    if HAS_BIAS:
        normed += tl.load(bias_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, normed.to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _unit_rows_kernel(out_ptr, x_ptr, out_stride, x_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    length = tl.sqrt(tl.sum(x * x, axis=0))
    unit = x / tl.where(length < 1e-12, 1e-12, length)
    tl.store(out_ptr + row * out_stride + cols, unit.to(out_ptr.dtype.element_ty), mask=mask)
