"""Rotates queries and keys and stores keys and values in the paged cache, in one kernel per layer."""

# ruff: noqa: ANN001, ANN202, N803  # kernels: Triton reads their text, and names constants in capitals

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import cdiv, jit, next_power_of_2
from penstock.types.kv_dtype import KEY_GROUP

if TYPE_CHECKING:
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors

HEADS_PER_PROGRAM = 8
UNSPECIALISED = ["positions_ptr", "slots_ptr"]
"""As in `attention_kernels`."""
SMALLEST_SCALE = tl.constexpr(1e-24)
"""The smallest scale, as in the reference backend. Its inverse is finite."""


def rope_table(
    inv_freq: Sequence[float],
    attention_factor: float,
    num_positions: int,
    device: torch.device | str,
    *,
    growth: float = 0.0,
    growth_len: int = 1,
) -> torch.Tensor:
    """Return the table for rotating: cosines, then sines, of all angles, times `attention_factor`.

    float32 [num_positions, 2 * len(inv_freq)]. Angles are computed in float64, because they grow with the position. Includes
    `growth` of `program.Rope`.
    """
    positions = np.arange(num_positions, dtype=np.float64)
    angles = np.outer(positions, np.array(inv_freq, np.float64))
    factors = attention_factor * (1 + growth * np.log1p(positions // growth_len))
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * factors[:, None]
    return torch.from_numpy(table.astype(np.float32)).to(device)


def rope(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, num_heads: int, head_dim: int) -> None:
    """Compute `program.Rope`: rotate x [num_tokens, num_heads * head_dim] in place. Rows may be strided."""
    heads = min(HEADS_PER_PROGRAM, next_power_of_2(num_heads))
    half = table.shape[1] // 2
    _rope_kernel[(len(x), cdiv(num_heads, heads))](
        x,
        positions,
        table,
        x.stride(0),
        num_heads,
        HEADS=heads,
        HEAD_DIM=head_dim,
        HALF=half,
        PAIRS=next_power_of_2(half),
        num_warps=1,
    )


def kv_write(
    k: torch.Tensor,
    v: torch.Tensor,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    *,
    centre: torch.Tensor | None = None,
) -> None:
    """Store k and v [num_tokens, num_kv_heads * head_dim] in the cache, rounded to its type.

    `centre`, float32 [num_kv_heads * head_dim], is subtracted from int8 keys before (`models.rope`).
    """
    _write(None, k, v, layer, slot_mapping, None, None, group=0, centre=centre)


def rope_q_k_and_write(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: KvLayer,
    step: StepTensors,
    table: torch.Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    centre: torch.Tensor | None = None,
) -> None:
    """Rotate q in place, and store v and the rotated k in the cache. The tensor k stays unchanged.

    q [num_tokens, num_heads * head_dim]; k, v as in `kv_write`. All three may be columns of one matrix.
    """
    _write(q, k, v, layer, step.slot_mapping, step.positions, table, group=num_heads // num_kv_heads, centre=centre)


def _write(
    q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: KvLayer,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor | None,
    table: torch.Tensor | None,
    *,
    group: int,
    centre: torch.Tensor | None,
) -> None:
    num_kv_heads, head_dim = layer.k.shape[2:]
    half = 0 if table is None else table.shape[1] // 2
    _write_kernel[(len(k), num_kv_heads)](
        q,
        k,
        v,
        layer.k,
        layer.v,
        layer.k_scale,
        layer.v_scale,
        slot_mapping,
        positions,
        table,
        centre,
        0 if q is None else q.stride(0),
        k.stride(0),
        v.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        COLUMNS=max(KEY_GROUP, next_power_of_2(head_dim)),
        GROUP=group,
        HEADS=next_power_of_2(max(group, 1)),
        HALF=half,
        PAIRS=next_power_of_2(max(half, 1)),
        KEY_GROUP=KEY_GROUP,
        IS_INT8=layer.k_scale is not None,
        HAS_CENTRE=centre is not None,
        num_warps=1,
    )


@jit(do_not_specialize=UNSPECIALISED[:1])
def _rope_kernel(
    x_ptr,
    positions_ptr,
    table_ptr,
    x_stride,
    num_heads,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
):
    token = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    row_ptr = x_ptr + token.to(tl.int64) * x_stride
    table_ptr += tl.load(positions_ptr + token) * (2 * HALF)
    _rotate_heads(row_ptr, head, head < num_heads, table_ptr, HEAD_DIM, HALF, PAIRS)


@triton.jit
def _rotate_heads(row_ptr, head, is_head, table_ptr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Rotate N heads of a token in place. `table_ptr` points to the position's cosines and sines. head, is_head [N]"""
    pair = tl.arange(0, PAIRS)
    is_pair = pair < HALF
    cos = tl.load(table_ptr + pair, mask=is_pair, other=0.0)[None, :]
    sin = tl.load(table_ptr + HALF + pair, mask=is_pair, other=0.0)[None, :]
    at = row_ptr + head[:, None] * HEAD_DIM + pair[None, :]
    mask = is_head[:, None] & is_pair[None, :]
    first = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=mask, other=0.0).to(tl.float32)
    tl.debug_barrier()  # In place: all threads must read before one writes.
    tl.store(at, (first * cos - second * sin).to(row_ptr.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (second * cos + first * sin).to(row_ptr.dtype.element_ty), mask=mask)


@jit(do_not_specialize=UNSPECIALISED)
def _write_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    centre_ptr,
    q_stride,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    KEY_GROUP: tl.constexpr,
    IS_INT8: tl.constexpr,
    HAS_CENTRE: tl.constexpr,
):
    """Rotate and store one KV head of a token, and rotate the query heads that read it."""
    token, kv_head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    is_column = column < HEAD_DIM
    k_ptr += token.to(tl.int64) * k_stride + kv_head * HEAD_DIM
    v_ptr += token.to(tl.int64) * v_stride + kv_head * HEAD_DIM
    k = tl.load(k_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + column, mask=is_column, other=0.0).to(tl.float32)
    if HALF > 0:
        table_ptr += tl.load(positions_ptr + token) * (2 * HALF)
        k = _rotated(k, k_ptr, column, table_ptr, HALF)
    if GROUP > 0:
        head = tl.arange(0, HEADS)
        q_ptr += token.to(tl.int64) * q_stride + kv_head * (GROUP * HEAD_DIM)
        _rotate_heads(q_ptr, head, head < GROUP, table_ptr, HEAD_DIM, HALF, PAIRS)
    if HAS_CENTRE:
        k -= tl.load(centre_ptr + kv_head * HEAD_DIM + column, mask=is_column, other=0.0)
    row = tl.load(slots_ptr + token) * NUM_KV_HEADS + kv_head
    if IS_INT8:
        key_groups: tl.constexpr = (HEAD_DIM + KEY_GROUP - 1) // KEY_GROUP
        _store_int8(k, k_cache_ptr + row * HEAD_DIM, k_scale_ptr + row * key_groups, key_groups, HEAD_DIM, COLUMNS, KEY_GROUP)
        _store_int8(v, v_cache_ptr + row * HEAD_DIM, v_scale_ptr + row, 1, HEAD_DIM, COLUMNS, COLUMNS)
    else:
        at = row * HEAD_DIM + column
        tl.store(k_cache_ptr + at, _as_bf16(k, k_cache_ptr.dtype.element_ty), mask=is_column)
        tl.store(v_cache_ptr + at, _as_bf16(v, v_cache_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def _rotated(x, x_ptr, column, table_ptr, HALF: tl.constexpr):
    is_first, turns = column < HALF, column < 2 * HALF
    partner = tl.where(is_first, column + HALF, column - HALF)
    other = tl.load(x_ptr + partner, mask=turns, other=0.0).to(tl.float32)
    pair = tl.where(is_first, column, column - HALF)
    cos = tl.load(table_ptr + pair, mask=turns, other=1.0)
    sin = tl.load(table_ptr + HALF + pair, mask=turns, other=0.0)
    return x * cos + tl.where(is_first, -other, other) * sin


@triton.jit
def _store_int8(
    x,
    out_ptr,
    scale_ptr,
    num_groups: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMNS_PER_SCALE: tl.constexpr,
):
    """Store x as int8 with a scale per group: the next bf16 above largest / 127, or NaN if the group has inf or NaN."""
    groups: tl.constexpr = COLUMNS // COLUMNS_PER_SCALE
    parts = tl.reshape(x, [groups, COLUMNS_PER_SCALE])
    is_sound = tl.max(tl.where(tl.abs(parts) < float("inf"), 0, 1), 1) == 0
    largest = tl.max(tl.where(is_sound[:, None], tl.abs(parts), 0.0), 1)
    wanted = tl.maximum(tl.math.div_rn(largest, 127.0), SMALLEST_SCALE)
    scale = (((wanted.to(tl.int32, bitcast=True) + 0xFFFF) >> 16) << 16).to(tl.float32, bitcast=True)
    scaled = tl.where(is_sound[:, None], parts, 0.0) * tl.math.div_rn(1.0, scale)[:, None]
    integers = (scaled + 12582912.0) - 12582912.0  # adding 1.5 * 2^23 rounds to integers, ties to even
    group = tl.arange(0, groups)
    scale = tl.where(is_sound, scale, float("nan"))
    tl.store(scale_ptr + group, scale.to(scale_ptr.dtype.element_ty), mask=group < num_groups)
    column = tl.arange(0, COLUMNS)
    tl.store(out_ptr + column, tl.reshape(integers, [COLUMNS]).to(tl.int8), mask=column < HEAD_DIM)


@triton.jit
def _as_bf16(x, dtype: tl.constexpr):
    """Convert float32 to `dtype`. If it is float32, as in tests, round to bf16 first."""
    if dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(dtype)
