"""Attention of a step's queries over the paged cache; called by the lowering, once per layer.

Two kernels (`attention_kernels`). `decode_kernel` computes rows with one query: a program takes all query heads of one KV head,
so that keys and values are read once, and a part of the context; `merge_kernel` merges the parts. `prefill_kernel` takes a tile
of queries of one row and walks its whole context. A step with rows of both kinds launches both, and each leaves the other's
rows alone.

Grids follow from the step's host numbers and nothing is waited for, so that a step can be captured in a CUDA graph: programs
that find nothing to do in their row leave at once.

Deterministic, a query's bits depend on its own position and context alone. Then both kernels have tiles of the same shape,
the context is cut at multiples of `DETERMINISTIC_SPLIT`, and the parts are merged in ascending order, by the prefill kernel
while it walks. Otherwise a row is cut into as many parts as keep the device busy: always in a decode, and in a prefill of few
queries after a long context, whose parts `merge_prefill_kernel` merges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.backends.cuda.kernels.attention_kernels import decode_kernel, merge_kernel, merge_prefill_kernel, prefill_kernel
from penstock.backends.cuda.kernels.online_softmax import LOG2_E
from penstock.types.kv_dtype import KEY_GROUP

if TYPE_CHECKING:
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors

DETERMINISTIC_SPLIT = 512
"""Positions of a part of the context, of which a deterministic step has as many as the context needs."""
LEAST_SPLIT_TILES = 2
"""Tiles of a part otherwise: a shorter one costs more in merging than it wins."""
PROGRAMS_PER_MULTIPROCESSOR = 16
"""Programs of a decode: some three run at once, and the more there are, the less of the device idles while the last ones
end."""
LEAST_PREFILL_PART = 512
"""Positions of a part of a prefill's context."""
MAX_WORKSPACE_BYTES = 256 << 20
"""Workspace of a deterministic decode. A larger one is computed by the prefill kernel, whose bits are the same."""
LARGE_SHARED_BYTES = 200 << 10
"""That a program can have on an H100 and later ones for servers: 227 KiB. An A100 has 163, those of desktops 99."""
SPARE_SHARED_BYTES = 8 << 10
"""For what is neither queries nor keys nor values."""
DECODE_TILE = 64
"""Positions."""
DECODE_SHARED_BYTES = 72 << 10
"""Shared memory of one program's tiles of keys and values: three programs share an H100's multiprocessor."""
PARTS_PER_MULTIPROCESSOR = 64
"""Parts of a KV head's queries that the workspace has room for: half of a prefill's tile."""


@dataclass(frozen=True, slots=True)
class Multiprocessors:
    """The device's multiprocessors, for which grids and tiles are chosen."""

    count: int
    shared_bytes: int
    """Bytes that a program has at most."""

    @staticmethod
    def of(device: torch.device) -> Multiprocessors:
        if device.type != "cuda":
            return INTERPRETED
        index = torch.cuda.current_device() if device.index is None else device.index
        properties = triton.runtime.driver.active.utils.get_device_properties(index)
        return Multiprocessors(properties["multiprocessor_count"], properties["max_shared_mem"])


INTERPRETED = Multiprocessors(2, 227 << 10)
"""The tiles of an H100 or H200, and few programs, each of which costs milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Where a decode's parts lie until they are merged. One serves all layers, one step at a time."""

    parts: torch.Tensor
    """float32 [num_parts, columns]"""
    stats: torch.Tensor
    """The largest score and the sum of weights of each. float32 [num_parts, 2]"""
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
        """Room for decodes of at most `max_rows` rows."""
        columns = _columns(head_dim)
        device = torch.device(device)
        processors = Multiprocessors.of(device)
        if deterministic:
            num_parts = max_rows * num_heads * triton.cdiv(max_model_len, DETERMINISTIC_SPLIT)
            num_parts = min(num_parts, MAX_WORKSPACE_BYTES // (4 * columns))
        else:
            # The number of a decode's parts is rounded up; a prefill has them if its tokens are too few for the device.
            num_parts = 2 * num_heads * max(max_rows, triton.cdiv(PARTS_PER_MULTIPROCESSOR * processors.count, num_kv_heads))
        parts = torch.empty((num_parts, columns), dtype=torch.float32, device=device)
        return AttentionWorkspace(parts, torch.empty((num_parts, 2), dtype=torch.float32, device=device), processors)


def _columns(head_dim: int) -> int:
    """A head's, padded to a power of two that holds whole groups of int8 keys."""
    return max(KEY_GROUP, triton.next_power_of_2(head_dim))


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a kernel is cut into tiles and run. None but `block_m` and `tile` changes a bit of the answer."""

    block_m: int
    """Rows of a tile of queries: (query, head) pairs that share a KV head."""
    tile: int
    """Positions whose keys and values are loaded at a time, from multiples of it on."""
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "TILE": self.tile, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _shape(launch: _Launch, *, is_decode: bool) -> _Shape:
    """Chosen by what Triton 3.6 makes of the kernels for sm_90: no spills within loops, and enough loads in flight.

    A decode waits for memory: small tiles, several programs on a multiprocessor. A prefill's tensor cores want 128 rows for
    what they read, in two groups of warps; older and smaller GPUs have no room for that. int8 keys take registers to be
    scaled, so a tile of them is shorter.
    """
    columns, shared_bytes = _columns(launch.head_dim), launch.workspace.multiprocessors.shared_bytes
    all_heads = triton.next_power_of_2(launch.group)
    if launch.q.is_cuda and launch.q.dtype is torch.float32:  # only in tests: no tensor core multiplies it
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
    """How a decode's contexts are cut."""

    num_programs: int
    """For each row and KV head."""
    num_parts: int
    """That the workspace holds for each row and head."""

    @property
    def is_direct(self) -> bool:
        """Whether there is nothing to merge."""
        return self.num_parts == 1


def _plan_splits(launch: _Launch) -> _Splits | None:
    """None if the workspace can't hold the parts."""
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
    """`tile` is None in deterministic mode."""
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * workspace.multiprocessors.count, num_rows * num_kv_heads)
    room = len(workspace.parts) // (num_rows * num_heads)
    if tile is not None:
        num_tiles = triton.cdiv(max_seq_len, tile)
        if window:
            num_tiles = min(num_tiles, triton.cdiv(window, tile) + 1)
        num_splits = max(1, min(wanted, room, num_tiles // LEAST_SPLIT_TILES))
        return _Splits(num_splits, num_splits)
    num_parts = triton.cdiv(max_seq_len, DETERMINISTIC_SPLIT)
    if num_parts > max(1, room):
        return None
    return _Splits(min(num_parts, wanted), num_parts)


def decode_programs(
    workspace: AttentionWorkspace, *, num_rows: int, max_seq_len: int, num_heads: int, num_kv_heads: int, deterministic: bool
) -> int:
    """Programs of a decode of so many rows, whose longest may have `max_seq_len` positions: for each row and KV head,
    of which those that find nothing to do in their row leave at once. 0: the prefill kernel computes it."""
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
    """See `program.Attention`; the keys and values of the step are in the cache already.

    q, out [num_tokens, num_heads * head_dim]; rows may lie apart. `scale` is positive. `sinks` are exponents of two: those of
    the program times log2(e), float32 [num_heads].
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
    """One call of `paged_attention`."""

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
        """Rows with one query."""
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
        """All rows, or those with more than one query. Not before a decode's parts are merged: they lie in the same place."""
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
        """More than one where a few queries after a long context would leave most of the device without a program."""
        if self.deterministic:
            return 1
        step, workspace = self.step, self.workspace
        wanted = workspace.multiprocessors.count // (triton.cdiv(step.num_tokens, queries) * self.num_kv_heads)
        length = min(step.max_seq_len, self.window or step.max_seq_len)
        room = len(workspace.parts) // (step.num_tokens * self.num_heads)
        return max(1, min(wanted, room, length // LEAST_PREFILL_PART))

    @property
    def _factor(self) -> float:
        """Factor of scores in exponents of two: scores are capped ones with a softcap, else the bare products."""
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
