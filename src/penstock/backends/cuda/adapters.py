"""LoRA adapters in blocks of the KV cache. The executor packs and places adapters; the lowering adds an `AdaptedProduct` to
each product.

A site is a weight matrix that an adapter changes, by factors A and B. Both are cut into tiles of at most 16 ranks. A piece
(one layer's keys or values of a block) stores as many whole tiles as fit.

    site's A    [r, in]     tiles  (ranks 0-15, cols 0-63) (ranks 0-15, cols 64-127) ... (ranks 16-31, cols 0-63) ...
    site's B^T  [r, out]    next, in the same way; then the next site
    pages       block 7: k of layer 0 | k of layer 1 | ... | v of layer 0 | ...   block 2: k of layer 0 | ...
                         tiles 0, 1, 2  tiles 3, 4, 5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from penstock.backends.batch import BatchBuilder, StepBatch
from penstock.backends.cuda.kernels import lora
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.step import AdaptedRows, StepTensors
from penstock.models.adapter import AdapterFactors, sites
from penstock.models.program import Program
from penstock.types.adapter import BASE, PackedAdapter
from penstock.types.errors import ExecutorFailure, ModelError

MAX_TILE_COLS = 64
LEAST_TILE_COLS = 16
"""The fewest columns that tensor cores take."""
MAX_SPLITS = 8
"""Largest number of splits of A's columns."""
LEAST_SPLIT_TILES = 8
PLACED_AT_ONCE = 16 << 20
"""Bytes of pages to send at once. Sending briefly doubles their memory."""

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class PagedAdapter:
    format: AdapterFormat
    pages: NDArray[np.uint8]
    """[num_pages, block_bytes]"""
    table: NDArray[np.int32]
    """The table that `kernels.lora` reads, without the block ids at its end."""
    max_rank: int

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_bytes(self) -> int:
        return int(self.pages.nbytes)


class AdapterFormat:
    """The layout of LoRA factors in pages, each the size of a KV block. Thread-safe."""

    def __init__(self, program: Program, cache: PagedKvCache, dtype: torch.dtype, max_rank: int) -> None:
        self._program, self.dtype, self.max_rank = program, dtype, max_rank
        self.site_ids = {site: idx for idx, site in enumerate(sites(program))}
        self._block_bytes, self._piece_bytes, self._num_pieces = cache.block_bytes, cache.piece_bytes, cache.num_pieces
        numbers = self._piece_bytes // dtype.itemsize
        least = lora.RANK_TILE.value * LEAST_TILE_COLS
        if numbers < least or self._piece_bytes % 16:
            raise ModelError(
                f"the keys of a block take {self._piece_bytes} bytes in each layer, which is no multiple of 16, or less than "
                f"the {least * dtype.itemsize} of the smallest part of an adapter.",
                remedy="Set --block-size to a larger power of 2.",
            )
        self.tile_cols = min(MAX_TILE_COLS, 1 << (numbers // lora.RANK_TILE.value).bit_length() - 1)
        self.hidden_ranks = -(-max_rank // lora.RANK_TILE.value) * lora.RANK_TILE.value
        """Numbers reserved for a row's x A^T."""
        self.layout = {
            "SITES": len(self.site_ids),
            "PIECES": self._num_pieces,
            "PIECE": numbers,
            "TILE_COLS": self.tile_cols,
            "HIDDEN_RANKS": self.hidden_ranks,
        }

    @property
    def key(self) -> tuple[object, ...]:
        return self._block_bytes, self._piece_bytes, self._num_pieces, self.dtype, self.tile_cols, *self.site_ids

    def pack(self, factors: AdapterFactors) -> PagedAdapter:
        """Lay out an adapter's factors in pages. Raises ModelError for a value that is not finite in `dtype`."""
        assert factors.fits(self._program, self.max_rank)
        tile_ranks = min(lora.RANK_TILE.value, max(1, factors.max_rank))
        tile_bytes = tile_ranks * self.tile_cols * self.dtype.itemsize
        per_piece = self._piece_bytes // tile_bytes
        table = np.zeros(lora.TABLE_HEAD.value + lora.SITE_WORDS.value * len(self.site_ids), np.int32)
        table[: lora.TABLE_HEAD.value] = tile_ranks, per_piece
        by_site = table[lora.TABLE_HEAD.value :].reshape(-1, lora.SITE_WORDS.value)
        tiles: list[NDArray[np.uint8]] = []
        num_tiles = 0
        for site, (a, b) in factors.by_weight.items():
            of_a, of_b = self._tiles(site, a, tile_ranks), self._tiles(site, b.T, tile_ranks)
            by_site[self.site_ids[site]] = len(a), num_tiles, num_tiles + len(of_a)
            num_tiles += len(of_a) + len(of_b)
            tiles += of_a, of_b
        num_pages = max(1, -(-num_tiles // (per_piece * self._num_pieces)))
        pieces = np.zeros((num_pages * self._num_pieces, self._piece_bytes), np.uint8)
        places = pieces[:, : per_piece * tile_bytes].reshape(-1, tile_bytes) if tiles else pieces[:0]
        if tiles:
            places[:num_tiles] = np.concatenate(tiles)
            pieces[:, : per_piece * tile_bytes] = places.reshape(len(pieces), -1)
        pages = np.zeros((num_pages, self._block_bytes), np.uint8)
        pages[:, : self._num_pieces * self._piece_bytes] = pieces.reshape(num_pages, -1)
        return PagedAdapter(self, pages, table, factors.max_rank)

    def _tiles(self, site: str, matrix: F32, tile_ranks: int) -> NDArray[np.uint8]:
        """Cut a LoRA factor [ranks, cols] into tiles [tiles, bytes], ordered by rank, then by column."""
        num_ranks, num_cols = matrix.shape
        rank_tiles, col_tiles = -(-num_ranks // tile_ranks), -(-num_cols // self.tile_cols)
        padded = torch.zeros((rank_tiles * tile_ranks, col_tiles * self.tile_cols), dtype=self.dtype)
        padded[:num_ranks, :num_cols] = torch.from_numpy(np.ascontiguousarray(matrix))
        if not torch.isfinite(padded).all():
            raise ModelError(
                f"a factor of {site!r} is no finite number, or too large for {str(self.dtype).removeprefix('torch.')}.",
                remedy="Use another adapter: this one is damaged.",
            )
        tiles = padded.view(rank_tiles, tile_ranks, col_tiles, self.tile_cols).transpose(1, 2).contiguous()
        found: NDArray[np.uint8] = tiles.view(torch.uint8).view(rank_tiles * col_tiles, -1).numpy()
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Placed:
    table: torch.Tensor
    """int32, on the device."""
    block_ids: tuple[int, ...]
    max_rank: int


class PlacedAdapters:
    """The LoRA adapters in GPU memory, by number. Call the methods with the steps' stream entered."""

    def __init__(self, format: AdapterFormat, cache: PagedKvCache, device: torch.device) -> None:
        self.format = format
        self._cache, self._device = cache, device
        self._placed: dict[int, _Placed] = {}

    def __contains__(self, number: object) -> bool:
        return number in self._placed

    def place(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        """Queue writing a packed adapter to these KV blocks. Raises ValueError for an invalid number or adapter."""
        if number == BASE or number in self._placed:
            raise ValueError(f"adapter {number} is placed already, or is none")
        if not isinstance(packed, PagedAdapter) or packed.format.key != self.format.key or packed.num_pages != len(block_ids):
            raise ValueError(f"adapter {number} was packed for another executor, or has another number of pages than blocks")
        at_once = max(1, PLACED_AT_ONCE // self._cache.block_bytes)
        for begin in range(0, len(block_ids), at_once):
            pages = packed.pages[begin : begin + at_once]
            self._cache.write_blocks(block_ids[begin : begin + at_once], [memoryview(page) for page in pages])
        table = torch.from_numpy(np.concatenate([packed.table, np.array(block_ids, np.int32)]))
        if self._device.type == "cuda":
            table = table.pin_memory()
        self._placed[number] = _Placed(table.to(self._device, non_blocking=True), tuple(block_ids), packed.max_rank)

    def drop(self, number: int) -> None:
        placed = self._placed.pop(number, None)
        if placed is not None:
            self._cache.forget(placed.block_ids, 0)

    def clear(self) -> None:
        self._placed.clear()

    def arrays(self, batch: StepBatch, host: BatchBuilder) -> Grouped | None:
        """Group the step's tokens and samples by adapter. Return None if no request has an adapter."""
        numbers = host.adapters[batch.row_slots]
        if not numbers.any():
            return None
        query_lens = np.diff(batch.query_start_loc)
        return self.grouped(np.repeat(numbers, query_lens), numbers[batch.sample_rows])

    def grouped(self, of_tokens: NDArray[np.int64], of_samples: NDArray[np.int64]) -> Grouped:
        """Group tokens and samples by their adapters' numbers. Raises ExecutorFailure for an adapter that was dropped."""
        numbers = [number for number in np.unique(of_tokens).tolist() if number != BASE]
        if lost := [number for number in numbers if number not in self._placed]:
            raise ExecutorFailure(f"adapter {lost[0]} was dropped while a row had it")
        max_rank = max((self._placed[number].max_rank for number in numbers), default=0)
        return Grouped((*self._groups(of_tokens), *self._groups(of_samples)), max_rank)

    def _groups(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        adapted = np.flatnonzero(numbers != BASE)
        order = adapted[np.argsort(numbers[adapted], kind="stable")].astype(np.int32)
        known, first, counts = np.unique(numbers[order], return_index=True, return_counts=True)
        groups = [
            (self._placed[number].table.data_ptr(), begin + offset, min(lora.GROUP_ROWS.value, count - offset))
            for number, begin, count in zip(known.tolist(), first.tolist(), counts.tolist(), strict=True)
            for offset in range(0, count, lora.GROUP_ROWS.value)
        ]
        return order, np.array(groups, np.int64).reshape(-1, lora.GROUP_WORDS.value)


@dataclass(frozen=True, slots=True, eq=False)
class Grouped:
    """A step's tokens and samples grouped by adapter, as host arrays."""

    arrays: tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32], NDArray[np.int64]]
    """Order and groups of tokens, then of samples, as `AdaptedRows` describes them."""
    max_rank: int

    def on_device(self, parts: Sequence[torch.Tensor]) -> tuple[AdaptedRows | None, AdaptedRows | None]:
        tokens, token_groups, samples, sample_groups = parts
        return (
            AdaptedRows(tokens, token_groups, self.max_rank) if len(tokens) else None,
            AdaptedRows(samples, sample_groups, self.max_rank) if len(samples) else None,
        )


class AdapterScratch:
    """GPU memory for x A^T, the first LoRA product. Shared by all layers."""

    def __init__(self, format: AdapterFormat, cache: PagedKvCache, device: torch.device) -> None:
        self.format, self.cache, self.device = format, cache, device
        self._num_rows = 0
        self.hidden = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, num_rows: int) -> None:
        self._num_rows = max(self._num_rows, num_rows)

    def allocate(self) -> None:
        """Allocate the buffers. Call this before the first product runs."""
        self.hidden = torch.empty(self._num_rows * self.format.hidden_ranks, dtype=torch.float32, device=self.device)


class AdaptedProduct:
    """Adds the LoRA term (x A^T) B^T to a product or embedding of one or several weight matrices (sites)."""

    def __init__(
        self,
        scratch: AdapterScratch,
        site_widths: Sequence[tuple[str, int]],
        num_cols: int,
        *,
        max_rows: int,
        of_samples: bool,
        is_embedding: bool = False,
    ) -> None:
        """`site_widths`: each weight matrix's name and output columns. `num_cols`: columns of x, or the vocabulary size."""
        self._scratch, self._num_cols, self._of_samples = scratch, num_cols, of_samples
        cols = scratch.format.tile_cols
        self._num_splits = 1 if is_embedding else max(1, min(MAX_SPLITS, -(-num_cols // cols) // LEAST_SPLIT_TILES))
        ids = [scratch.format.site_ids[site] for site, _ in site_widths]
        words, column = [], 0
        for idx, width in enumerate(width for _, width in site_widths):
            count = -(-width // cols)
            words += [(idx, tile, count, column + tile * cols, width - tile * cols) for tile in range(count)]
            column += width
        self._site_ids = torch.tensor(ids, dtype=torch.int32, device=scratch.device)
        self._tiles = torch.tensor(words, dtype=torch.int32, device=scratch.device)
        scratch.reserve(self._num_splits * len(ids) * max_rows)

    def rows_of(self, step: StepTensors) -> AdaptedRows | None:
        return step.adapted_samples if self._of_samples else step.adapted_tokens

    def add(self, step: StepTensors, out: torch.Tensor, x: torch.Tensor) -> None:
        """Add each row's LoRA term (x A^T) B^T to `out`. x [rows, num_cols] and out [rows, sum of widths] don't overlap."""
        rows = self.rows_of(step)
        if rows is None:
            return
        hidden, pages, layout = self._scratch.hidden, self._pages(), self._scratch.format.layout
        groups = rows.order, rows.groups, self._site_ids
        num_splits = self._num_splits
        lora.shrink(hidden, x, *groups, pages, num_splits=num_splits, max_rank=rows.max_rank, layout=layout)
        lora.expand(out, hidden, *groups, self._tiles, pages, num_splits=num_splits, layout=layout)

    def look_up(self, step: StepTensors, out: torch.Tensor, scale: float) -> None:
        """Add each token's LoRA term, scale * A[:, token] B^T, to the embeddings `out` [tokens, width]."""
        rows = self.rows_of(step)
        if rows is None:
            return
        hidden, pages, layout = self._scratch.hidden, self._pages(), self._scratch.format.layout
        groups = rows.order, rows.groups, self._site_ids
        lora.look_up(
            hidden,
            step.token_ids,
            *groups,
            pages,
            vocab_size=self._num_cols,
            scale=scale,
            max_rank=rows.max_rank,
            layout=layout,
        )
        lora.expand(out, hidden, *groups, self._tiles, pages, num_splits=1, layout=layout)

    def _pages(self) -> torch.Tensor:
        return self._scratch.cache.pieces_as(self._scratch.format.dtype)
