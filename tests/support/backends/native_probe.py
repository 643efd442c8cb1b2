"""Small engines that run a few instructions on chosen inputs, so that kernels can be tested one at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native._native import Engine, KvFormat, RowOp, RowOpKind, SourceFormat, Team

F32 = NDArray[np.float32]


def bf16(x: F32) -> F32:
    """Rounded to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)


def bf16_bytes(x: F32) -> NDArray[np.uint8]:
    """bfloat16 rows as the bytes of a file. [rows, cols * 2]"""
    return (bf16(x).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(len(x), -1)


class Probe:
    """An engine whose step takes token t to row t of the inputs, which must be exact in bfloat16."""

    def __init__(
        self,
        num_tokens: int,
        out_width: int,
        *,
        variant: str,
        num_threads: int = 2,
        kv_format: KvFormat = KvFormat.INT8,
        memory_nodes: Sequence[int] = (),
        kv_shapes: Sequence[tuple[int, int] | tuple[int, int, int]] = ((1, 16),),
        num_blocks: int = 4,
        block_size: int = 16,
        **states: int,
    ) -> None:
        self.num_tokens = num_tokens
        self.out_width = out_width
        self.block_size = block_size
        self.engine = Engine(
            kv_shapes=kv_shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            **states,
            vocab_size=num_tokens,
            max_rows=num_tokens,
            max_step_tokens=num_tokens,
            team=Team(num_threads),
            variant=variant,
            kv_format=kv_format,
            memory_nodes=memory_nodes,
        )
        self._rows: list[RowOp] = []
        self._inputs = 0

    def input(self, values: F32, raw: NDArray[np.uint8] | None = None, *, scale: float = 1.0) -> int:
        """A buffer that holds row `token_ids[t]` of `values` times `scale` for token t; `raw` are other bytes instead."""
        assert np.array_equal(bf16(values), values, equal_nan=True)
        buffer = self.engine.add_buffer(values.shape[1], per_sample=False)
        matrix = self.engine.add_matrix(SourceFormat.BF16, *values.shape, bf16_bytes(values) if raw is None else raw)
        self.row(RowOpKind.EMBED, out=buffer, weight=matrix, value=scale)
        return buffer

    def buffer(self, width: int) -> int:
        return self.engine.add_buffer(width, per_sample=False)

    def activation(self, x: int, cols: int, *, is_quantised: bool = True) -> int:
        """The form of a buffer that products with quantised weights read, or with those of bf16."""
        in_integers = is_quantised and not self.engine.has_tiles
        activation = self.engine.add_activation(cols, in_integers, per_sample=False)
        self.row(RowOpKind.QUANTIZE if in_integers else RowOpKind.TO_BF16, out=activation, x=x)
        return activation

    def row(self, kind: RowOpKind, **fields: float) -> None:
        self._rows.append(RowOp(kind, **fields))

    def flush(self) -> None:
        self.engine.add_rows(self._rows, samples=False)
        self._rows = []

    def finish(self, out: int) -> None:
        """Make a buffer of width `out_width` the result."""
        if self._rows:
            self.flush()
        result = self.engine.add_buffer(self.out_width, per_sample=True)
        self.engine.add_rows([RowOp(RowOpKind.GATHER, x=out, out=result)], samples=True)
        self.engine.set_logits(result)

    def run(
        self,
        token_ids: Sequence[int],
        *,
        query_lens: Sequence[int] | None = None,
        context_lens: Sequence[int] | None = None,
        block_tables: NDArray[np.int32] | None = None,
        samples: Sequence[int] | None = None,
        moved: int = 0,
    ) -> F32:
        """One step; by default one row of one token per id. The result buffer's rows of some tokens or, by default, all.

        Positions are those of the contexts, plus `moved`.

        [S, out_width]
        """
        samples = range(len(token_ids)) if samples is None else samples
        queries = np.array(query_lens or [1] * len(token_ids), np.int32)
        contexts = np.array(context_lens or [0] * len(queries), np.int32)
        tables = block_tables if block_tables is not None else np.ones((len(queries), 1), np.int32)
        positions = np.concatenate([c + np.arange(q, dtype=np.int32) for q, c in zip(queries, contexts, strict=True)])
        rows = np.repeat(np.arange(len(queries)), queries)
        slots = tables[rows, positions // self.block_size].astype(np.int64) * self.block_size + positions % self.block_size
        out = np.full((len(samples), self.out_width), np.nan, np.float32)
        self.engine.logits_step(
            np.arange(len(queries), dtype=np.int32),
            np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
            contexts,
            np.array(token_ids, np.int32),
            (positions + moved).astype(np.int32),
            slots,
            tables,
            np.array(samples, np.int32),
            out,
        )
        return out
