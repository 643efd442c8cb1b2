"""Products of activations with matrices of any layout, in Triton. Called by `linear`; large dense products are cuBLAS's there.

A program computes one tile of 128 outputs for a tile of tokens. The weights are the left operand: those that are unpacked in
registers are multiplied from there, and a step with few tokens pads the short side of the product, not the long one.
Few programs can't draw a device's whole bandwidth, so the columns of a small matrix are cut into splits, of which each has its
own sum. How many there are follows from the matrix alone, and they are added in order, whether programs of their own computed
them (few tokens) or one program one after the other. So with one `block_tokens` the bits of a token's result never depend on
how many tokens there are.
"""
# ruff: noqa: ANN001, ANN202, N803, N806, SIM300  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.weights import TILE_ROWS, DenseMatrix, Matrix

PROGRAMS = 264
"""Wanted at least: two for each multiprocessor of an H200. A constant, so that the bits are the same on every device."""
LEAST_STEPS = 8
"""Of a split."""
DENSE_STEP_COLS = 64
FIXED_BLOCK_TOKENS = 64
MAX_PARALLEL_TOKENS = 64
"""Beyond, there are programs enough, and sums of splits in memory would be as large as the matrix."""
REDUCE_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Cut:
    """How the columns of a matrix are walked through."""

    step_cols: int
    num_steps: int
    num_splits: int


def cut(matrix: Matrix) -> Cut:
    """Of the matrix alone."""
    if isinstance(matrix, DenseMatrix):
        step_cols, num_steps = DENSE_STEP_COLS, triton.cdiv(matrix.num_cols, DENSE_STEP_COLS)
    else:
        step_cols, num_steps = 2 * matrix.group, matrix.num_pairs
    wanted = triton.cdiv(PROGRAMS, triton.cdiv(matrix.num_rows, TILE_ROWS))
    return Cut(step_cols, num_steps, max(1, min(wanted, num_steps // LEAST_STEPS)))


def num_partials(matrix: Matrix, max_tokens: int) -> int:
    """Numbers in the workspace that `matmul` needs for at most so many tokens."""
    num_splits = cut(matrix).num_splits
    return num_splits * min(max_tokens, MAX_PARALLEL_TOKENS) * matrix.num_rows if num_splits > 1 else 0


def matmul(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    *,
    partials: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> None:
    """out = x @ matrix.T (+ bias) (+ residual): x [tokens, num_cols], out [tokens, num_rows]; rows may be parts of wider ones.

    `partials` is float32 of at least `num_partials`; `residual` may be `out`. With `is_fixed`, a row's bits are the same
    however many rows there are.
    """
    num_tokens = x.shape[0]
    if num_tokens == 0:
        return
    how = cut(matrix)
    is_parallel = how.num_splits > 1 and num_tokens <= MAX_PARALLEL_TOKENS
    block_tokens = FIXED_BLOCK_TOKENS if is_fixed else min(64, max(16, triton.next_power_of_2(num_tokens)))
    tiles = triton.cdiv(matrix.num_rows, TILE_ROWS) * triton.cdiv(num_tokens, block_tokens)
    quantised = None if isinstance(matrix, DenseMatrix) else matrix
    scales = None if quantised is None else _words(quantised.scales)
    offsets = None if quantised is None or quantised.offsets is None else _words(quantised.offsets)
    _matmul_kernel[(tiles, how.num_splits if is_parallel else 1)](
        partials if is_parallel else out,
        x,
        matrix.values,
        scales,
        offsets,
        bias,
        residual,
        num_tokens,
        matrix.num_rows,
        matrix.num_cols,
        how.num_steps,
        triton.cdiv(how.num_steps, how.num_splits),
        0 if quantised is None else quantised.padded_rows,
        x.stride(0),
        matrix.num_rows if is_parallel else out.stride(0),
        residual.stride(0) if residual is not None else 0,
        BITS=16 if quantised is None else quantised.bits,
        STEP_COLS=how.step_cols,
        ZERO=0 if quantised is None else quantised.zero,
        HAS_OFFSET=offsets is not None,
        IS_HALF_SCALE=quantised is not None and quantised.scales.dtype is torch.float16,
        IS_EVEN=matrix.num_cols == how.num_steps * how.step_cols,
        SPLITS=how.num_splits,
        IS_PARALLEL=is_parallel,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_TOKENS=block_tokens,
        BLOCK_ROWS=TILE_ROWS,
        num_warps=4,
        num_stages=4,
    )
    if is_parallel:
        _add_splits_kernel[(num_tokens, triton.cdiv(matrix.num_rows, REDUCE_BLOCK))](
            out,
            partials,
            bias,
            residual,
            num_tokens,
            matrix.num_rows,
            out.stride(0),
            residual.stride(0) if residual is not None else 0,
            SPLITS=how.num_splits,
            HAS_BIAS=bias is not None,
            HAS_RESIDUAL=residual is not None,
            BLOCK=REDUCE_BLOCK,
            num_warps=4,
        )


def _words(scales: torch.Tensor) -> torch.Tensor:
    """A pair of half-precision scales as one word: loads of less than four bytes a thread are not made ahead of time."""
    return scales.view(torch.int32) if scales.dtype is torch.float16 else scales


@triton.jit
def _number(stored, DTYPE: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr):
    """Stored integers as exact numbers."""
    if BITS == 8:
        return stored.to(DTYPE)
    # A conversion is an eighth as fast as arithmetic, so the nibble becomes the lowest bits of a number from 128 (or 1024) on.
    if DTYPE == tl.bfloat16:
        return (stored.to(tl.int16) | 0x4300).to(tl.bfloat16, bitcast=True) - (128.0 + ZERO)
    if DTYPE == tl.float16:
        return (stored.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - (1024.0 + ZERO)
    return stored.to(DTYPE) - ZERO


@triton.jit
def _pair_of_scales(ptr, at, IS_HALF: tl.constexpr):
    """The scales of a pair's first and second group. [rows] each"""
    if IS_HALF:
        words = tl.load(ptr + at)
        first = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        second = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True)
        return first.to(tl.float32), second.to(tl.float32)
    else:
        return tl.load(ptr + 2 * at), tl.load(ptr + 2 * at + 1)


@triton.jit
def _load_tokens(ptrs, token_mask, first_col, num_cols, GROUP: tl.constexpr, IS_EVEN: tl.constexpr):
    """[tokens, GROUP] from a column on."""
    cols = tl.arange(0, GROUP)
    mask = token_mask[:, None] if IS_EVEN else token_mask[:, None] & (first_col + cols < num_cols)[None, :]
    return tl.load(ptrs + first_col + cols[None, :], mask=mask, other=0.0)


@triton.jit
def _finish(
    total, bias_ptr, residual_ptr, residual_at, rows, row_mask, mask, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr
):
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows, mask=row_mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit(do_not_specialize=["num_tokens"])
def _matmul_kernel(
    out_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_cols,
    num_steps,
    split_steps,
    padded_rows,
    x_stride,
    out_stride,
    residual_stride,
    BITS: tl.constexpr,
    STEP_COLS: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_HALF_SCALE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    SPLITS: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    # Programs that read the same weights are neighbours: the second finds them in the cache.
    num_token_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS)
    tile, token_tile = tl.program_id(0) // num_token_tiles, tl.program_id(0) % num_token_tiles
    dtype = x_ptr.dtype.element_ty
    GROUP: tl.constexpr = STEP_COLS // 2

    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = tokens < num_tokens
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    lanes = tl.arange(0, BLOCK_ROWS)
    rows = tile * BLOCK_ROWS + lanes
    row_mask = rows < num_rows
    step_cols = tl.arange(0, STEP_COLS)
    group_cols = tl.arange(0, GROUP)
    if BITS == 16:
        value_ptrs = values_ptr + rows.to(tl.int64)[:, None] * num_cols
    else:
        STEP_VALUES: tl.constexpr = BLOCK_ROWS * GROUP * (2 if BITS == 8 else 1)
        value_ptrs = values_ptr + tile.to(tl.int64) * num_steps * STEP_VALUES + lanes[:, None] * GROUP + group_cols[None, :]
        ones = tl.full((BLOCK_ROWS, GROUP), 1.0, dtype)

    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    first_split = tl.program_id(1)
    end_split = first_split + 1 if IS_PARALLEL else SPLITS
    for split in range(first_split, end_split):
        acc = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        for step in range(split * split_steps, tl.minimum(num_steps, (split + 1) * split_steps)):
            first_col = step * STEP_COLS
            if BITS == 16:
                mask = row_mask[:, None]
                if not IS_EVEN:
                    mask = mask & (first_col + step_cols < num_cols)[None, :]
                weights = tl.load(value_ptrs + first_col + step_cols[None, :], mask=mask, other=0.0)
                x = _load_tokens(x_ptrs, token_mask, first_col, num_cols, STEP_COLS, IS_EVEN)
                acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
            else:
                stored = tl.load(value_ptrs + step * STEP_VALUES)
                if BITS == 4:
                    first = _number(stored & 15, dtype, BITS, ZERO)
                    second = _number(stored >> 4, dtype, BITS, ZERO)
                else:
                    first = _number(stored, dtype, BITS, ZERO)
                    second = _number(tl.load(value_ptrs + step * STEP_VALUES + BLOCK_ROWS * GROUP), dtype, BITS, ZERO)
                first_x = tl.trans(_load_tokens(x_ptrs, token_mask, first_col, num_cols, GROUP, IS_EVEN))
                second_x = tl.trans(_load_tokens(x_ptrs, token_mask, first_col + GROUP, num_cols, GROUP, IS_EVEN))
                scale_at = step * padded_rows + rows
                first_scale, second_scale = _pair_of_scales(scales_ptr, scale_at, IS_HALF_SCALE)
                acc += tl.dot(first, first_x, input_precision="ieee") * first_scale[:, None]
                acc += tl.dot(second, second_x, input_precision="ieee") * second_scale[:, None]
                if HAS_OFFSET:
                    # A group's offset times the sum of its activations. The matrix unit has time to add them up, in the layout
                    # in which they are wanted.
                    first_offset, second_offset = _pair_of_scales(offsets_ptr, scale_at, IS_HALF_SCALE)
                    acc += tl.dot(ones, first_x, input_precision="ieee") * first_offset[:, None]
                    acc += tl.dot(ones, second_x, input_precision="ieee") * second_offset[:, None]
        total += acc

    mask = row_mask[:, None] & token_mask[None, :]
    if IS_PARALLEL:
        tokens += first_split * num_tokens
    else:
        at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        total = _finish(total, bias_ptr, residual_ptr, at, rows[:, None], row_mask[:, None], mask, HAS_BIAS, HAS_RESIDUAL)
    out_ptrs = out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"])
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
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(partials_ptr + (split * num_tokens + token) * num_rows + rows, mask=mask, other=0.0)
    at = token * residual_stride + rows
    total = _finish(total, bias_ptr, residual_ptr, at, rows, mask, mask, HAS_BIAS, HAS_RESIDUAL)
    tl.store(out_ptr + token * out_stride + rows, total.to(out_ptr.dtype.element_ty), mask=mask)
