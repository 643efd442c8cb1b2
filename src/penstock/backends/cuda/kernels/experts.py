"""Mixtures of experts: routing, sorting and products.

A pair is a token and one of its experts; its index is `token * num_chosen + rank`. The host does not know which experts are
chosen, so grids allow for any.
"""
# ruff: noqa: ANN001, ANN202, N803, N806  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

import torch
import triton.language as tl

from penstock.backends.cuda.kernels.attention_kernels import row_of_tile
from penstock.backends.cuda.kernels.gemm import FIXED_BLOCK_TOKENS, add_steps, constants_of, tensors_of
from penstock.backends.cuda.kernels.launch import cdiv, jit, next_power_of_2
from penstock.backends.cuda.weights import STEP_COLS, TILE_ROWS, DenseMatrix, Matrix
from penstock.models.program import Experts

ROUTED_NUMBERS = 8192
SORTED_PAIRS = 1024
FEW_PAIRS = 16
"""Up to this many pairs per expert on average, tiles have this many rows, the fewest for tensor cores."""
SUMMED_COLS = 512
LOWEST = tl.constexpr(-3.0e38)
"""The lowest score. It also replaces NaN."""


def route(
    experts: torch.Tensor,
    shares: torch.Tensor,
    x: torch.Tensor,
    router: torch.Tensor,
    router_bias: torch.Tensor | None,
    selection_bias: torch.Tensor | None,
    op: Experts,
) -> None:
    """Choose each token's experts, best first.

    Writes `experts` int32 and `shares` float32, both [tokens * num_chosen]. x [tokens, width]; router [num_experts, width] and
    biases [num_experts] are float32.
    """
    padded = next_power_of_2(op.num_experts)
    _route_kernel[(len(x),)](
        experts,
        shares,
        x,
        router,
        router_bias,
        selection_bias,
        x.stride(0),
        x.shape[1],
        op.share_factor,
        NUM_EXPERTS=op.num_experts,
        NUM_CHOSEN=op.num_experts_per_token,
        PADDED=padded,
        RANKS=next_power_of_2(op.num_experts_per_token),
        BLOCK=max(16, ROUTED_NUMBERS // padded),
        IS_SIGMOID=op.scoring == "sigmoid",
        IS_RENORMALISED=op.is_renormalised,
        HAS_ROUTER_BIAS=router_bias is not None,
        HAS_SELECTION_BIAS=selection_bias is not None,
        num_warps=4,
    )


def sort_by_expert(order: torch.Tensor, starts: torch.Tensor, experts: torch.Tensor) -> None:
    """Sort pairs by expert. Writes their indices to `order`, and each expert's first position in `order` to `starts`.

    order int32 [pairs], starts int32 [num_experts + 1].
    """
    num_experts = len(starts) - 1
    _sort_kernel[(num_experts,)](order, starts, experts, len(experts), NUM_EXPERTS=num_experts, BLOCK=SORTED_PAIRS, num_warps=4)


def multiply(
    out: torch.Tensor,
    x: torch.Tensor,
    matrix: Matrix,
    bias: torch.Tensor | None,
    order: torch.Tensor,
    starts: torch.Tensor,
    *,
    is_fixed: bool,
) -> None:
    """Multiply each pair's row of x by the matrix of its expert (+ bias). out [pairs, rows of an expert]

    `matrix` has the rows of all experts. x has a row per token or per pair; bias [num_rows]. `is_fixed`: the bits of a row do
    not depend on other rows.
    """
    num_pairs, num_experts = len(order), len(starts) - 1
    each = matrix.num_rows // num_experts
    # Only two sizes. The profile run compiles both: its decodes have few pairs, its largest step many.
    block_tokens = FEW_PAIRS if num_pairs <= FEW_PAIRS * num_experts and not is_fixed else FIXED_BLOCK_TOKENS
    _multiply_kernel[(num_pairs // block_tokens + num_experts, cdiv(each, TILE_ROWS))](
        out,
        x,
        *tensors_of(matrix),
        bias,
        order,
        starts,
        each,
        matrix.num_cols,
        cdiv(matrix.num_cols, STEP_COLS),
        0 if isinstance(matrix, DenseMatrix) else matrix.padded_rows,
        x.stride(0),
        out.stride(0),
        NUM_EXPERTS=num_experts,
        PAIRS_OF_ROW=num_pairs // len(x),
        HAS_BIAS=bias is not None,
        BLOCK_TOKENS=block_tokens,
        **constants_of(matrix),
    )


def sum_shares(out: torch.Tensor, y: torch.Tensor, shares: torch.Tensor) -> None:
    """Write the sum of y * share over each token's pairs, in order, to out [tokens, width]. y [pairs, width]"""
    _sum_kernel[(len(out), cdiv(out.shape[1], SUMMED_COLS))](
        out, y, shares, out.stride(0), y.stride(0), out.shape[1], NUM_CHOSEN=len(y) // len(out), BLOCK=SUMMED_COLS, num_warps=4
    )


@jit()
def _route_kernel(
    experts_ptr,
    shares_ptr,
    x_ptr,
    router_ptr,
    router_bias_ptr,
    selection_bias_ptr,
    x_stride,
    num_cols,
    share_factor,
    NUM_EXPERTS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    PADDED: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    IS_RENORMALISED: tl.constexpr,
    HAS_ROUTER_BIAS: tl.constexpr,
    HAS_SELECTION_BIAS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, PADDED)
    is_expert = expert < NUM_EXPERTS
    raw = tl.zeros([PADDED], tl.float32)
    for first in range(0, num_cols, BLOCK):
        col = first + tl.arange(0, BLOCK)
        is_col = col < num_cols
        x = tl.load(x_ptr + token * x_stride + col, mask=is_col, other=0.0).to(tl.float32)
        at = expert[:, None] * num_cols + col[None, :]
        weights = tl.load(router_ptr + at, mask=is_expert[:, None] & is_col[None, :], other=0.0)
        raw += tl.sum(weights * x[None, :], 1)
    if HAS_ROUTER_BIAS:
        raw += tl.load(router_bias_ptr + expert, mask=is_expert, other=0.0)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-raw))
        wanted = scores
    else:
        scores = tl.exp(raw - tl.max(tl.where(is_expert, raw, float("-inf")), 0))
        scores = scores / tl.sum(tl.where(is_expert, scores, 0.0), 0)
        wanted = raw  # choose by the router's numbers: softmax may round different ones to the same
    if HAS_SELECTION_BIAS:
        wanted = scores + tl.load(selection_bias_ptr + expert, mask=is_expert, other=0.0)
    wanted = tl.where(is_expert, tl.where(wanted > LOWEST, wanted, LOWEST), float("-inf"))
    rank = tl.arange(0, RANKS)
    chosen = tl.zeros([RANKS], tl.int32)
    shares = tl.zeros([RANKS], tl.float32)
    for i in range(NUM_CHOSEN):
        best = tl.min(tl.where(wanted == tl.max(wanted, 0), expert, PADDED), 0)  # the first of equals
        chosen = tl.where(rank == i, best, chosen)
        shares = tl.where(rank == i, tl.sum(tl.where(expert == best, scores, 0.0), 0), shares)
        wanted = tl.where(expert == best, float("-inf"), wanted)
    if IS_RENORMALISED:
        shares = shares / tl.sum(shares, 0)
    at = token * NUM_CHOSEN + rank
    tl.store(experts_ptr + at, chosen, mask=rank < NUM_CHOSEN)
    tl.store(shares_ptr + at, shares * share_factor, mask=rank < NUM_CHOSEN)


@jit(do_not_specialize=["num_pairs"])
def _sort_kernel(order_ptr, starts_ptr, experts_ptr, num_pairs, NUM_EXPERTS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    at = 0
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        found = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=NUM_EXPERTS)
        at += tl.sum((found < expert).to(tl.int32), 0)
    tl.store(starts_ptr + expert, at)
    if expert == NUM_EXPERTS - 1:
        tl.store(starts_ptr + NUM_EXPERTS, num_pairs)
    for first in range(0, num_pairs, BLOCK):
        pair = first + tl.arange(0, BLOCK)
        is_own = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=NUM_EXPERTS) == expert
        place = at + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order_ptr + place, pair, mask=is_own)
        at += tl.sum(is_own.to(tl.int32), 0)


@jit()
def _multiply_kernel(
    out_ptr,
    x_ptr,
    values_ptr,
    scales_ptr,
    offsets_ptr,
    row_scales_ptr,
    bias_ptr,
    order_ptr,
    starts_ptr,
    num_rows,
    num_cols,
    num_steps,
    padded_rows,
    x_stride,
    out_stride,
    NUM_EXPERTS: tl.constexpr,
    PAIRS_OF_ROW: tl.constexpr,
    BITS: tl.constexpr,
    STEP_COLS: tl.constexpr,
    QUARTER_COLS: tl.constexpr,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    IS_EVEN: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    IS_INTERPRETED: tl.constexpr,
):
    slot = tl.program_id(0)  # varies fastest, so that neighbouring programs read the same weights
    expert = row_of_tile(starts_ptr, slot, NUM_EXPERTS, BLOCK_TOKENS)
    start, end = tl.load(starts_ptr + expert), tl.load(starts_ptr + expert + 1)
    place = start + (slot - (start // BLOCK_TOKENS + expert)) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_pair = place < end
    if tl.max(is_pair.to(tl.int32), 0) == 0:
        return
    pair = tl.load(order_ptr + place, mask=is_pair, other=0).to(tl.int64)
    x_ptrs = x_ptr + (pair // PAIRS_OF_ROW)[:, None] * x_stride
    own = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_own = own < num_rows
    rows = expert * num_rows + tl.minimum(own, num_rows - 1)  # counted over all experts: a tile may have rows of two experts
    if BITS == 16:
        value_ptrs = values_ptr + rows.to(tl.int64)[:, None] * num_cols
    else:
        BRICK: tl.constexpr = BLOCK_ROWS * QUARTER_COLS
        tile_ptrs = values_ptr + (rows // BLOCK_ROWS).to(tl.int64)[:, None] * num_steps * (BITS // 4 * BRICK)
        value_ptrs = tile_ptrs + (rows % BLOCK_ROWS)[:, None] * QUARTER_COLS + tl.arange(0, QUARTER_COLS)[None, :]
    total = add_steps(
        tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), tl.float32), 0, num_steps, value_ptrs, x_ptrs, scales_ptr, offsets_ptr, rows,
        is_own, is_pair, num_cols, padded_rows, BITS, STEP_COLS, QUARTER_COLS, GROUP, ZERO, IS_FLOAT, HAS_OFFSET, IS_EVEN,
        BLOCK_ROWS, IS_INTERPRETED,
    )  # fmt: skip
    if HAS_ROW_SCALE:
        total *= tl.load(row_scales_ptr + rows)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    out_ptrs = out_ptr + pair[None, :] * out_stride + own[:, None]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_own[:, None] & is_pair[None, :])


@jit()
def _sum_kernel(out_ptr, y_ptr, shares_ptr, out_stride, y_stride, width, NUM_CHOSEN: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    total = tl.zeros([BLOCK], tl.float32)
    for rank in range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + rank
        y = tl.load(y_ptr + pair * y_stride + cols, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(shares_ptr + pair) * y
    tl.store(out_ptr + token * out_stride + cols, total.to(out_ptr.dtype.element_ty), mask=mask)
