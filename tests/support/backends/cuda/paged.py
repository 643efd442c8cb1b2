"""Rows whose keys and values lie in a paged cache, in blocks in no order, and what the reference answers to their queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from penstock.backends.cuda.kernels.attention import AttentionWorkspace, paged_attention
from penstock.backends.cuda.kernels.online_softmax import LOG2_E
from penstock.backends.cuda.kv_cache import PagedKvCache
from penstock.backends.cuda.step import StepTensors
from penstock.backends.reference.interpreter import attend
from penstock.backends.reference.kv_cache import SMALLEST_SCALE, KvCache
from penstock.models.program import KvShape
from penstock.types.kv_dtype import KEY_GROUP, KvDtype
from support.interpreted import DEVICE

F32 = np.ndarray[Any, np.dtype[np.float32]]
LAYER = 1
"""The layer in use, of two: the other one is poison."""


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens that a row computes in a step."""

    row: int
    context_len: int
    query_len: int


@dataclass(slots=True)
class Scene:
    """Rows of so many positions, all with a key, a value and a query for each head. A position that holds none is NaN."""

    lengths: Sequence[int]
    block_size: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    kv_dtype: KvDtype = KvDtype.BF16
    dtype: torch.dtype = torch.float32
    size: float = 1.0
    """Size of queries: large ones make for weights that differ much."""
    tables: F32 = field(init=False)
    reference: KvCache = field(init=False)
    cache: PagedKvCache = field(init=False)
    queries: list[F32] = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(sum(self.lengths))
        counts = [-(-length // self.block_size) for length in self.lengths]
        ids = 1 + rng.permutation(sum(counts))
        self.tables = np.zeros((len(counts), max(counts) + 1), np.int32)
        sizes: dict[str, Any] = {
            "num_blocks": 1 + sum(counts),
            "block_size": self.block_size,
            "poison": True,
        }
        shape = KvShape(self.num_kv_heads, self.head_dim)
        self.reference = KvCache(shapes=(shape,) * 2, dtype=self.kv_dtype, **sizes)
        self.cache = PagedKvCache(
            num_layers=2,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            kv_dtype=self.kv_dtype,
            dtype=self.dtype,
            device=DEVICE,
            **sizes,
        )
        self.queries = []
        for row, (length, end) in enumerate(zip(self.lengths, np.cumsum(counts), strict=True)):
            self.tables[row, : counts[row]] = ids[end - counts[row] : end]
            k, v = rng.standard_normal((2, length, self.num_kv_heads, self.head_dim), np.float32)
            self._store(row, k, v)
            self.queries.append(self.size * rng.standard_normal((length, self.num_heads, self.head_dim), np.float32))

    def _slots(self, row: int, positions: F32) -> F32:
        return self.tables[row, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size

    def _store(self, row: int, k: F32, v: F32) -> None:
        slots = self._slots(row, np.arange(len(k)))
        self.reference.write(LAYER, slots, k, v)
        layer = self.cache.layer(LAYER)
        if layer.k_scale is None or layer.v_scale is None:
            kept, values = self.reference.read(LAYER, self.tables[row], len(k))
            put(layer.k, slots, kept)
            put(layer.v, slots, values)
            return
        for x, group, out, scale_out in ((k, KEY_GROUP, layer.k, layer.k_scale), (v, self.head_dim, layer.v, layer.v_scale)):
            integers, scales = quantise(x, group)
            put(out, slots, integers)
            put(scale_out, slots, scales.reshape(len(x), *scale_out.shape[2:]))

    def step(self, spans: Sequence[Span], *, max_seq_len: int | None = None) -> StepTensors:
        """`max_seq_len` as under a captured graph: longer than any row."""
        positions = np.concatenate([np.arange(s.context_len, s.context_len + s.query_len) for s in spans])
        rows = np.repeat([s.row for s in spans], [s.query_len for s in spans])
        slots = np.concatenate([self._slots(r, np.array([p])) for r, p in zip(rows, positions, strict=True)])
        starts = np.cumsum([0, *(s.query_len for s in spans)])
        return StepTensors(
            token_ids=on_device(np.zeros(len(positions)), np.int32),
            positions=on_device(positions, np.int32),
            row_of_token=on_device(np.repeat(np.arange(len(spans)), [s.query_len for s in spans]), np.int32),
            slot_mapping=on_device(slots, np.int64),
            query_start_loc=on_device(starts, np.int32),
            context_lens=on_device([s.context_len for s in spans], np.int32),
            block_tables=on_device(self.tables[[s.row for s in spans]], np.int32),
            sample_tokens=on_device([], np.int32),
            num_tokens=len(positions),
            num_rows=len(spans),
            num_samples=0,
            max_query_len=max(s.query_len for s in spans),
            max_seq_len=max_seq_len or max(s.context_len + s.query_len for s in spans),
        )

    def workspace(
        self, *, deterministic: bool, max_rows: int = 4, num_parts: int | None = None, num_multiprocessors: int | None = None
    ) -> AttentionWorkspace:
        """The workspace of the device, unless told otherwise."""
        made = AttentionWorkspace.allocate(
            max_rows=max(max_rows, len(self.lengths)),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_model_len=max(self.lengths),
            device=DEVICE,
            deterministic=deterministic,
        )
        made.parts.fill_(torch.nan)
        made.stats.fill_(torch.nan)
        processors = replace(made.multiprocessors, count=num_multiprocessors or made.multiprocessors.count)
        return AttentionWorkspace(made.parts[:num_parts], made.stats[:num_parts], processors)

    def attend(
        self,
        spans: Sequence[Span],
        *,
        deterministic: bool = False,
        window: int = 0,
        softcap: float = 0.0,
        sinks: F32 | None = None,
        workspace: AttentionWorkspace | None = None,
        max_seq_len: int | None = None,
    ) -> list[F32]:
        """The kernels' answers to each span. [query_len, num_heads, head_dim] each"""
        step = self.step(spans, max_seq_len=max_seq_len)
        q = np.concatenate([self.queries[s.row][s.context_len :][: s.query_len] for s in spans])
        width = self.num_heads * self.head_dim
        # Rows lie apart, as those of a q that is a part of a larger matrix.
        wide = torch.full((len(q), width + 16), torch.nan, dtype=self.dtype, device=DEVICE)
        wide[:, :width] = torch.from_numpy(q.reshape(len(q), -1)).to(self.dtype)
        out = torch.full((len(q), width), torch.nan, dtype=self.dtype, device=DEVICE)
        paged_attention(
            out,
            wide[:, :width],
            self.cache.layer(LAYER),
            step,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.scale,
            window=window,
            softcap=softcap,
            workspace=workspace or self.workspace(deterministic=deterministic),
            deterministic=deterministic,
            sinks=None if sinks is None else on_device(sinks * LOG2_E, np.float32),
        )
        answers = out.float().cpu().numpy().reshape(len(q), self.num_heads, self.head_dim)
        return np.split(answers, np.cumsum([s.query_len for s in spans])[:-1])

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    def expected(self, spans: Sequence[Span], *, window: int = 0, softcap: float = 0.0, sinks: F32 | None = None) -> list[F32]:
        """The reference's answers."""
        kind: dict[str, Any] = {"softcap": softcap, "sinks": sinks}
        answers = []
        for span in spans:
            end = span.context_len + span.query_len
            k, v = self.reference.read(LAYER, self.tables[span.row], end)
            starts = [max(0, p + 1 - window) if window else 0 for p in range(span.context_len, end)]
            answers.append(
                np.stack(
                    [
                        attend(self.queries[span.row][p], k[start : p + 1], v[start : p + 1], self.scale, **kind)
                        for start, p in zip(starts, range(span.context_len, end), strict=True)
                    ]
                )
            )
        return answers


def put(cache: torch.Tensor, slots: F32, new: F32) -> None:
    """Store rows [num_tokens, ...] of one layer at their slots."""
    flat = cache.view(-1, *cache.shape[2:])
    flat[on_device(slots, np.int64)] = torch.from_numpy(np.ascontiguousarray(new)).to(device=DEVICE, dtype=cache.dtype)


def quantise(x: F32, group: int) -> tuple[F32, F32]:
    """int8 and its scales, of which the reference keeps only the products. [..., columns], [..., groups]"""
    groups = -(-x.shape[-1] // group)
    integers, scales = np.empty_like(x), np.empty((*x.shape[:-1], groups), np.float32)
    for i in range(groups):
        part = x[..., i * group : (i + 1) * group]
        wanted = np.maximum(np.abs(part).max(-1) / np.float32(127), SMALLEST_SCALE)
        scales[..., i] = ((wanted.view(np.uint32) + 0xFFFF) & np.uint32(0xFFFF0000)).view(np.float32)
        integers[..., i * group : (i + 1) * group] = np.rint(part * (1 / scales[..., i : i + 1]))
    return integers, scales


def on_device(values: Any, dtype: Any) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, dtype)).to(DEVICE)
