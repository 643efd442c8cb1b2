"""Adds LoRA adapters' changes to matrix products: x A^T, then that times B^T. A site is a weight matrix that adapters change.
`cuda.adapters` has the layout.

Each group of rows has one adapter and the address of the adapter's table, so one launch serves any adapters and ranks. Tiles
and orders of sums are fixed, so bits depend only on a row and its adapter. Sources: Punica, arXiv 2310.18547; S-LoRA, arXiv
2311.03285.
"""
# ruff: noqa: ANN001, ANN202, N803  # kernels, which Triton reads: constants have capitals

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import cdiv, jit

GROUP_ROWS = tl.constexpr(16)
"""Largest number of rows in a group: the fewest that tensor cores can multiply."""
RANK_TILE = tl.constexpr(16)
"""Ranks per program."""
GROUP_WORDS = tl.constexpr(3)
"""int64 per group: address of the adapter's table, first index in `order`, number of rows."""
TABLE_HEAD = tl.constexpr(2)
"""int32 at the start of a table: ranks of a tile, tiles of a piece."""
SITE_WORDS = tl.constexpr(3)
"""int32 per site, after the head: rank, first tile of A, first tile of B. Block ids follow."""
TILE_WORDS = tl.constexpr(5)
"""int32 per tile of a result: site in the product, tile, tiles of the site, first column, columns left in the site."""


def shrink(
    hidden: torch.Tensor,
    x: torch.Tensor,
    order: torch.Tensor,
    groups: torch.Tensor,
    site_ids: torch.Tensor,
    pages: torch.Tensor,
    *,
    num_splits: int,
    max_rank: int,
    layout: Mapping[str, int],
) -> None:
    """Write x[order[place]] A^T, the first half of adapters' changes, to hidden[split, site, place].

    x [rows, cols]; order int32 [places]; groups int64 [groups, GROUP_WORDS]; site_ids int32 [sites]; pages: the flat KV cache
    in the type of factors; `layout`: `AdapterFormat.layout`. hidden: flat float32 [splits, sites, places, ranks].
    """
    num_tiles = cdiv(x.shape[1], layout["TILE_COLS"])
    rank_tiles = _rank_tiles(max_rank)
    _shrink_kernel[(len(groups), num_splits * rank_tiles, len(site_ids))](
        hidden,
        x,
        order,
        groups,
        site_ids,
        pages,
        x.shape[1],
        x.stride(0),
        num_tiles,
        cdiv(num_tiles, num_splits),
        num_splits,
        len(site_ids),
        len(order),
        pages.numel() // (layout["PIECES"] * layout["PIECE"]),
        **layout,
        num_warps=4,
        num_stages=4,
    )


def look_up(
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    order: torch.Tensor,
    groups: torch.Tensor,
    site_ids: torch.Tensor,
    pages: torch.Tensor,
    *,
    vocab_size: int,
    scale: float,
    max_rank: int,
    layout: Mapping[str, int],
) -> None:
    """Like `shrink` for an embedding: write scale * A[:, token_ids[order[place]]] to hidden[place]. One split and one site."""
    _look_up_factors_kernel[(len(groups), _rank_tiles(max_rank))](
        hidden,
        token_ids,
        order,
        groups,
        site_ids,
        pages,
        cdiv(vocab_size, layout["TILE_COLS"]),
        pages.numel() // (layout["PIECES"] * layout["PIECE"]),
        scale,
        **layout,
        num_warps=1,
    )


def expand(
    out: torch.Tensor,
    hidden: torch.Tensor,
    order: torch.Tensor,
    groups: torch.Tensor,
    site_ids: torch.Tensor,
    tiles: torch.Tensor,
    pages: torch.Tensor,
    *,
    num_splits: int,
    layout: Mapping[str, int],
) -> None:
    """Add the second half, (sum of hidden's splits) B^T, to out[order[place]] for all sites.

    out [rows, cols]; tiles int32 [tiles, TILE_WORDS]; other arguments as in `shrink`.
    """
    _expand_kernel[(len(groups), len(tiles))](
        out,
        hidden,
        order,
        groups,
        site_ids,
        tiles,
        pages,
        out.stride(0),
        num_splits,
        len(site_ids),
        len(order),
        pages.numel() // (layout["PIECES"] * layout["PIECE"]),
        **layout,
        num_warps=4,
    )


def _rank_tiles(max_rank: int) -> int:
    """Return at least 1, because a grid cannot be empty."""
    return max(1, cdiv(max_rank, RANK_TILE.value))


@triton.jit
def _place(table, tile, num_blocks, SITES: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, TILE_COLS: tl.constexpr):
    tile_ranks, per_piece = tl.load(table), tl.load(table + 1)
    piece = tile // per_piece
    block = tl.load(table + (TABLE_HEAD + SITES * SITE_WORDS) + piece // PIECES)
    return ((piece % PIECES).to(tl.int64) * num_blocks + block) * PIECE + (tile % per_piece) * (tile_ranks * TILE_COLS)


@jit(do_not_specialize=["num_cols", "num_tiles", "split_tiles", "num_splits", "num_sites", "num_places", "num_blocks"])
def _shrink_kernel(
    hidden_ptr,
    x_ptr,
    order_ptr,
    groups_ptr,
    site_ids_ptr,
    pages_ptr,
    num_cols,
    x_stride,
    num_tiles,
    split_tiles,
    num_splits,
    num_sites,
    num_places,
    num_blocks,
    SITES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_COLS: tl.constexpr,
    HIDDEN_RANKS: tl.constexpr,
):
    group, site = tl.program_id(0), tl.program_id(2)
    split, rank_tile = tl.program_id(1) % num_splits, tl.program_id(1) // num_splits
    table = tl.load(groups_ptr + group * GROUP_WORDS).to(tl.pointer_type(tl.int32))
    entry = table + TABLE_HEAD + tl.load(site_ids_ptr + site) * SITE_WORDS
    if tl.load(entry) <= rank_tile * RANK_TILE:
        return
    first, count = tl.load(groups_ptr + group * GROUP_WORDS + 1), tl.load(groups_ptr + group * GROUP_WORDS + 2)
    lanes = tl.arange(0, GROUP_ROWS)
    mask = lanes < count
    rows = tl.load(order_ptr + first + lanes, mask=mask, other=0)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * x_stride
    ranks, cols = tl.arange(0, RANK_TILE), tl.arange(0, TILE_COLS)
    a_mask = (ranks < tl.load(table))[:, None]
    first_tile = tl.load(entry + 1) + rank_tile * num_tiles
    acc = tl.zeros((RANK_TILE, GROUP_ROWS), tl.float32)
    for tile in range(split * split_tiles, tl.minimum(num_tiles, (split + 1) * split_tiles)):
        at = _place(table, first_tile + tile, num_blocks, SITES, PIECES, PIECE, TILE_COLS)
        a = tl.load(pages_ptr + at + ranks[:, None] * TILE_COLS + cols[None, :], mask=a_mask, other=0.0)
        col = tile * TILE_COLS + cols
        x = tl.load(x_ptrs + col[None, :], mask=mask[:, None] & (col < num_cols)[None, :], other=0.0)
        acc = tl.dot(a, tl.trans(x), acc, input_precision="ieee")
    at = ((split * num_sites + site) * num_places + first + lanes) * HIDDEN_RANKS + rank_tile * RANK_TILE
    tl.store(hidden_ptr + at[None, :] + ranks[:, None], acc, mask=mask[None, :])


@jit(do_not_specialize=["num_tiles", "num_blocks"])
def _look_up_factors_kernel(
    hidden_ptr,
    token_ids_ptr,
    order_ptr,
    groups_ptr,
    site_ids_ptr,
    pages_ptr,
    num_tiles,
    num_blocks,
    scale,
    SITES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_COLS: tl.constexpr,
    HIDDEN_RANKS: tl.constexpr,
):
    group, rank_tile = tl.program_id(0), tl.program_id(1)
    table = tl.load(groups_ptr + group * GROUP_WORDS).to(tl.pointer_type(tl.int32))
    entry = table + TABLE_HEAD + tl.load(site_ids_ptr) * SITE_WORDS
    if tl.load(entry) <= rank_tile * RANK_TILE:
        return
    first, count = tl.load(groups_ptr + group * GROUP_WORDS + 1), tl.load(groups_ptr + group * GROUP_WORDS + 2)
    lanes = tl.arange(0, GROUP_ROWS)
    mask = lanes < count
    tokens = tl.load(token_ids_ptr + tl.load(order_ptr + first + lanes, mask=mask, other=0), mask=mask, other=0)
    tile = tl.load(entry + 1) + rank_tile * num_tiles + tokens // TILE_COLS
    ranks = tl.arange(0, RANK_TILE)
    at = _place(table, tile, num_blocks, SITES, PIECES, PIECE, TILE_COLS) + tokens % TILE_COLS
    a_mask = (ranks < tl.load(table))[:, None] & mask[None, :]
    a = tl.load(pages_ptr + at[None, :] + ranks[:, None] * TILE_COLS, mask=a_mask, other=0.0).to(tl.float32)
    at = (first + lanes) * HIDDEN_RANKS + rank_tile * RANK_TILE
    tl.store(hidden_ptr + at[None, :] + ranks[:, None], a * scale, mask=mask[None, :])


@jit(do_not_specialize=["num_splits", "num_sites", "num_places", "num_blocks"])
def _expand_kernel(
    out_ptr,
    hidden_ptr,
    order_ptr,
    groups_ptr,
    site_ids_ptr,
    tiles_ptr,
    pages_ptr,
    out_stride,
    num_splits,
    num_sites,
    num_places,
    num_blocks,
    SITES: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
    TILE_COLS: tl.constexpr,
    HIDDEN_RANKS: tl.constexpr,
):
    group = tl.program_id(0)
    words = tiles_ptr + tl.program_id(1) * TILE_WORDS
    site = tl.load(words)
    table = tl.load(groups_ptr + group * GROUP_WORDS).to(tl.pointer_type(tl.int32))
    entry = table + TABLE_HEAD + tl.load(site_ids_ptr + site) * SITE_WORDS
    rank = tl.load(entry)
    if rank == 0:
        return
    first, count = tl.load(groups_ptr + group * GROUP_WORDS + 1), tl.load(groups_ptr + group * GROUP_WORDS + 2)
    lanes = tl.arange(0, GROUP_ROWS)
    mask = lanes < count
    rows = tl.load(order_ptr + first + lanes, mask=mask, other=0)
    ranks, cols = tl.arange(0, RANK_TILE), tl.arange(0, TILE_COLS)
    b_mask = (ranks < tl.load(table))[:, None]
    tile, num_tiles = tl.load(words + 1), tl.load(words + 2)
    first_tile = tl.load(entry + 2) + tile
    total = tl.zeros((TILE_COLS, GROUP_ROWS), tl.float32)
    for rank_tile in range(0, tl.cdiv(rank, RANK_TILE)):
        hidden = tl.zeros((RANK_TILE, GROUP_ROWS), tl.float32)
        for split in range(0, num_splits):
            at = ((split * num_sites + site) * num_places + first + lanes) * HIDDEN_RANKS + rank_tile * RANK_TILE
            hidden += tl.load(hidden_ptr + at[None, :] + ranks[:, None], mask=mask[None, :], other=0.0)
        at = _place(table, first_tile + rank_tile * num_tiles, num_blocks, SITES, PIECES, PIECE, TILE_COLS)
        b = tl.load(pages_ptr + at + ranks[:, None] * TILE_COLS + cols[None, :], mask=b_mask, other=0.0)
        total = tl.dot(tl.trans(b), hidden.to(b.dtype), total, input_precision="ieee")
    out_mask = (cols < tl.load(words + 4))[:, None] & mask[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[None, :] * out_stride + (tl.load(words + 3) + cols)[:, None]
    out = tl.load(out_ptrs, mask=out_mask, other=0.0).to(tl.float32) + total
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=out_mask)
