"""Elementwise kernels: activations, gates and the softcap. They compute in float32. Rows may be strided."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import cdiv, jit
from penstock.backends.cuda.supported import ACTIVATIONS
from penstock.types.model_spec import Activation

BLOCK = 1024


def gated(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, kind: Activation) -> None:
    """Write activation(gate) * up to `out`, all [rows, width]. `out` may be `gate` or `up`."""
    if gate.shape[0]:
        _gated_kernel[_grid(gate)](
            out, gate, up, out.stride(0), gate.stride(0), up.stride(0), gate.shape[1], KIND=ACTIVATIONS[kind], BLOCK=BLOCK
        )


def act(out: torch.Tensor, x: torch.Tensor, kind: Activation) -> None:
    """Write activation(x) to `out`, both [rows, width]. `out` may be `x`."""
    if x.shape[0]:
        _act_kernel[_grid(x)](out, x, out.stride(0), x.stride(0), x.shape[1], KIND=ACTIVATIONS[kind], BLOCK=BLOCK)


def softcap(x: torch.Tensor, cap: float) -> None:
    """Replace x [rows, width] by cap * tanh(x / cap)."""
    if x.shape[0]:
        _softcap_kernel[_grid(x)](x, x.stride(0), x.shape[1], cap, BLOCK=BLOCK)


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return x.shape[0], cdiv(x.shape[1], BLOCK)


@triton.jit
def tanh(x):
    """Return tanh(x), float32, by exp2, because Triton has no tanh. It is 1 above 15; NaN stays NaN."""
    x = tl.where(x > 15.0, 15.0, x)
    return 1.0 - 2.0 / (tl.math.exp2(x * 2.8853900817779268) + 1.0)  # 2 log2(e)


@triton.jit
def activate(x, KIND: tl.constexpr):
    """Return the activation of x, float32, by the formulas of `program.GatedActivation`. NaN stays NaN."""
    if KIND == 0:
        return x / (1.0 + tl.exp(-x))
    elif KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + tanh(inner))
    elif KIND == 2:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == 3:
        return x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == 6:
        return tanh(x)
    else:
        tl.static_assert(KIND == 4 or KIND == 5)
        positive = tl.where(x < 0.0, 0.0, x)
        return positive if KIND == 4 else positive * positive


@triton.jit
def activate_gate(gate, up, KIND: tl.constexpr):
    if KIND == 7:
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return (up + 1.0) * activate(gate, 3)
    else:
        return activate(gate, KIND) * up


@jit()
def _gated_kernel(
    out_ptr, gate_ptr, up_ptr, out_stride, gate_stride, up_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    gate = tl.load(gate_ptr + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, activate_gate(gate, up, KIND).to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _act_kernel(out_ptr, x_ptr, out_stride, x_stride, width, KIND: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * out_stride + cols, activate(x, KIND).to(out_ptr.dtype.element_ty), mask=mask)


@jit()
def _softcap_kernel(x_ptr, x_stride, width, cap, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(x_ptr + row * x_stride + cols, (cap * tanh(x / cap)).to(x_ptr.dtype.element_ty), mask=mask)
