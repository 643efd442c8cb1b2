"""Converts rows of quantised matrices to floats, for embeddings and large products."""
# ruff: noqa: ANN001, ANN202, N803, N806  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import cdiv, jit
from penstock.backends.cuda.kernels.numbers import float8_as_float, quarter_weights, words_of
from penstock.backends.cuda.weights import QUARTER_COLS, STEP_COLS, TILE_ROWS, DenseMatrix, Matrix, QuantisedMatrix

LOOKUP_COLS = 1024


def look_up(
    out: torch.Tensor, matrix: Matrix, row_ids: torch.Tensor, scale: float = 1.0, *, added: torch.Tensor | None = None
) -> None:
    """Write matrix[row_ids[i]] * scale (+ added[i]) as floats to out[i]. row_ids int32 [n]; out, added [n, num_cols] may be
    equal.
    """
    if len(out) == 0:
        return
    quantised = None if isinstance(matrix, DenseMatrix) else matrix
    offsets = None if quantised is None else quantised.offsets
    _look_up_kernel[(len(out), cdiv(matrix.num_cols, LOOKUP_COLS))](
        out,
        matrix.values,
        None if quantised is None else quantised.scales,
        offsets,
        None if quantised is None else quantised.row_scales,
        row_ids,
        added,
        matrix.num_cols,
        0 if quantised is None else quantised.num_steps,
        0 if quantised is None else quantised.padded_rows,
        out.stride(0),
        0 if added is None else added.stride(0),
        scale,
        BITS=16 if quantised is None else quantised.bits,
        GROUP=0 if quantised is None else quantised.group,
        ZERO=0 if quantised is None else quantised.zero,
        IS_FLOAT=quantised is not None and quantised.is_float,
        HAS_OFFSET=offsets is not None,
        HAS_ROW_SCALE=quantised is not None and quantised.row_scales is not None,
        HAS_ADDED=added is not None,
        TILE=TILE_ROWS,
        STEP_COLS=STEP_COLS,
        QUARTER_COLS=QUARTER_COLS,
        BLOCK=LOOKUP_COLS,
        num_warps=4,
    )


def unpack(out: torch.Tensor, matrix: QuantisedMatrix, first_row: int) -> None:
    """Write matrix[first_row : first_row + n] as floats to `out` [n, num_cols]. `first_row` must begin a tile (else
    ValueError).
    """
    if first_row % TILE_ROWS:
        raise ValueError(f"row {first_row} is not the first of a tile of {TILE_ROWS}")
    offsets = matrix.offsets
    _unpack_kernel[(cdiv(len(out), TILE_ROWS), matrix.num_steps)](
        out,
        matrix.values,
        None if matrix.scales is None else words_of(matrix.scales),
        None if offsets is None else words_of(offsets),
        matrix.row_scales,
        len(out),
        first_row,
        matrix.num_cols,
        matrix.num_steps,
        matrix.padded_rows,
        out.stride(0),
        BITS=matrix.bits,
        GROUP=matrix.group,
        ZERO=matrix.zero,
        IS_FLOAT=matrix.is_float,
        HAS_OFFSET=offsets is not None,
        HAS_ROW_SCALE=matrix.row_scales is not None,
        TILE=TILE_ROWS,
        STEP_COLS=STEP_COLS,
        QUARTER_COLS=QUARTER_COLS,
        IS_INTERPRETED=bool(triton.knobs.runtime.interpret),
        num_warps=4,
    )


@jit()
def _look_up_kernel(
    out_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    row_scales_ptr,
    ids_ptr,
    added_ptr,
    num_cols,
    num_steps,
    padded_rows,
    out_stride,
    added_stride,
    factor,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    TILE: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(ids_ptr + place).to(tl.int64)
    mask = cols < num_cols
    if BITS == 16:
        found = tl.load(values_ptr + row * num_cols + cols, mask=mask, other=0.0).to(tl.float32)
    else:
        step, col = cols // STEP_COLS, cols % STEP_COLS
        quarter, lane = col // QUARTER_COLS, col % QUARTER_COLS
        brick = row // TILE * num_steps + step
        if BITS == 8:
            at = ((brick * 2 + quarter // 2) * TILE + row % TILE) * QUARTER_COLS + lane
            words = tl.load(values_ptr + at, mask=mask, other=0).to(tl.int32)
            stored = words << (24 - quarter % 2 * 8) >> 24
        else:
            at = (brick * TILE + row % TILE) * QUARTER_COLS + lane
            stored = tl.load(values_ptr + at, mask=mask, other=0).to(tl.int32) >> quarter * 4 & 15
        found = float8_as_float(stored) if IS_FLOAT else stored.to(tl.float32) - ZERO
        if GROUP != 0:
            at = (step.to(tl.int64) * padded_rows + row) * (STEP_COLS // GROUP) + col // GROUP
            found *= tl.load(scales_ptr + at, mask=mask, other=0.0).to(tl.float32)
            if HAS_OFFSET:
                found += tl.load(offsets_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if HAS_ROW_SCALE:
            found *= tl.load(row_scales_ptr + row)
    found *= factor
    if HAS_ADDED:
        found += tl.load(added_ptr + place.to(tl.int64) * added_stride + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + place.to(tl.int64) * out_stride + cols, found.to(out_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=["num_out", "first_row", "num_steps"])
def _unpack_kernel(
    out_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    row_scales_ptr,
    num_out,
    first_row,
    num_cols,
    num_steps,
    padded_rows,
    out_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    TILE: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    BRICK: tl.constexpr = TILE * QUARTER_COLS
    BRICKS: tl.constexpr = BITS // 4
    step = tl.program_id(1)
    lanes, places = tl.arange(0, TILE), tl.arange(0, QUARTER_COLS)
    rows = tl.program_id(0) * TILE + lanes
    tile = (first_row // TILE + tl.program_id(0)).to(tl.int64)
    at = step * padded_rows + first_row + rows
    dtype = out_ptr.dtype.element_ty
    for brick in tl.static_range(BRICKS):
        word_at = ((tile * num_steps + step) * BRICKS + brick) * BRICK + lanes[:, None] * QUARTER_COLS + places[None, :]
        words = tl.load(values_ptr + word_at)
        for i in tl.static_range(4 // BRICKS):
            weights = quarter_weights(
                words, scales_ptr, offsets_ptr, at, i, brick * (4 // BRICKS) + i, BITS, GROUP, ZERO, IS_FLOAT,
                HAS_OFFSET, STEP_COLS, QUARTER_COLS, dtype, IS_INTERPRETED,
            )  # fmt: skip
            if HAS_ROW_SCALE:
                row_scale = tl.load(row_scales_ptr + first_row + rows)  # padded, so no mask
                weights = (weights.to(tl.float32) * row_scale[:, None]).to(dtype)
            cols = step * STEP_COLS + (brick * (4 // BRICKS) + i) * QUARTER_COLS + places
            mask = (rows < num_out)[:, None] & (cols < num_cols)[None, :]
            tl.store(out_ptr + rows.to(tl.int64)[:, None] * out_stride + cols[None, :], weights, mask=mask)
