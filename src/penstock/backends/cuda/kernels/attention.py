"""Attention over the paged KV cache.

`decode_kernel` computes rows with one query. A program takes part of the context, and all query heads of a KV head, to read
keys and values once. A program of `prefill_kernel` takes a tile of one row's queries.

In deterministic mode bits depend only on a query's position and context: both kernels use one tile shape, cut contexts at
multiples of `DETERMINISTIC_SPLIT` and merge in order. Otherwise contexts are cut into as many parts as the device needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.backends.cuda.kernels.attention_kernels import decode_kernel, merge_kernel, merge_prefill_kernel, prefill_kernel
from penstock.backends.cuda.kernels.launch import cdiv, next_power_of_2
from penstock.backends.cuda.kernels.online_softmax import LOG2_E
from penstock.types.kv_dtype import KEY_GROUP

if TYPE_CHECKING:
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors

DETERMINISTIC_SPLIT = 512
"""Positions per part of a context in deterministic mode."""
LEAST_SPLIT_TILES = 2
"""Least tiles of a decode's part. Shorter parts cost more to merge than they save."""
PROGRAMS_PER_MULTIPROCESSOR = 16
"""Programs to launch. About three run at once; with more, multiprocessors idle less at the end."""
LEAST_PREFILL_PART = 512
"""Least positions of a prefill's part."""
MAX_WORKSPACE_BYTES = 256 << 20
"""Deterministic decodes that need more use the prefill kernel, with the same bits."""
LARGE_SHARED_BYTES = 200 << 10
"""Shared memory from which tiles are large. An H100 has 227 KiB, an A100 163, a desktop GPU 99."""
SPARE_SHARED_BYTES = 8 << 10
DECODE_TILE = 64
"""Positions that a decode loads at once."""
DECODE_SHARED_BYTES = 72 << 10
"""Shared memory for keys and values, so that three programs fit on one multiprocessor of an H100."""
PARTS_PER_MULTIPROCESSOR = 64
"""Parts of a KV head's queries to allocate: half of a prefill's tile."""


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    count: int
    shared_bytes: int
    """Largest shared memory of a program."""

    @staticmethod
    def of(device: torch.device) -> Multiprocessors:
        if device.type != "cuda":
            return INTERPRETED
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        return Multiprocessors(properties["multiprocessor_count"], properties["max_shared_mem"])


INTERPRETED = Multiprocessors(2, 227 << 10)
"""For Triton's interpreter: tiles as on an H100, but few programs, because each costs milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Device memory for a step's partial attention, one result per part of a context, until merged. All layers share it."""

    parts: torch.Tensor
    """float32 [num_parts, columns]"""
    stats: torch.Tensor
    """Largest score and sum of weights of each part. float32 [num_parts, 2]"""
    multiprocessors: Multiprocessors

    @staticmethod
    def allocate(
        *,
        max_rows: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_model_len: int,
        device: torch.device | str,
        deterministic: bool,
    ) -> AttentionWorkspace:
        columns = _columns(head_dim)
        device = torch.device(device)
        processors = Multiprocessors.of(device)
        if deterministic:
            num_parts = max_rows * num_heads * cdiv(max_model_len, DETERMINISTIC_SPLIT)
            num_parts = min(num_parts, MAX_WORKSPACE_BYTES // (4 * columns))
        else:
            # Twice as many, because decodes round their number of parts up. Prefills with few tokens have parts, too.
            num_parts = 2 * num_heads * max(max_rows, cdiv(PARTS_PER_MULTIPROCESSOR * processors.count, num_kv_heads))
        parts = torch.empty((num_parts, columns), dtype=torch.float32, device=device)
        return AttentionWorkspace(parts, torch.empty((num_parts, 2), dtype=torch.float32, device=device), processors)


def _columns(head_dim: int) -> int:
    return max(KEY_GROUP, next_power_of_2(head_dim))


@dataclass(frozen=True, slots=True)
class _Shape:
    """The size of a kernel's tiles. Only `block_m` and `tile` affect the bits of results."""

    block_m: int
    """(query, head) pairs of one KV head in a program."""
    tile: int
    """Positions loaded at once. Tiles begin at multiples of it."""
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "TILE": self.tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _shape(launch: _Launch, *, is_decode: bool) -> _Shape:
    """Choose tiles, as tuned with Triton 3.6 on sm_90.

    Decodes wait for memory, so tiles are small and programs many. Prefills use 128 rows for tensor cores, if shared memory
    allows. With int8 keys tiles are shorter, because scaling takes registers.
    """
    columns, shared_bytes = _columns(launch.head_dim), launch.workspace.multiprocessors.shared_bytes
    all_heads = next_power_of_2(launch.group)
    if launch.q.is_cuda and launch.q.dtype is torch.float32:  # only in tests: tensor cores can't multiply float32
        return _Shape(max(16, all_heads), 32, 4, 1)
    row_bytes = columns * 2
    if is_decode and not launch.deterministic:
        num_stages = min(4, 1 + DECODE_SHARED_BYTES // (2 * DECODE_TILE * row_bytes))
        return _Shape(max(16, all_heads), DECODE_TILE, 4, num_stages)
    is_large = shared_bytes >= LARGE_SHARED_BYTES and not launch.deterministic
    block_m = max(128 if is_large else 64, all_heads)
    tile = 128 if is_large and columns <= 128 and not launch.is_int8 else 64
    num_stages = (shared_bytes - SPARE_SHARED_BYTES - block_m * row_bytes) // (2 * tile * row_bytes)
    return _Shape(block_m, tile, 8, max(1, min(2 if launch.deterministic else 3, num_stages)))


@dataclass(frozen=True, slots=True)
class _Splits:
    num_programs: int
    """Programs per row and KV head."""
    num_parts: int
    """Parts to allocate per row and head."""

    @property
    def is_direct(self) -> bool:
        return self.num_parts == 1


def _plan_splits(launch: _Launch) -> _Splits | None:
    step = launch.step
    return _cut(
        launch.workspace,
        num_rows=step.num_rows,
        max_seq_len=step.max_seq_len,
        num_heads=launch.num_heads,
        num_kv_heads=launch.num_kv_heads,
        window=launch.window,
        tile=None if launch.deterministic else _shape(launch, is_decode=True).tile,
    )


def _cut(
    workspace: AttentionWorkspace,
    *,
    num_rows: int,
    max_seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    window: int,
    tile: int | None,
) -> _Splits | None:
    """Return how to cut a decode's contexts, or None if only the prefill kernel can. `tile`: None in deterministic mode."""
    wanted = cdiv(PROGRAMS_PER_MULTIPROCESSOR * workspace.multiprocessors.count, num_rows * num_kv_heads)
    room = len(workspace.parts) // (num_rows * num_heads)
    if tile is not None:
        num_tiles = cdiv(max_seq_len, tile)
        if window:
            num_tiles = min(num_tiles, cdiv(window, tile) + 1)
        num_splits = max(1, min(wanted, room, num_tiles // LEAST_SPLIT_TILES))
        return _Splits(num_splits, num_splits)
    num_parts = cdiv(max_seq_len, DETERMINISTIC_SPLIT)
    if num_parts > max(1, room):
        return None
    return _Splits(min(num_parts, wanted), num_parts)


def decode_programs(
    workspace: AttentionWorkspace, *, num_rows: int, max_seq_len: int, num_heads: int, num_kv_heads: int, deterministic: bool
) -> int:
    """Return how many programs `decode_kernel` runs per row and KV head if the longest row has `max_seq_len`.

    Return 0 if the prefill kernel is used instead.
    """
    splits = _cut(
        workspace,
        num_rows=num_rows,
        max_seq_len=max_seq_len,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        window=0,
        tile=None if deterministic else DECODE_TILE,
    )
    return 0 if splits is None else splits.num_programs


def paged_attention(
    out: torch.Tensor,
    q: torch.Tensor,
    layer: KvLayer,
    step: StepTensors,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    scale: float,
    window: int,
    softcap: float,
    workspace: AttentionWorkspace,
    deterministic: bool,
    sinks: torch.Tensor | None = None,
) -> None:
    """Compute `program.Attention` of a step's queries. The cache must already have the step's keys and values.

    q, out [num_tokens, num_heads * head_dim], rows may be strided; `scale` > 0. `sinks`: the program's times log2(e), float32
    [num_heads].
    """
    shape = (num_heads, num_kv_heads, head_dim, scale, window, softcap)
    launch = _Launch(out, q, layer, step, *shape, workspace, deterministic, sinks)
    splits = None
    if step.max_query_len == 1 or step.num_rows > 1:
        splits = _plan_splits(launch)
    if splits is not None:
        launch.decode(splits)
    if step.max_query_len > 1 or splits is None:
        launch.prefill(leaves_decodes=splits is not None)


@dataclass(frozen=True, slots=True, eq=False)
class _Launch:
    out: torch.Tensor
    q: torch.Tensor
    layer: KvLayer
    step: StepTensors
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    workspace: AttentionWorkspace
    deterministic: bool
    sinks: torch.Tensor | None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def is_int8(self) -> bool:
        return self.layer.k_scale is not None

    def decode(self, splits: _Splits) -> None:
        workspace, step = self.workspace, self.step
        shape = _shape(self, is_decode=True)
        cut = {"SPLIT_TILES": self._split_tiles(shape), "LEAST_TILES": LEAST_SPLIT_TILES}
        decode_kernel[(self.num_kv_heads, step.num_rows, splits.num_programs)](
            workspace.parts,
            workspace.stats,
            splits.num_parts,
            int(splits.is_direct),
            *self._tensors(),
            **self._constants(),
            **cut,
            **shape.options(),
        )
        if splits.is_direct:
            return
        merge_kernel[(self.num_heads, step.num_rows)](
            self.out,
            workspace.parts,
            workspace.stats,
            step.query_start_loc,
            step.context_lens,
            self.sinks,
            self.out.stride(0),
            self._factor,
            splits.num_parts,
            splits.num_programs,
            HEAD_DIM=self.head_dim,
            COLUMNS=_columns(self.head_dim),
            TILE=shape.tile,
            WINDOW=self.window,
            HAS_SINKS=self.sinks is not None,
            **cut,
            num_warps=1,
        )

    def prefill(self, *, leaves_decodes: bool) -> None:
        """Launch `prefill_kernel`, which computes all rows, or with `leaves_decodes` only rows with several queries.

        Call this after a decode's parts are merged, since it reuses their memory.
        """
        shape = _shape(self, is_decode=False)
        queries = shape.block_m // self.group
        num_tiles = self.step.num_tokens // queries + self.step.num_rows
        num_parts = self._num_prefill_parts(queries)
        prefill_kernel[(self.num_kv_heads, num_tiles, num_parts)](
            self.workspace.parts,
            self.workspace.stats,
            self.step.num_rows,
            int(leaves_decodes),
            *self._tensors(),
            **self._constants(),
            SPLIT_TILES=self._split_tiles(shape),
            QUERIES=queries,
            **shape.options(),
        )
        if num_parts == 1:
            return
        merge_prefill_kernel[(self.num_heads, self.step.num_tokens)](
            self.out,
            self.workspace.parts,
            self.workspace.stats,
            self.step.row_of_token,
            self.step.query_start_loc,
            self.sinks,
            self.out.stride(0),
            self._factor,
            num_parts,
            int(leaves_decodes),
            HEAD_DIM=self.head_dim,
            COLUMNS=_columns(self.head_dim),
            HAS_SINKS=self.sinks is not None,
            num_warps=1,
        )

    def _num_prefill_parts(self, queries: int) -> int:
        """Return more than one where few queries after a long context would leave the device idle."""
        if self.deterministic:
            return 1
        step, workspace = self.step, self.workspace
        wanted = workspace.multiprocessors.count // (cdiv(step.num_tokens, queries) * self.num_kv_heads)
        length = min(step.max_seq_len, self.window or step.max_seq_len)
        room = len(workspace.parts) // (step.num_tokens * self.num_heads)
        return max(1, min(wanted, room, length // LEAST_PREFILL_PART))

    @property
    def _factor(self) -> float:
        """The factor that turns scores into exponents of two. A softcap has already applied `scale`."""
        return LOG2_E if self.softcap > 0 else self.scale * LOG2_E

    def _split_tiles(self, shape: _Shape) -> int:
        return DETERMINISTIC_SPLIT // shape.tile if self.deterministic else 0

    def _tensors(self) -> tuple[Any, ...]:
        layer, step = self.layer, self.step
        return (
            self.out,
            self.q,
            layer.k,
            layer.v,
            layer.k_scale,
            layer.v_scale,
            step.block_tables,
            step.query_start_loc,
            step.context_lens,
            self.sinks,
            self.out.stride(0),
            self.q.stride(0),
            step.block_tables.stride(0),
            self._factor,
            self.scale / self.softcap if self.softcap > 0 else 0.0,
        )

    def _constants(self) -> dict[str, Any]:
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "HEAD_DIM": self.head_dim,
            "COLUMNS": _columns(self.head_dim),
            "KEY_GROUP": KEY_GROUP,
            "BLOCK_SIZE": self.layer.block_size,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "IS_INT8": self.is_int8,
            "HAS_SINKS": self.sinks is not None,
        }
