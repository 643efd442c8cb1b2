"""Attention within the input texts that a step packs, and means of their tokens. Both compute in float32; attention rounds
its products' inputs.

A row's bits do not depend on other rows: its tiles begin at its first token, and masked positions add exact zeros.
"""

# ruff: noqa: ANN001, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton.language as tl

from penstock.backends.cuda.kernels.attention_kernels import row_of_tile
from penstock.backends.cuda.kernels.launch import cdiv, jit, next_power_of_2
from penstock.backends.cuda.kernels.online_softmax import LOG2_E

if TYPE_CHECKING:
    from penstock.backends.cuda.step import StepTensors
    from penstock.models.program import TextAttention

QUERY_ROWS = 64
"""(query, head) pairs of a program. With more, short texts would waste time on padding."""
WIDE_COLUMNS = 128
"""Heads wider than this use shorter tiles of keys, to fit desktop GPUs."""
MEAN_TOKENS = 16
MEAN_COLUMNS = 128


def text_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    step: StepTensors,
    op: TextAttention,
    distances: torch.Tensor | None,
) -> None:
    """Compute attention within each text, `program.TextAttention`. Tensors are [num_tokens, heads * head_dim], rows may be
    strided.

    `distances`: the program's times log2(e), float32 [num_heads, 2 * num_distances + 1].
    """
    group = op.num_heads // op.num_kv_heads
    columns = max(16, next_power_of_2(op.head_dim))
    # Only tests use float32 on a device. Tensor cores do not multiply it, and it takes twice the memory.
    is_roomy = columns <= WIDE_COLUMNS and not (q.is_cuda and q.dtype is torch.float32)
    block_m = max(QUERY_ROWS if is_roomy else 32, next_power_of_2(group))
    queries = block_m // group
    _text_attention_kernel[(op.num_kv_heads, step.num_tokens // queries + step.num_rows)](
        out,
        q,
        k,
        v,
        distances,
        step.query_start_loc,
        step.num_rows,
        out.stride(0),
        q.stride(0),
        k.stride(0),
        v.stride(0),
        op.scale * LOG2_E,
        GROUP=group,
        HEAD_DIM=op.head_dim,
        COLUMNS=columns,
        IS_CAUSAL=op.mask == "causal",
        WINDOW=op.window,
        HAS_DISTANCES=distances is not None,
        FARTHEST=op.num_distances,
        QUERIES=queries,
        BLOCK_M=block_m,
        TILE=64 if is_roomy else 32,
        num_warps=8 if columns > 64 else 4,
        num_stages=2 if is_roomy else 1,
    )


def mean_rows(out: torch.Tensor, x: torch.Tensor, step: StepTensors) -> None:
    """Write the mean of x over each sampling row's tokens to out [num_samples, width]. x [num_tokens or more, width]"""
    width = x.shape[1]
    _mean_rows_kernel[(step.num_samples, cdiv(width, MEAN_COLUMNS))](
        out,
        x,
        step.sample_tokens,
        step.positions,
        out.stride(0),
        x.stride(0),
        width,
        TOKENS=MEAN_TOKENS,
        BLOCK=MEAN_COLUMNS,
        num_warps=4,
    )


@jit(do_not_specialize=["num_rows", "query_start_loc_ptr"])
def _text_attention_kernel(
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    distances_ptr,
    query_start_loc_ptr,
    num_rows,
    out_stride,
    q_stride,
    k_stride,
    v_stride,
    factor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_DISTANCES: tl.constexpr,
    FARTHEST: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
):
    kv_head, tile = tl.program_id(0), tl.program_id(1)
    row = row_of_tile(query_start_loc_ptr, tile, num_rows, QUERIES)
    start = tl.load(query_start_loc_ptr + row)
    length = tl.load(query_start_loc_ptr + row + 1) - start
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if first_query >= length:
        return
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    is_q = ((m < QUERIES * GROUP) & (query < length))[:, None] & (column < HEAD_DIM)[None, :]
    token = (start + query).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], mask=is_q, other=0.0)
    begin = 0
    end = length
    if WINDOW > 0:
        begin = tl.maximum(first_query + 1 - WINDOW, 0) // TILE * TILE
        end = tl.minimum(end, first_query + QUERIES - 1 + WINDOW)
    if IS_CAUSAL:
        end = tl.minimum(end, first_query + QUERIES)
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in range(begin, end, TILE):
        at = first + tl.arange(0, TILE)
        is_key = (at < length)[:, None] & (column < HEAD_DIM)[None, :]
        key = (start + at).to(tl.int64)
        offset = kv_head * HEAD_DIM + column[None, :]
        k = tl.load(k_ptr + key[:, None] * k_stride + offset, mask=is_key, other=0.0)
        v = tl.load(v_ptr + key[:, None] * v_stride + offset, mask=is_key, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        ahead = at[None, :] - query[:, None]
        visible = (at < length)[None, :] & (m < QUERIES * GROUP)[:, None]
        if HAS_DISTANCES:
            place = head[:, None] * (2 * FARTHEST + 1) + FARTHEST + tl.minimum(tl.maximum(ahead, -FARTHEST), FARTHEST)
            biases = tl.load(distances_ptr + place, mask=visible, other=0.0)
            scores = tl.fma(scores, factor, biases)
        else:
            scores = scores * factor
        if IS_CAUSAL:
            visible = visible & (ahead <= 0)
        if WINDOW > 0:
            visible = visible & (ahead < WINDOW) & (ahead > -WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf minus -inf is NaN
        weights = tl.math.exp2(scores - base[:, None])
        kept = tl.math.exp2(top - base)
        total = tl.fma(total, kept, tl.sum(weights, 1))
        acc = tl.dot(weights.to(q.dtype), v, acc * kept[:, None], input_precision="ieee")
        top = new_top
    found = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    at_out = out_ptr + token[:, None] * out_stride + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(at_out, found.to(out_ptr.dtype.element_ty), mask=is_q)


@jit()
def _mean_rows_kernel(
    out_ptr, x_ptr, sample_tokens_ptr, positions_ptr, out_stride, x_stride, width, TOKENS: tl.constexpr, BLOCK: tl.constexpr
):
    sample = tl.program_id(0)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    last = tl.load(sample_tokens_ptr + sample)
    length = tl.load(positions_ptr + last) + 1
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, length, TOKENS):
        position = begin + tl.arange(0, TOKENS)
        token = (last + 1 - length + position).to(tl.int64)
        mask = (position < length)[:, None] & (cols < width)[None, :]
        total += tl.sum(tl.load(x_ptr + token[:, None] * x_stride + cols[None, :], mask=mask, other=0.0).to(tl.float32), 0)
    mean = (total / length).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + sample.to(tl.int64) * out_stride + cols, mean, mask=cols < width)
