"""The part of FlashInfer that we call, in plain torch: the semantics that its documentation states, and none of its speed.

https://docs.flashinfer.ai/api/attention.html and tutorials/kv_layout.html. Where the real one has hazards, so has this: a plan
lies in the workspace, which wrappers may share, and is good until the next; buffers of a CUDA graph are read when it runs.
`test_flashinfer_package.py` holds its signatures against the real package, where that is installed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch


class Wrapper:
    """The part that the two wrappers have in common."""

    error = 0.0
    """Added to every answer, for tests of who notices."""

    def __init__(self, workspace: torch.Tensor, kv_layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert kv_layout == "NHD"
        self._plan = torch.zeros(8 << 20, dtype=torch.uint8)
        self._heads: tuple[int, int, int, int] | None = None

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        assert float_workspace_buffer.dtype == int_workspace_buffer.dtype == torch.uint8
        self._plan = int_workspace_buffer

    def _put(self, lens: torch.Tensor, seq_lens: torch.Tensor | None, rest: dict[str, Any], *heads: int) -> None:
        """The plan: how long rows are, in the workspace; what is the same for all steps, in the object."""
        for name in ("q_data_type", "kv_data_type"):
            assert isinstance(rest.pop(name), torch.dtype)
        self._scale = rest.pop("sm_scale")
        assert not rest, f"not of FlashInfer: {sorted(rest)}"
        assert seq_lens is not None
        assert torch.equal(seq_lens, lens)
        self._heads = heads  # type: ignore[assignment]
        self._plan[: 4 * len(lens)].view(torch.int32).copy_(lens)

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        starts: list[int],
        indptr: torch.Tensor,
        indices: torch.Tensor,
    ) -> torch.Tensor:
        assert self._heads is not None, "run before a plan"
        num_heads, num_kv_heads, head_dim, page_size = self._heads
        k_cache, v_cache = paged_kv_cache
        assert q.shape == (starts[-1], num_heads, head_dim) == tuple(out.shape)
        assert q.stride(-1) == 1
        assert out.is_contiguous()
        assert k_cache.shape[1:] == v_cache.shape[1:] == (page_size, num_kv_heads, head_dim)
        assert k_cache.stride() == v_cache.stride()
        lens = self._plan.view(torch.int32)[: len(starts) - 1].tolist()
        for row, (begin, end, length) in enumerate(zip(starts, starts[1:], lens, strict=False)):
            pages = indices[indptr[row] : indptr[row + 1]].long()
            k, v = (cache[pages].reshape(-1, num_kv_heads, head_dim)[:length].float() for cache in paged_kv_cache)
            queries = q[begin:end].float().view(end - begin, num_kv_heads, -1, head_dim)
            scores = torch.einsum("qhgd,khd->hgqk", queries, k) * self._scale
            position = torch.arange(length)
            hidden = position[None, :] > (length - (end - begin) + torch.arange(end - begin))[:, None]
            weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            answers = torch.einsum("hgqk,khd->qhgd", weights, v).reshape(end - begin, num_heads, head_dim)
            out[begin:end] = answers + self.error
        return out


def seq_lens_of(indptr: torch.Tensor, last_page_len: torch.Tensor, page_size: int) -> torch.Tensor:
    assert indptr.device.type == "cpu" == last_page_len.device.type, "another device's would be waited for"
    assert indptr.dtype == torch.int32 == last_page_len.dtype
    assert int(last_page_len.min()) >= 1
    assert int(last_page_len.max()) <= page_size
    return (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """One query a row. Only what a CUDA graph needs: fixed numbers of rows, in buffers of the caller."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert use_cuda_graph
        assert paged_kv_indptr_buffer is not None
        assert paged_kv_indices_buffer is not None
        assert paged_kv_last_page_len_buffer is not None
        self._indptr, self._indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._last_page_len = paged_kv_last_page_len_buffer
        assert len(self._indptr) == len(self._last_page_len) + 1

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        seq_lens: torch.Tensor | None = None,
        **rest: Any,
    ) -> None:
        assert len(last_page_len) == len(self._last_page_len), "the number of rows is fixed"
        assert len(indices) <= len(self._indices)
        lens = seq_lens_of(indptr, last_page_len, page_size)
        self._put(lens, seq_lens, rest, num_qo_heads, num_kv_heads, head_dim, page_size)
        self._indptr.copy_(indptr)
        self._last_page_len.copy_(last_page_len)
        self._indices[: len(indices)].copy_(indices)

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> torch.Tensor:
        return self._run(q, paged_kv_cache, out, list(range(len(self._indptr))), self._indptr, self._indices)


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Any queries, which are the last positions of their rows."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", backend: str = "auto") -> None:
        super().__init__(float_workspace_buffer, kv_layout)
        assert backend in ("auto", "fa2")

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        seq_lens: torch.Tensor | None = None,
        **rest: Any,
    ) -> None:
        assert causal
        lens = seq_lens_of(paged_kv_indptr, paged_kv_last_page_len, page_size)
        self._put(lens, seq_lens, rest, num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._starts, self._indptr = qo_indptr.tolist(), paged_kv_indptr.clone()
        self._indices = paged_kv_indices

    def run(self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor) -> torch.Tensor:
        return self._run(q, paged_kv_cache, out, self._starts, self._indptr, self._indices)


def install(monkeypatch: pytest.MonkeyPatch, *, version: str = "0.7.2", error: float = 0.0, **changes: Any) -> ModuleType:
    """As the package `flashinfer`, for one test. `error`: of every answer; `changes` are attributes of the module."""
    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    wrappers = (BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper)
    for wrapper in wrappers:
        setattr(module, wrapper.__name__, type(wrapper.__name__, (wrapper,), {"error": error}))
    for name, value in ({"__version__": version} | changes).items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    return module
