"""Attention kernels: for rows with one query, for tiles of queries, and to merge parts of contexts."""

# ruff: noqa: ANN001, ANN201, ANN202, N803  # kernels: Triton reads their text, and names constants in capitals

from __future__ import annotations

import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import jit
from penstock.backends.cuda.kernels.online_softmax import merge, normalised, walk

MERGED_AT_ONCE = tl.constexpr(8)
UNSPECIALISED = ["tables_ptr", "query_start_loc_ptr", "context_lens_ptr"]
"""Arguments with any alignment. If Triton compiled kernels for each alignment, the server would stop for seconds."""


@triton.jit
def _splits(
    position, num_programs, TILE: tl.constexpr, SPLIT_TILES: tl.constexpr, LEAST_TILES: tl.constexpr, WINDOW: tl.constexpr
):
    """Return how a query's context is cut: first and end tile, the first part's first tile, tiles per part, number of parts."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(position + 1 - WINDOW, 0) // TILE
    end = position // TILE + 1
    if SPLIT_TILES > 0:
        base = first // SPLIT_TILES * SPLIT_TILES
        return first, end, base, SPLIT_TILES, (end - base + SPLIT_TILES - 1) // SPLIT_TILES
    else:
        tiles = tl.maximum((end - first + num_programs - 1) // num_programs, LEAST_TILES)
        return first, end, first, tiles, (end - first + tiles - 1) // tiles


@jit(do_not_specialize=["num_parts", "is_direct", *UNSPECIALISED])
def decode_kernel(
    parts_ptr,
    stats_ptr,
    num_parts,
    is_direct,
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_stride,
    q_stride,
    table_stride,
    factor,
    softcap_factor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute attention of a row's only query for one KV head. Each of n programs takes every n-th part of the context.

    `is_direct`: there is one part, which needs no merging.
    """
    # Heads vary fastest, so that programs running together read neighbouring memory.
    kv_head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc_ptr + row)
    if tl.load(query_start_loc_ptr + row + 1) - token != 1:
        return
    position = tl.load(context_lens_ptr + row)
    first, end, base, tiles, count = _splits(position, tl.num_programs(2), TILE, SPLIT_TILES, LEAST_TILES, WINDOW)
    if tl.program_id(2) >= count:
        return
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    is_q = (m < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m
    q_at = q_ptr + token.to(tl.int64) * q_stride + head[:, None] * HEAD_DIM + column[None, :]
    q = tl.load(q_at, mask=is_q, other=0.0)
    positions = tl.where(m < GROUP, position, -1)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    for part in range(tl.program_id(2), count, tl.num_programs(2)):
        acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        begin = tl.maximum(base + part * tiles, first)
        stop = tl.minimum(base + (part + 1) * tiles, end)
        acc, top, total = walk(
            acc, top, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, positions, begin, begin,
            stop, position + 1, factor, softcap_factor, NUM_KV_HEADS, HEAD_DIM, COLUMNS, KEY_GROUP, BLOCK_SIZE, TILE, WINDOW,
            SOFTCAP, IS_INT8, False,
        )  # fmt: skip
        if is_direct != 0:
            at = out_ptr + token.to(tl.int64) * out_stride + head[:, None] * HEAD_DIM + column[None, :]
            found = normalised(acc, top, total, sinks_ptr, head, m < GROUP, factor, HAS_SINKS)
            tl.store(at, found.to(out_ptr.dtype.element_ty), mask=is_q)
        else:
            place = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP) + head) * num_parts + part
            _store_part(parts_ptr, stats_ptr, place, acc, top, total, m < GROUP, COLUMNS)


@jit(do_not_specialize=["num_parts", "num_programs", *UNSPECIALISED[1:]])
def merge_kernel(
    out_ptr,
    parts_ptr,
    stats_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_stride,
    factor,
    num_parts,
    num_programs,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc_ptr + row)
    if tl.load(query_start_loc_ptr + row + 1) - token != 1:
        return
    position = tl.load(context_lens_ptr + row)
    _, _, _, _, count = _splits(position, num_programs, TILE, SPLIT_TILES, LEAST_TILES, WINDOW)
    place = (row.to(tl.int64) * tl.num_programs(0) + head) * num_parts
    found = _merged(parts_ptr, stats_ptr, place, count, sinks_ptr, head, factor, COLUMNS, HAS_SINKS)
    column = tl.arange(0, COLUMNS)[None, :]
    at = out_ptr + token.to(tl.int64) * out_stride + head * HEAD_DIM + column
    tl.store(at, found.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@jit(do_not_specialize=["num_parts", "leaves_decodes", "row_of_token_ptr", "query_start_loc_ptr"])
def merge_prefill_kernel(
    out_ptr,
    parts_ptr,
    stats_ptr,
    row_of_token_ptr,
    query_start_loc_ptr,
    sinks_ptr,
    out_stride,
    factor,
    num_parts,
    leaves_decodes,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Merge the parts of a context that `prefill_kernel` computed, for one token and head."""
    head, token = tl.program_id(0), tl.program_id(1)
    row = tl.load(row_of_token_ptr + token)
    query_len = tl.load(query_start_loc_ptr + row + 1) - tl.load(query_start_loc_ptr + row)
    if leaves_decodes != 0 and query_len == 1:
        return
    place = (token.to(tl.int64) * tl.num_programs(0) + head) * num_parts
    found = _merged(parts_ptr, stats_ptr, place, num_parts, sinks_ptr, head, factor, COLUMNS, HAS_SINKS)
    column = tl.arange(0, COLUMNS)[None, :]
    at = out_ptr + token.to(tl.int64) * out_stride + head * HEAD_DIM + column
    tl.store(at, found.to(out_ptr.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit
def _merged(parts_ptr, stats_ptr, place, count, sinks_ptr, head, factor, COLUMNS: tl.constexpr, HAS_SINKS: tl.constexpr):
    column = tl.arange(0, COLUMNS)[None, :]
    one = tl.arange(0, 1)
    acc = tl.zeros([1, COLUMNS], tl.float32)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    for first in range(0, count, MERGED_AT_ONCE):
        for i in tl.static_range(MERGED_AT_ONCE):
            at = place + first + i + one
            is_part = first + i + one < count
            part = tl.load(parts_ptr + at[:, None] * COLUMNS + column, mask=is_part[:, None], other=0.0)
            part_top = tl.load(stats_ptr + at * 2, mask=is_part, other=float("-inf"))
            part_total = tl.load(stats_ptr + at * 2 + 1, mask=is_part, other=0.0)
            acc, top, total = merge(acc, top, total, part, part_top, part_total, factor)
    return normalised(acc, top, total, sinks_ptr, head + one, one == 0, factor, HAS_SINKS)


@triton.jit
def _store_part(parts_ptr, stats_ptr, place, acc, top, total, mask, COLUMNS: tl.constexpr):
    column = tl.arange(0, COLUMNS)
    tl.store(parts_ptr + place[:, None] * COLUMNS + column[None, :], acc, mask=mask[:, None])
    tl.store(stats_ptr + place * 2, top, mask=mask)
    tl.store(stats_ptr + place * 2 + 1, total, mask=mask)


@triton.jit
def row_of_tile(query_start_loc_ptr, tile, num_rows, QUERIES: tl.constexpr):
    """Return the row of the batch with this tile of tokens. Tiles of row r begin at `query_start_loc[r] // QUERIES + r`."""
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // QUERIES + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit(do_not_specialize=["num_rows", "leaves_decodes", *UNSPECIALISED])
def prefill_kernel(
    parts_ptr,
    stats_ptr,
    num_rows,
    leaves_decodes,
    out_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    k_scale_ptr,
    v_scale_ptr,
    tables_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    sinks_ptr,
    out_stride,
    q_stride,
    table_stride,
    factor,
    softcap_factor,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT_TILES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Compute attention of `QUERIES` queries of a row for one KV head.

    If `SPLIT_TILES` is 0, the programs of the grid's last axis share the context, and `merge_prefill_kernel` merges what they
    computed. Otherwise one program computes the whole context, in parts of `SPLIT_TILES` tiles that end where those of
    `decode_kernel` do, and merges them in order. `leaves_decodes`: skip rows with one query.
    """
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # last queries first: they have the longest context
    row = row_of_tile(query_start_loc_ptr, tile, num_rows, QUERIES)
    start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - start
    first_query = (tile - (start // QUERIES + row)) * QUERIES
    if first_query >= query_len or (leaves_decodes != 0 and query_len == 1):
        return
    context_len = tl.load(context_lens_ptr + row)
    m = tl.arange(0, BLOCK_M)
    column = tl.arange(0, COLUMNS)
    query = first_query + m // GROUP
    has_query = (m < QUERIES * GROUP) & (query < query_len)
    is_q = has_query[:, None] & (column < HEAD_DIM)[None, :]
    head = kv_head * GROUP + m % GROUP
    token = (start + query).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * q_stride + head[:, None] * HEAD_DIM + column[None, :], mask=is_q, other=0.0)
    positions = tl.where(has_query, context_len + query, -1)
    num_positions = context_len + tl.minimum(first_query + QUERIES, query_len)
    table_ptr = tables_ptr + row.to(tl.int64) * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(context_len + first_query + 1 - WINDOW, 0) // TILE
    full_end = (context_len + first_query + 1) // TILE
    end = (num_positions + TILE - 1) // TILE
    acc = tl.zeros([BLOCK_M, COLUMNS], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if SPLIT_TILES > 0:
        for split in range(first // SPLIT_TILES, (end + SPLIT_TILES - 1) // SPLIT_TILES):
            part, part_top, part_total = walk(
                tl.zeros([BLOCK_M, COLUMNS], tl.float32), tl.full([BLOCK_M], float("-inf"), tl.float32),
                tl.zeros([BLOCK_M], tl.float32), q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, positions,
                tl.maximum(split * SPLIT_TILES, first), full_end, tl.minimum((split + 1) * SPLIT_TILES, end), num_positions,
                factor, softcap_factor, NUM_KV_HEADS, HEAD_DIM, COLUMNS, KEY_GROUP, BLOCK_SIZE, TILE, WINDOW, SOFTCAP, IS_INT8,
                WINDOW == 0,
            )  # fmt: skip
            acc, top, total = merge(acc, top, total, part, part_top, part_total, factor)
    else:
        tiles = (end - first + tl.num_programs(2) - 1) // tl.num_programs(2)
        begin = first + tl.program_id(2) * tiles
        acc, top, total = walk(
            acc, top, total, q, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, table_ptr, kv_head, positions, begin, full_end,
            tl.minimum(begin + tiles, end), num_positions, factor, softcap_factor, NUM_KV_HEADS, HEAD_DIM, COLUMNS, KEY_GROUP,
            BLOCK_SIZE, TILE, WINDOW, SOFTCAP, IS_INT8, WINDOW == 0,
        )  # fmt: skip
    if tl.num_programs(2) == 1:
        at = out_ptr + token[:, None] * out_stride + head[:, None] * HEAD_DIM + column[None, :]
        found = normalised(acc, top, total, sinks_ptr, head, has_query, factor, HAS_SINKS)
        tl.store(at, found.to(out_ptr.dtype.element_ty), mask=is_q)
    else:
        place = (token * (NUM_KV_HEADS * GROUP) + head) * tl.num_programs(2) + tl.program_id(2)
        _store_part(parts_ptr, stats_ptr, place, acc, top, total, has_query, COLUMNS)
