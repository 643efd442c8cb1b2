"""Attention by FlashInfer (https://docs.flashinfer.ai). Our KV cache has FlashInfer's layout NHD: pages of [block_size,
num_kv_heads, head_dim].

FlashInfer plans each step on the host. Page lists are made on the device, from the block tables there. Plans share pinned
memory, so each plan waits until the previous plan has been copied to the device. That wait is short.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from penstock.backends.cuda.attention import in_words
from penstock.backends.cuda.kernels.attention import Multiprocessors
from penstock.backends.cuda.kernels.page_indices import page_indices

if TYPE_CHECKING:
    from penstock.backends.cuda.attention import AttentionShape, RowLens
    from penstock.backends.cuda.kv_cache import KvLayer
    from penstock.backends.cuda.step import StepTensors
    from penstock.backends.cuda.stream import Stream

PACKAGE = "flashinfer"
VERSIONS = ((0, 7, 2), (0, 8))
"""Supported versions: the first and later, below the second, as in pyproject.toml."""
HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.bfloat16, torch.float16)
LEAST_GROUP_FOR_TENSOR_CORES = 4
"""Decodes use tensor cores from this many query heads per KV head on, as is usual with FlashInfer."""
LEAST_WORKSPACE_BYTES = 128 << 20
"""The size that FlashInfer's documentation recommends."""
DECODE_PLAN_BYTES = 1 << 20
"""Memory for a decode's plan: 17 bytes for each part of a row. There are some hundreds, or at most two per row."""
_INDPTR, _STARTS, _LAST, _LENS = range(4)


def is_installed() -> bool:
    return find_spec(PACKAGE) is not None


def import_package() -> ModuleType | str:
    try:
        module = import_module(PACKAGE)
    except Exception as error:  # importing loads compilers and NVIDIA's libraries, which raise anything
        return f"importing it fails: {in_words(error)}"
    version = str(getattr(module, "__version__", "without a version"))
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if not VERSIONS[0] <= numbers < VERSIONS[1]:
        least, below = (".".join(map(str, bound)) for bound in VERSIONS)
        return f"version {version} is not one that Penstock knows (from {least}, before {below})"
    return module


def why_unfit(shapes: Sequence[AttentionShape], dtype: torch.dtype, *, is_int8_kv: bool, deterministic: bool) -> str | None:
    """Return why FlashInfer can't compute attention of these shapes, or None if it can."""
    if deterministic:
        return "deterministic mode needs sums in an order independent of the batch"
    if is_int8_kv:
        return "keys and values are stored in int8"
    if dtype not in DTYPES:
        return f"the model computes in {str(dtype).removeprefix('torch.')}"
    if not shapes:
        return "the model reads texts, and keeps no keys and values"
    if len(shapes) != 1:
        return "the attention of the model's layers differs"
    if shapes[0].window or shapes[0].softcap or shapes[0].has_sinks:
        return "the model's attention has a window, a soft cap or sinks"
    if shapes[0].head_dim not in HEAD_DIMS:
        return f"heads have {shapes[0].head_dim} columns"
    return None


def workspace_bytes(shape: AttentionShape, *, max_rows: int, num_multiprocessors: int) -> int:
    """Return the bytes of FlashInfer's workspace, for the partial results of rows that it splits.

    There are two programs per multiprocessor, or two tiles per row of a captured decode: see `PrefillSplitQOKVIndptr` and
    `PrefillPlan` in FlashInfer's scheduler.cuh.
    """
    num_split = max(1, 2 * num_multiprocessors // shape.num_kv_heads)
    tile = 16 if shape.group <= 16 else 64 if shape.group <= 64 else 128
    num_queries = max(num_split * 128, max(num_split, 2 * max_rows) * tile) // shape.group + 1
    return max(LEAST_WORKSPACE_BYTES, num_queries * shape.num_heads * (shape.head_dim + 1) * 4 + (1 << 20))


class FlashInferAttention:
    """Computes the attention of steps by FlashInfer. Call `plan` before each step.

    Captured decodes need fixed buffers, so each batch size in `graph_rows` has its own FlashInfer wrapper. Others share one.
    `max_blocks`: width of block tables. `backend`: FlashInfer's name of the kernels for steps that are not captured.
    """

    def __init__(
        self,
        package: Any,
        shape: AttentionShape,
        *,
        dtype: torch.dtype,
        block_size: int,
        max_rows: int,
        max_blocks: int,
        graph_rows: Sequence[int],
        stream: Stream,
        device: torch.device,
        backend: str = "auto",
    ) -> None:
        self._shape, self._dtype, self._block_size = shape, dtype, block_size
        self._stream = stream
        num_bytes = workspace_bytes(shape, max_rows=max_rows, num_multiprocessors=Multiprocessors.of(device).count)
        workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=device)  # FlashInfer requires zeros
        decode_plans = torch.zeros(DECODE_PLAN_BYTES, dtype=torch.uint8, device=device)
        width = max_rows + 1
        self._host = stream.pinned(4 * width).view(4, width)
        """Arrays of the plan; `_INDPTR` and so on are their indices."""
        self._indptr = torch.zeros(width, dtype=torch.int32, device=device)
        self._last_page_len = torch.zeros(width, dtype=torch.int32, device=device)
        self._indices = torch.zeros(max_rows * max_blocks, dtype=torch.int32, device=device)
        self._others = package.BatchPrefillWithPagedKVCacheWrapper(workspace, kv_layout="NHD", backend=backend)
        self._decodes: dict[int, Any] = {}
        for num_rows in graph_rows:
            wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                kv_layout="NHD",
                use_cuda_graph=True,
                use_tensor_cores=shape.group >= LEAST_GROUP_FOR_TENSOR_CORES,
                paged_kv_indptr_buffer=self._indptr[: num_rows + 1],
                paged_kv_indices_buffer=self._indices,
                paged_kv_last_page_len_buffer=self._last_page_len[:num_rows],
            )
            wrapper.reset_workspace_buffer(workspace, decode_plans)  # shared: otherwise each wrapper allocates 8 MiB
            self._decodes[num_rows] = wrapper
        self._planned = self._others
        self._copied = stream.mark()

    def plan(self, rows: RowLens, *, is_captured: bool) -> None:
        """Give FlashInfer the lengths of the next step. `is_captured`: the step runs as a CUDA graph, or will be captured."""
        self._copied.wait()
        shape, num_rows, lens = self._shape, rows.num_rows, rows.seq_lens
        num_pages = -(-lens // self._block_size)
        host = self._host.numpy()
        host[_INDPTR, 1 : num_rows + 1] = num_pages.cumsum()
        host[_STARTS, : num_rows + 1] = rows.query_starts
        host[_LAST, :num_rows] = lens - (num_pages - 1) * self._block_size
        host[_LENS, :num_rows] = lens
        indptr, starts = self._host[_INDPTR, : num_rows + 1], self._host[_STARTS, : num_rows + 1]
        last_page_len, seq_lens = self._host[_LAST, :num_rows], self._host[_LENS, :num_rows]
        indices = self._indices[: int(host[_INDPTR, num_rows])]
        heads = (shape.num_heads, shape.num_kv_heads, shape.head_dim, self._block_size)
        rest = {"sm_scale": shape.scale, "q_data_type": self._dtype, "kv_data_type": self._dtype, "seq_lens": seq_lens}
        if is_captured:
            self._planned = self._decodes[num_rows]
            self._planned.plan(indptr, indices, last_page_len, *heads, **rest)
        else:
            self._planned = self._others
            self._indptr[: num_rows + 1].copy_(indptr, non_blocking=True)
            self._planned.plan(starts, indptr, indices, last_page_len, *heads, causal=True, **rest)
        self._copied = self._stream.mark()

    def begin(self, step: StepTensors) -> None:
        page_indices(self._indices, step.block_tables, self._indptr, step.num_rows)

    def attend(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        layer: KvLayer,
        step: StepTensors,
        shape: AttentionShape,
        sinks: torch.Tensor | None = None,
    ) -> None:
        assert out.is_contiguous(), "FlashInfer needs a contiguous output"
        assert sinks is None, "`why_unfit` refuses sinks"
        heads = (step.num_tokens, shape.num_heads, shape.head_dim)
        self._planned.run(q.view(heads), (layer.k, layer.v), out=out.view(heads))
