"""Attention of a step's queries over the paged cache; called by the lowering, once per layer.

Two kernels (`attention_kernels`). `decode_kernel` computes rows with one query: a program takes all query heads of one KV head,
so that keys and values are read once, and a part of the context; `merge_kernel` merges the parts. `prefill_kernel` takes a tile
of queries of one row and walks its whole context. A step with rows of both kinds launches both, and each leaves the other's
rows alone.

Grids follow from the step's host numbers and nothing is waited for, so that a step can be captured in a CUDA graph: programs
that find nothing to do in their row leave at once.

Deterministic, a query's bits depend on its own position and context alone. Then both kernels have tiles of the same shape,
the context is cut at multiples of `DETERMINISTIC_SPLIT`, and the parts are merged in ascending order, by the prefill kernel
while it walks. Otherwise a decode row is cut into as many parts as keep the device busy, and a prefill walks without a cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from penstock.backends.cuda.kernels.attention_kernels import decode_kernel, merge_kernel, prefill_kernel
from penstock.backends.cuda.kernels.online_softmax import LOG2_E
from penstock.types.kv_dtype import KEY_GROUP

if TYPE_CHECKING:
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors

TILE = 64
"""Positions whose keys and values are loaded at a time, from multiples of it on."""
DETERMINISTIC_SPLIT = 512
"""Positions of a part of the context, of which a deterministic step has as many as the context needs."""
LEAST_SPLIT_TILES = 2
"""Of a part otherwise: a shorter one costs more in merging than it wins."""
PROGRAMS_PER_MULTIPROCESSOR = 16
"""Of a decode: some three run at once, and the more there are, the less of the device idles while the last ones end."""
MAX_WORKSPACE_BYTES = 256 << 20
"""Of a deterministic decode. What needs more is computed by the prefill kernel, whose bits are the same."""
SHARED_BYTES = 200 << 10
"""Of one program's tiles; a multiprocessor has 227 KiB."""
HOST_MULTIPROCESSORS = 2
"""Of the interpreter, where each program costs milliseconds."""


@dataclass(frozen=True, slots=True, eq=False)
class AttentionWorkspace:
    """Where a decode's parts lie until they are merged. One serves all layers, one step at a time."""

    parts: torch.Tensor
    """float32 [num_parts, columns]"""
    stats: torch.Tensor
    """The largest score and the sum of weights of each. float32 [num_parts, 2]"""
    num_multiprocessors: int

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
        processors = _num_multiprocessors(device)
        if deterministic:
            num_parts = max_rows * num_heads * triton.cdiv(max_model_len, DETERMINISTIC_SPLIT)
            num_parts = min(num_parts, MAX_WORKSPACE_BYTES // (4 * columns))
        else:
            num_rows = max(max_rows, triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * processors, num_kv_heads))
            num_parts = 2 * num_rows * num_heads  # the number of splits is rounded up
        parts = torch.empty((num_parts, columns), dtype=torch.float32, device=device)
        return AttentionWorkspace(parts, torch.empty((num_parts, 2), dtype=torch.float32, device=device), processors)


def _num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return HOST_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _columns(head_dim: int) -> int:
    """A head's, padded to a power of two that holds whole groups of int8 keys."""
    return max(KEY_GROUP, triton.next_power_of_2(head_dim))


@dataclass(frozen=True, slots=True)
class _Shape:
    """How a kernel is cut into tiles and run."""

    block_m: int
    """Rows of a tile of queries: (query, head) pairs that share a KV head."""
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        return {"BLOCK_M": self.block_m, "num_warps": self.num_warps, "num_stages": self.num_stages}


def _shape(block_m: int, group: int, columns: int, itemsize: int) -> _Shape:
    """Of tiles with at least `block_m` rows, all query heads of a KV head among them."""
    block_m = max(block_m, triton.next_power_of_2(group))
    num_warps = 8 if block_m >= 128 else 4
    tile_bytes = 2 * TILE * columns * itemsize
    num_stages = (SHARED_BYTES - block_m * columns * itemsize) // tile_bytes
    return _Shape(block_m, num_warps, max(1, min(3, num_stages)))


def _decode_shape(group: int, columns: int, itemsize: int, *, deterministic: bool) -> _Shape:
    return _shape(64 if deterministic else 16, group, columns, itemsize)


def _prefill_shape(group: int, columns: int, itemsize: int, *, deterministic: bool) -> _Shape:
    """Sums of 128 rows of 256 columns would not stay in registers."""
    return _shape(64 if deterministic or columns > 128 or itemsize > 2 else 128, group, columns, itemsize)


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


def _plan_splits(
    step: StepTensors, workspace: AttentionWorkspace, num_heads: int, num_kv_heads: int, window: int, *, deterministic: bool
) -> _Splits | None:
    """None if the workspace can't hold the parts."""
    num_tiles = triton.cdiv(step.max_seq_len, TILE)
    if window:
        num_tiles = min(num_tiles, triton.cdiv(window, TILE) + 1)
    wanted = triton.cdiv(PROGRAMS_PER_MULTIPROCESSOR * workspace.num_multiprocessors, step.num_rows * num_kv_heads)
    room = len(workspace.parts) // (step.num_rows * num_heads)
    if not deterministic:
        num_splits = max(1, min(wanted, room, num_tiles // LEAST_SPLIT_TILES))
        return _Splits(num_splits, num_splits)
    num_parts = triton.cdiv(step.max_seq_len, DETERMINISTIC_SPLIT)
    if num_parts > max(1, room):
        return None
    return _Splits(min(num_parts, wanted), num_parts)


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
) -> None:
    """See `program.Attention`; the keys and values of the step are in the cache already.

    q, out [num_tokens, num_heads * head_dim]; rows may lie apart. `scale` is positive.
    """
    launch = _Launch(out, q, layer, step, num_heads, num_kv_heads, head_dim, scale, window, softcap, workspace, deterministic)
    splits = None
    if step.max_query_len == 1 or step.num_rows > 1:
        splits = _plan_splits(step, workspace, num_heads, num_kv_heads, window, deterministic=deterministic)
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

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def decode(self, splits: _Splits) -> None:
        """Rows with one query."""
        workspace, step = self.workspace, self.step
        decode_kernel[(self.num_kv_heads, step.num_rows, splits.num_programs)](
            workspace.parts,
            workspace.stats,
            splits.num_parts,
            *self._tensors(),
            **self._constants(),
            LEAST_TILES=LEAST_SPLIT_TILES,
            IS_DIRECT=splits.is_direct,
            **_decode_shape(
                self.group, _columns(self.head_dim), self.q.dtype.itemsize, deterministic=self.deterministic
            ).options(),
        )
        if splits.is_direct:
            return
        merge_kernel[(self.num_heads, step.num_rows)](
            self.out,
            workspace.parts,
            workspace.stats,
            step.query_start_loc,
            step.context_lens,
            self.out.stride(0),
            self._factor,
            splits.num_parts,
            splits.num_programs,
            HEAD_DIM=self.head_dim,
            COLUMNS=_columns(self.head_dim),
            TILE=TILE,
            SPLIT_TILES=self._split_tiles,
            LEAST_TILES=LEAST_SPLIT_TILES,
            WINDOW=self.window,
            num_warps=1,
        )

    def prefill(self, *, leaves_decodes: bool) -> None:
        """All rows, or those with more than one query."""
        shape = _prefill_shape(self.group, _columns(self.head_dim), self.q.dtype.itemsize, deterministic=self.deterministic)
        queries = shape.block_m // self.group
        num_tiles = self.step.num_tokens // queries + self.step.num_rows
        prefill_kernel[(self.num_kv_heads, num_tiles)](
            self.step.num_rows,
            *self._tensors(),
            **self._constants(),
            QUERIES=queries,
            LEAVES_DECODES=leaves_decodes,
            **shape.options(),
        )

    @property
    def _factor(self) -> float:
        """Of scores in exponents of two: they are capped ones with a softcap, else the bare products."""
        return LOG2_E if self.softcap > 0 else self.scale * LOG2_E

    @property
    def _split_tiles(self) -> int:
        return DETERMINISTIC_SPLIT // TILE if self.deterministic else 0

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
            "TILE": TILE,
            "SPLIT_TILES": self._split_tiles,
            "WINDOW": self.window,
            "SOFTCAP": self.softcap,
            "IS_INT8": self.layer.k_scale is not None,
        }
