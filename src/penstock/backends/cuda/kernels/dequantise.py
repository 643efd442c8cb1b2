"""Rows of a matrix of any layout as floats, in Triton: looked up for an embedding, or all of them for a large product.

Called by `lowering` and `linear`. Never multiplies but by a scale.
"""
# ruff: noqa: ANN001, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.weights import QUARTER_COLS, STEP_COLS, TILE_ROWS, DenseMatrix, Matrix, QuantisedMatrix

LOOKUP_BLOCK = (1, 1024)
"""Rows and columns of a program that looks up."""
UNPACK_BLOCK = (32, 128)


def look_up(out: torch.Tensor, matrix: Matrix, row_ids: torch.Tensor, scale: float = 1.0) -> None:
    """out[i] = matrix[row_ids[i]] * scale: row_ids int32 [n], out [n, num_cols]."""
    _run(out, matrix, row_ids, 0, scale, LOOKUP_BLOCK)


def unpack(out: torch.Tensor, matrix: QuantisedMatrix, first_row: int) -> None:
    """out = matrix[first_row : first_row + n]: out [n, num_cols]."""
    _run(out, matrix, None, first_row, 1.0, UNPACK_BLOCK)


def _run(
    out: torch.Tensor, matrix: Matrix, row_ids: torch.Tensor | None, first_row: int, scale: float, block: tuple[int, int]
) -> None:
    if out.shape[0] == 0:
        return
    quantised = None if isinstance(matrix, DenseMatrix) else matrix
    offsets = None if quantised is None else quantised.offsets
    _rows_kernel[(triton.cdiv(out.shape[0], block[0]), triton.cdiv(matrix.num_cols, block[1]))](
        out,
        matrix.values,
        None if quantised is None else quantised.scales,
        offsets,
        row_ids,
        out.shape[0],
        first_row,
        matrix.num_cols,
        0 if quantised is None else quantised.num_steps,
        0 if quantised is None else quantised.padded_rows,
        out.stride(0),
        scale,
        BITS=16 if quantised is None else quantised.bits,
        GROUP=0 if quantised is None else quantised.group,
        ZERO=0 if quantised is None else quantised.zero,
        HAS_OFFSET=offsets is not None,
        HAS_IDS=row_ids is not None,
        TILE=TILE_ROWS,
        STEP_COLS=STEP_COLS,
        QUARTER_COLS=QUARTER_COLS,
        BLOCK_ROWS=block[0],
        BLOCK_COLS=block[1],
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_out", "first_row"])
def _rows_kernel(
    out_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    ids_ptr,
    num_out,
    first_row,
    num_cols,
    num_steps,
    padded_rows,
    out_stride,
    factor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_IDS: tl.constexpr,
    TILE: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    cols = (tl.program_id(1) * BLOCK_COLS + tl.arange(0, BLOCK_COLS))[None, :]
    place_mask = places < num_out
    rows = tl.load(ids_ptr + places, mask=place_mask, other=0) if HAS_IDS else first_row + places
    rows = rows.to(tl.int64)[:, None]
    mask = place_mask[:, None] & (cols < num_cols)
    if BITS == 16:
        found = tl.load(values_ptr + rows * num_cols + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        step, col = cols // STEP_COLS, cols % STEP_COLS
        quarter, place = col // QUARTER_COLS, col % QUARTER_COLS
        brick = rows // TILE * num_steps + step
        if BITS == 8:
            at = ((brick * 2 + quarter // 2) * TILE + rows % TILE) * QUARTER_COLS + place
            words = tl.load(values_ptr + at, mask=mask, other=0).to(tl.int32)
            stored = words << (24 - quarter % 2 * 8) >> 24
        else:
            at = (brick * TILE + rows % TILE) * QUARTER_COLS + place
            stored = tl.load(values_ptr + at, mask=mask, other=0).to(tl.int32) >> quarter * 4 & 15
        at = (step.to(tl.int64) * padded_rows + rows) * (STEP_COLS // GROUP) + col // GROUP
        found = (stored.to(tl.float32) - ZERO) * tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            found += tl.load(offsets_ptr + at, mask=mask, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + places.to(tl.int64)[:, None] * out_stride + cols
    tl.store(out_ptrs, (found * factor).to(out_ptr.dtype.element_ty), mask=mask)
