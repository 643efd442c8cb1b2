"""Products with matrices of any layout.

A program computes 128 outputs for a tile of tokens. Weights are the left operand, so that they multiply from registers and few
tokens need little padding. Columns are split to use the memory's bandwidth. Only the matrix decides how many splits there are,
and they are added in order. So, for one `block_tokens`, a token's bits do not depend on the number of tokens.
"""
# ruff: noqa: ANN001, ANN201, ANN202, N803, N806  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import cdiv, jit, next_power_of_2
from penstock.backends.cuda.kernels.numbers import quarter_weights, words_of
from penstock.backends.cuda.kernels.splits import Splits, finish
from penstock.backends.cuda.weights import QUARTER_COLS, STEP_COLS, TILE_ROWS, DenseMatrix, Matrix

PROGRAMS = 264
"""Programs to launch at least: two per multiprocessor of an H200. Constant, so that all devices give equal bits."""
LEAST_STEPS = 8
"""Least steps of each split."""
FIXED_BLOCK_TOKENS = 64
MAX_PARALLEL_TOKENS = 128
"""Largest number of tokens with splits. More tokens give enough programs without."""


@dataclass(frozen=True, slots=True)
class Cut:
    num_steps: int
    num_splits: int


def cut(matrix: Matrix) -> Cut:
    """Return how many steps the matrix's columns have, and into how many splits `multiply_splits` cuts them."""
    num_steps = cdiv(matrix.num_cols, STEP_COLS)
    wanted = cdiv(PROGRAMS, cdiv(matrix.num_rows, TILE_ROWS))
    return Cut(num_steps, max(1, min(wanted, num_steps // LEAST_STEPS)))


def num_partials(matrix: Matrix, max_tokens: int) -> int:
    """Return how many float32 numbers `multiply_splits` writes for up to `max_tokens`."""
    num_splits = cut(matrix).num_splits
    return num_splits * min(max_tokens, MAX_PARALLEL_TOKENS) * matrix.num_rows if num_splits > 1 else 0


def is_split(matrix: Matrix, num_tokens: int) -> bool:
    return 0 < num_tokens <= MAX_PARALLEL_TOKENS and cut(matrix).num_splits > 1


def multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    is_fixed: bool = False,
) -> None:
    """Write x @ matrix.T (+ bias) (+ residual) to `out`. x [tokens, num_cols], out [tokens, num_rows], rows may be strided.

    `residual` may be `out`. `is_fixed`: bits do not depend on the number of tokens, even if few tokens use `multiply_splits`.
    """
    if len(x):
        _launch(out, x, matrix, bias, residual, is_parallel=False, is_fixed=is_fixed)


def multiply_splits(partials: torch.Tensor, x: torch.Tensor, matrix: Matrix, *, is_fixed: bool = False) -> Splits:
    """Write partial sums of x @ matrix.T, one per split of the columns, to `partials`, float32. `splits` adds them."""
    _launch(partials, x, matrix, None, None, is_parallel=True, is_fixed=is_fixed)
    return Splits(partials, cut(matrix).num_splits, len(x), matrix.num_rows)


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    is_parallel: bool,
    is_fixed: bool,
) -> None:
    num_tokens = len(x)
    how = cut(matrix)
    block_tokens = FIXED_BLOCK_TOKENS if is_fixed else min(64, max(16, next_power_of_2(num_tokens)))
    tiles = cdiv(matrix.num_rows, TILE_ROWS) * cdiv(num_tokens, block_tokens)
    _matmul_kernel[(tiles, how.num_splits if is_parallel else 1)](
        out,
        x,
        *tensors_of(matrix),
        bias,
        residual,
        num_tokens,
        matrix.num_rows,
        matrix.num_cols,
        how.num_steps,
        cdiv(how.num_steps, how.num_splits),
        how.num_splits,
        0 if isinstance(matrix, DenseMatrix) else matrix.padded_rows,
        x.stride(0),
        matrix.num_rows if is_parallel else out.stride(0),
        0 if residual is None else residual.stride(0),
        IS_PARALLEL=is_parallel,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_TOKENS=block_tokens,
        **constants_of(matrix),
    )


def tensors_of(matrix: Matrix) -> tuple[torch.Tensor | None, ...]:
    if isinstance(matrix, DenseMatrix):
        return matrix.values, None, None, None
    scales, offsets = (None if part is None else words_of(part) for part in (matrix.scales, matrix.offsets))
    return matrix.values, scales, offsets, matrix.row_scales


def constants_of(matrix: Matrix) -> dict[str, int | bool]:
    quantised = None if isinstance(matrix, DenseMatrix) else matrix
    has_row_scale = quantised is not None and quantised.row_scales is not None
    return {
        "BITS": 16 if quantised is None else quantised.bits,
        "STEP_COLS": STEP_COLS,
        "QUARTER_COLS": QUARTER_COLS,
        "GROUP": 0 if quantised is None else quantised.group,
        "ZERO": 0 if quantised is None else quantised.zero,
        "IS_FLOAT": quantised is not None and quantised.is_float,
        "HAS_OFFSET": quantised is not None and quantised.offsets is not None,
        "HAS_ROW_SCALE": has_row_scale,
        "IS_EVEN": matrix.num_cols % STEP_COLS == 0,
        "BLOCK_ROWS": TILE_ROWS,
        "IS_INTERPRETED": bool(triton.knobs.runtime.interpret),
        "num_warps": 4,
        # Multiply each split's sum by the row scale and round before adding, as separate programs do.
        "enable_fp_fusion": not has_row_scale,
        "num_stages": 4 if quantised is None else 6,
    }


@triton.jit
def _load_tokens(ptrs, token_mask, first_col, num_cols, COLS: tl.constexpr, IS_EVEN: tl.constexpr):
    cols = tl.arange(0, COLS)
    mask = token_mask[:, None] if IS_EVEN else token_mask[:, None] & (first_col + cols < num_cols)[None, :]
    return tl.load(ptrs + first_col + cols[None, :], mask=mask, other=0.0)


@triton.jit
def add_steps(
    acc,
    begin,
    end,
    value_ptrs,
    x_ptrs,
    scales_ptr,
    offsets_ptr,
    rows,
    row_mask,
    token_mask,
    num_cols,
    padded_rows,
    BITS: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    IS_EVEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    """Add the product of the columns in steps [begin, end) to acc [rows, tokens], without row scales.

    `value_ptrs`: the rows' first columns, [rows, 1] or, for tiles, [rows, QUARTER_COLS].
    """
    dtype = x_ptrs.dtype.element_ty
    for step in range(begin, end):
        first_col = step * STEP_COLS
        if BITS == 16:
            step_cols = tl.arange(0, STEP_COLS)
            mask = row_mask[:, None]
            if not IS_EVEN:
                mask = mask & (first_col + step_cols < num_cols)[None, :]
            weights = tl.load(value_ptrs + first_col + step_cols[None, :], mask=mask, other=0.0)
            x = _load_tokens(x_ptrs, token_mask, first_col, num_cols, STEP_COLS, IS_EVEN)
            acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
        else:
            BRICKS: tl.constexpr = BITS // 4
            at = step * padded_rows + rows
            for brick in tl.static_range(BRICKS):
                words = tl.load(value_ptrs + (step * BRICKS + brick) * (BLOCK_ROWS * QUARTER_COLS))
                for i in tl.static_range(4 // BRICKS):
                    weights = quarter_weights(
                        words, scales_ptr, offsets_ptr, at, i, brick * (4 // BRICKS) + i, BITS, GROUP, ZERO, IS_FLOAT,
                        HAS_OFFSET, STEP_COLS, QUARTER_COLS, dtype, IS_INTERPRETED,
                    )  # fmt: skip
                    col = first_col + (brick * (4 // BRICKS) + i) * QUARTER_COLS
                    x = _load_tokens(x_ptrs, token_mask, col, num_cols, QUARTER_COLS, IS_EVEN)
                    acc = tl.dot(weights, tl.trans(x), acc, input_precision="ieee")
    return acc


@jit(do_not_specialize=["num_tokens", "num_steps", "split_steps", "num_splits"])
def _matmul_kernel(
    out_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    row_scales_ptr,
    bias_ptr,
    residual_ptr,
    num_tokens,
    num_rows,
    num_cols,
    num_steps,
    split_steps,
    num_splits,
    padded_rows,
    x_stride,
    out_stride,
    residual_stride,
    BITS: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_PARALLEL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    # Programs that read the same weights run together, to share the cache.
    num_token_tiles = tl.cdiv(num_tokens, BLOCK_TOKENS)
    tile, token_tile = tl.program_id(0) // num_token_tiles, tl.program_id(0) % num_token_tiles

    tokens = token_tile * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    token_mask = tokens < num_tokens
    x_ptrs = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
    lanes = tl.arange(0, BLOCK_ROWS)
    rows = tile * BLOCK_ROWS + lanes
    row_mask = rows < num_rows
    places = tl.arange(0, QUARTER_COLS)
    if BITS == 16:
        value_ptrs = values_ptr + rows.to(tl.int64)[:, None] * num_cols
    else:
        BRICK: tl.constexpr = BLOCK_ROWS * QUARTER_COLS
        BRICKS: tl.constexpr = BITS // 4
        value_ptrs = (
            values_ptr + tile.to(tl.int64) * num_steps * (BRICKS * BRICK) + lanes[:, None] * QUARTER_COLS + places[None, :]
        )

    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
    first_split = tl.program_id(1)
    end_split = first_split + 1 if IS_PARALLEL else num_splits
    for split in range(first_split, end_split):
        acc = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32)
        acc = add_steps(
            acc, split * split_steps, tl.minimum(num_steps, (split + 1) * split_steps), value_ptrs, x_ptrs, scales_ptr,
            offsets_ptr, rows, row_mask, token_mask, num_cols, padded_rows, BITS, STEP_COLS, QUARTER_COLS, GROUP, ZERO,
            IS_FLOAT, HAS_OFFSET, IS_EVEN, BLOCK_ROWS, IS_INTERPRETED,
        )  # fmt: skip
        if HAS_ROW_SCALE:  # for each split, before sums are added and not fused with it (see the launch)
            acc *= tl.load(row_scales_ptr + rows)[:, None]  # padded, so no mask
        total += acc

    mask = row_mask[:, None] & token_mask[None, :]
    if IS_PARALLEL:
        tokens += first_split * num_tokens
    else:
        at = tokens.to(tl.int64)[None, :] * residual_stride + rows[:, None]
        total = finish(total, bias_ptr, residual_ptr, at, rows[:, None], row_mask[:, None], mask, HAS_BIAS, HAS_RESIDUAL)
    out_ptrs = out_ptr + tokens.to(tl.int64)[None, :] * out_stride + rows[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=mask)
