"""Attention of a tile of queries over paged keys and values, as device functions.

A sum is (acc, top, total) in float32: weighted values, largest score, sum of weights 2 ** (factor * (score - top)). It begins
as (0, -inf, 0). Bits depend only on tile starts and merge order: masked positions add exact zeros, and `fma` is explicit, so
that compilers can't choose.
"""

# ruff: noqa: ANN001, ANN201, ANN202, N803  # kernels: Triton reads their text, and names constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from penstock.backends.cuda.kernels.activation import tanh

LOG2_E = 1.4426950408889634


@triton.jit
def walk(
    acc,
    top,
    total,
    q,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    kv_head,
    position,
    begin,
    full_end,
    end,
    num_positions,
    factor,
    softcap_factor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_FULL: tl.constexpr,
):
    """Add the positions in tiles [begin, end) of a row's context to the sums of M queries.

    q [M, COLUMNS], position [M] (-1: no query); `table_ptr`: the row's block table. Queries see positions up to their own,
    within the window. Positions from `num_positions` on are not read. With `HAS_FULL`, tiles before `full_end` need no mask.

    Each loop is inside an `if`, so that it runs at least once: otherwise ptxas serialises matrix instructions (remark C7515).
    """
    if HAS_FULL:
        full_end = tl.minimum(tl.maximum(full_end, begin), end)
        if begin < full_end:
            acc, top, total = _walk_tiles(
                acc, top, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, position, begin, full_end,
                num_positions, factor, softcap_factor, NUM_KV_HEADS, HEAD_DIM, COLUMNS, KEY_GROUP, BLOCK_SIZE, TILE, WINDOW,
                SOFTCAP, IS_INT8, False,
            )  # fmt: skip
        begin = full_end
    if begin < end:
        acc, top, total = _walk_tiles(
            acc, top, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, position, begin, end,
            num_positions, factor, softcap_factor, NUM_KV_HEADS, HEAD_DIM, COLUMNS, KEY_GROUP, BLOCK_SIZE, TILE, WINDOW,
            SOFTCAP, IS_INT8, True,
        )  # fmt: skip
    return acc, top, total


@triton.jit
def merge(acc, top, total, part, part_top, part_total, factor):
    """Return the sum over two sets of positions, given the sum over each. acc, part [M, COLUMNS]; others [M]"""
    new_top = tl.maximum(top, part_top)
    kept, added = _share_kept(top, new_top, factor), _share_kept(part_top, new_top, factor)
    acc = tl.fma(acc, kept[:, None], part * added[:, None])
    return acc, new_top, tl.fma(total, kept, part_total * added)


@triton.jit
def normalised(acc, top, total, sinks_ptr, head, is_head, factor, HAS_SINKS: tl.constexpr):
    """Return the attention acc / total, or 0 if both are 0. A sink, an exponent of two, adds to the total. head, is_head [M]"""
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=is_head, other=0.0)
        base = tl.maximum(top * factor, sink)
        kept = tl.math.exp2(tl.fma(top, factor, -base))
        acc *= kept[:, None]
        total = tl.fma(total, kept, tl.math.exp2(sink - base))
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _walk_tiles(
    acc,
    top,
    total,
    q,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    table_ptr,
    kv_head,
    position,
    begin,
    end,
    num_positions,
    factor,
    softcap_factor,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_INT8: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    # Load block ids one tile ahead, so that loads do not wait for each other.
    block = _blocks(table_ptr, begin, end, num_positions, BLOCK_SIZE, TILE)
    for tile in range(begin, end):
        at = tile * TILE + tl.arange(0, TILE)
        is_there = at < num_positions
        slot = (block.to(tl.int64) * BLOCK_SIZE + at % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        block = _blocks(table_ptr, tile + 1, end, num_positions, BLOCK_SIZE, TILE)
        k_at = k_ptr + slot[:, None] * HEAD_DIM + column[None, :]
        v_at = v_ptr + slot[:, None] * HEAD_DIM + column[None, :]
        k = _load(k_at, column, is_there, HEAD_DIM, COLUMNS, IS_MASKED)
        v = _load(v_at, column, is_there, HEAD_DIM, COLUMNS, IS_MASKED)
        if IS_INT8:
            k = _scaled_keys(k, k_scale_ptr, slot, is_there, HEAD_DIM, COLUMNS, KEY_GROUP, TILE).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        if SOFTCAP > 0:
            scores = SOFTCAP * tanh(scores * softcap_factor)
        if IS_MASKED:
            visible = at[None, :] <= position[:, None]
            if WINDOW > 0:
                visible = visible & (at[None, :] > position[:, None] - WINDOW)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = _finite(new_top) * factor
        weights = tl.math.exp2(tl.fma(scores, factor, -base[:, None]))
        kept = _share_kept(top, new_top, factor)
        total = tl.fma(total, kept, tl.sum(weights, 1))
        if IS_INT8:  # A value's scale is one number per position, so scale the weight instead.
            v = v.to(tl.float32).to(q.dtype)
            weights *= tl.load(v_scale_ptr + slot, mask=is_there, other=0.0).to(tl.float32)[None, :]
        acc = tl.dot(weights.to(q.dtype), v, acc * kept[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _share_kept(top, new_top, factor):
    """Return exp2((top - new_top) * factor), and 0 before any score.

    It is 1 for equal scores, so positions that nobody sees, and parts merged with nothing, change no bit. With a product that
    is rounded before the difference, it would not be 1.
    """
    return tl.math.exp2((top - _finite(new_top)) * factor)


@triton.jit
def _finite(top):
    """Return 0 before any score, because -inf minus -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def _blocks(table_ptr, tile, end, num_positions, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + tile * TILE // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        at = tile * TILE + tl.arange(0, TILE)
        return tl.load(table_ptr + at // BLOCK_SIZE, mask=at < num_positions, other=0)


@triton.jit
def _load(pointers, column, is_there, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, IS_MASKED: tl.constexpr):
    if IS_MASKED:
        return tl.load(pointers, mask=is_there[:, None] & (column < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM == COLUMNS:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0)


@triton.jit
def _scaled_keys(
    k,
    k_scale_ptr,
    slot,
    is_there,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    groups: tl.constexpr = COLUMNS // KEY_GROUP
    num_groups: tl.constexpr = (HEAD_DIM + KEY_GROUP - 1) // KEY_GROUP
    group = tl.arange(0, groups)
    mask = is_there[:, None] & (group < num_groups)[None, :]
    scale = tl.load(k_scale_ptr + slot[:, None] * num_groups + group[None, :], mask=mask, other=0.0).to(tl.float32)
    parts = tl.reshape(k.to(tl.float32), [TILE, groups, KEY_GROUP])
    return tl.reshape(parts * scale[:, :, None], [TILE, COLUMNS])
