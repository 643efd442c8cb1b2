"""Small engines that run one product, or one attention, of a model over and over: what `kernels.py` measures.

An engine holds as many copies of the weights as exceed the last-level cache, one instruction for each, since a model's
step also finds every weight in memory. Inputs are random, with the share of outlier groups that real activations have.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native import footprint
from penstock.backends.native._native import Engine, RowOp, RowOpKind, SourceFormat, Team
from penstock.backends.native.executor import NativeExecutor
from penstock.models.program import PagedState
from penstock.types.kv_dtype import KvDtype

BLOCK_SIZE = 16
OUTLIER_SHARE = 0.05
"""Share of the groups of 32 columns that hold one: docs/decisions/int8-activations.md."""
NONE = -1
SILU = 0
SETTLING_S = 60.0


@dataclass(frozen=True, slots=True)
class WeightKind:
    """A way that weights are packed, and a format of files that is packed so."""

    name: str
    source: SourceFormat
    file_bytes: int
    """Bytes of 32 weights of one row, in the file; the scale comes first, as f16, then the offset if there is one."""
    packed_bytes: int
    has_offset: bool = False
    by_row: bool = False
    """Floats that become int8 with a scale for each row, as in models that read texts."""

    @property
    def is_quantised(self) -> bool:
        return self.by_row or self.source != SourceFormat.BF16


WEIGHT_KINDS = {
    kind.name: kind
    for kind in (
        WeightKind("q4_1", SourceFormat.Q4_1, 20, 20, has_offset=True),
        WeightKind("q4_0", SourceFormat.Q4_0, 18, 18),
        WeightKind("iq4_nl", SourceFormat.IQ4_NL, 18, 18),
        WeightKind("q5_1", SourceFormat.Q5_1, 24, 36, has_offset=True),
        WeightKind("q8_0", SourceFormat.Q8_0, 34, 34),
        WeightKind("row8", SourceFormat.BF16, 64, 32, by_row=True),
        WeightKind("bf16", SourceFormat.BF16, 64, 64),
    )
}
"""One for each way of packing; Q4_K is packed as Q4_1 is, Q5_K as Q5_1, Q6_K as Q8_0."""


@dataclass(frozen=True, slots=True)
class Product:
    """One instruction of a model: matrices that read the same rows."""

    name: str
    cols: int
    outputs: tuple[int, ...]
    is_gated: bool = False
    """The two matrices are gate and up: one result, after the activation."""
    has_residual: bool = False
    has_gelu: bool = False
    """Weights with a scale for each row compute it of the result."""

    @property
    def num_weights(self) -> int:
        return self.cols * sum(self.outputs)

    def num_bytes(self, kind: WeightKind) -> int:
        return self.num_weights // 32 * kind.packed_bytes


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_latent: int = 0


@dataclass(frozen=True, slots=True)
class AttentionCase:
    rows: int
    query_len: int
    context_len: int


def _finite_weights(rng: np.random.Generator, kind: WeightKind, rows: int, cols: int) -> NDArray[np.uint8]:
    """Random weights as a file's bytes, about 0.02 in size. [rows, bytes per row]"""
    groups = rng.integers(0, 256, (cols // 32, kind.file_bytes), np.uint8)
    if kind.source == SourceFormat.BF16:
        values = rng.normal(0.0, 0.02, cols).astype(np.float32).view(np.uint32) >> 16
        return np.tile(values.astype(np.uint16).view(np.uint8), (rows, 1))
    groups[:, 0:2] = np.array([0.004 if kind.packed_bytes <= 20 else 0.0002], np.float16).view(np.uint8)
    if kind.has_offset:
        groups[:, 2:4] = np.array([-0.03], np.float16).view(np.uint8)
    return np.tile(groups.reshape(-1), (rows, 1))


def _bf16_rows(rng: np.random.Generator, rows: int, cols: int, outlier_share: float = 0.0) -> NDArray[np.uint8]:
    """Random activations as bf16 bytes. [rows, 2 * cols]

    Some groups of 32 columns have an outlier in one column, in most rows: those of one text share them.
    """
    x = rng.standard_normal((rows, cols)).astype(np.float32)
    columns = rng.choice(np.arange(0, cols, 32), math.ceil(outlier_share * cols / 32), replace=False)
    x[:, columns] = np.where(rng.random((rows, len(columns))) < 0.9, 30.0, x[:, columns])
    return (x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).reshape(rows, -1)


def wait_for_huge_pages(owner: Engine | NativeExecutor) -> None:
    """Until all weights are where they will stay: see `Arena` in native/packing.h. Raises TimeoutError."""
    give_up = time.monotonic() + SETTLING_S
    while owner.small_page_bytes > 0:
        if time.monotonic() > give_up:
            raise TimeoutError(f"{owner.small_page_bytes} bytes of weights are not in huge pages after {SETTLING_S:.0f} s")
        time.sleep(0.01)


class _Runner:
    """An engine whose input rows are a table that tokens index, and a way to time a step on it."""

    def __init__(self, engine: Engine, num_blocks: int, vocab_size: int, *, cpu_time: bool) -> None:
        self.engine = engine
        self._cpu_time = cpu_time
        self._num_blocks = num_blocks
        self._vocab_size = vocab_size
        nothing = engine.add_buffer(1, per_sample=True)
        engine.set_logits(nothing)
        self._no_logits = (np.empty(0, np.int32), np.empty((0, 1), np.float32))

    def _step(self, rows: int, query_len: int, context_len: int, state_blocks: NDArray[np.int32] | None = None) -> float:
        """Seconds of a step of `rows` rows, each with blocks of its own, `query_len` queries after `context_len` positions."""
        per_row = -(-(context_len + query_len) // BLOCK_SIZE)
        tables = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
        assert rows * per_row < self._num_blocks
        positions = np.tile(np.arange(context_len, context_len + query_len, dtype=np.int32), rows)
        row_of = np.repeat(np.arange(rows), query_len)
        arrays = (
            np.arange(rows, dtype=np.int32),
            np.arange(rows + 1, dtype=np.int32) * query_len,
            np.full(rows, context_len, np.int32),
            np.arange(rows * query_len, dtype=np.int32) % self._vocab_size,
            positions,
            tables[row_of, positions // BLOCK_SIZE].astype(np.int64) * BLOCK_SIZE + positions % BLOCK_SIZE,
            tables,
        )
        begin_ns = time.thread_time_ns()
        self.engine.logits_step(*arrays, *self._no_logits, state_blocks=state_blocks)
        cpu_ns = time.thread_time_ns() - begin_ns
        return (cpu_ns if self._cpu_time else sum(self.engine.times())) / 1e9


class ProductEngine(_Runner):
    """`num_copies` of one product, on copies of the weights. `cpu_time` is for one thread: what it had of a processor."""

    def __init__(
        self,
        product: Product,
        kind: WeightKind,
        *,
        num_copies: int,
        max_rows: int,
        num_threads: int,
        variant: str,
        cpu_time: bool = False,
    ) -> None:
        num_blocks = 2 + max_rows // BLOCK_SIZE + 1
        engine = Engine(
            kv_shapes=[(1, 16)],
            vocab_size=max_rows,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=1,
            max_step_tokens=max_rows,
            team=Team(num_threads),
            variant=variant,
        )
        super().__init__(engine, num_blocks, max_rows, cpu_time=cpu_time)
        self.num_copies = num_copies
        rng = np.random.default_rng(0)
        x = engine.add_buffer(product.cols, per_sample=False)
        table = engine.add_matrix(
            SourceFormat.BF16, max_rows, product.cols, _bf16_rows(rng, max_rows, product.cols, OUTLIER_SHARE)
        )
        has_integers = kind.by_row or (kind.is_quantised and not engine.has_tiles)
        activation = engine.add_activation(product.cols, has_integers, per_sample=False, by_row=kind.by_row)
        rounded = RowOpKind.ROUND if kind.by_row else RowOpKind.QUANTIZE
        convert = rounded if has_integers else RowOpKind.TO_BF16
        engine.add_rows(
            [RowOp(RowOpKind.EMBED, out=x, weight=table, value=1.0), RowOp(convert, out=activation, x=x)], samples=False
        )
        outputs = product.outputs[:1] if product.is_gated else product.outputs
        outs = [engine.add_buffer(width, per_sample=False) for width in outputs]
        data = [_finite_weights(rng, kind, rows, product.cols) for rows in product.outputs]
        for _ in range(num_copies):
            ids = [
                engine.add_matrix(kind.source, rows, product.cols, d, by_row=kind.by_row)
                for rows, d in zip(product.outputs, data, strict=True)
            ]
            if product.is_gated:
                engine.add_gated(ids[0], ids[1], activation, outs[0], SILU, False)
            else:
                ops = [
                    (i, activation, out, NONE, out if product.has_residual else NONE) for i, out in zip(ids, outs, strict=True)
                ]
                engine.add_linear(ops, samples=False, has_gelu=product.has_gelu and kind.by_row)
        engine.settle()
        wait_for_huge_pages(engine)

    def run(self, rows: int) -> float:
        """Seconds of one product of `rows` rows, and its share of rounding the input once for all copies."""
        return self._step(1, rows, 0) / self.num_copies


class AttentionEngine(_Runner):
    """Attention of `num_layers` layers, with KV of their own."""

    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_layers: int,
        num_positions: int,
        max_tokens: int,
        num_threads: int,
        variant: str,
        cpu_time: bool = False,
    ) -> None:
        num_blocks = 1 + -(-num_positions // BLOCK_SIZE)
        engine = Engine(
            kv_shapes=[(shape.num_kv_heads, shape.head_dim, shape.num_latent)] * num_layers,
            vocab_size=max_tokens,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=max_tokens,
            max_step_tokens=max_tokens,
            team=Team(num_threads),
            variant=variant,
        )
        super().__init__(engine, num_blocks, max_tokens, cpu_time=cpu_time)
        self.num_layers = num_layers
        width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        rng = np.random.default_rng(0)

        def embed(width: int, *, per_sample: bool) -> tuple[int, RowOp]:
            buffer = engine.add_buffer(width, per_sample)
            table = engine.add_matrix(SourceFormat.BF16, max_tokens, width, _bf16_rows(rng, max_tokens, width))
            return buffer, RowOp(RowOpKind.EMBED, out=buffer, weight=table, value=0.3)

        q, embed_q = embed(width, per_sample=False)
        engine.add_rows([embed_q], samples=False)
        out = engine.add_buffer(width, per_sample=False)
        for layer in range(num_layers):
            engine.add_attention(q, out, layer, shape.num_heads, shape.head_dim**-0.5, 0, 0.0)
        # Keys and values are written where logits are wanted: when filling, and not when measuring.
        (k, embed_k), (v, embed_v) = embed(kv_width, per_sample=True), embed(kv_width, per_sample=True)
        writes = [RowOp(RowOpKind.KV_WRITE, x=k, y=v, n=layer) for layer in range(num_layers)]
        engine.add_rows([embed_k, embed_v, *writes], samples=True)
        for first in range(BLOCK_SIZE, (num_blocks - max_tokens // BLOCK_SIZE) * BLOCK_SIZE, max_tokens):
            self._fill(first, max_tokens)

    def _fill(self, first_slot: int, count: int) -> None:
        tokens = np.arange(count, dtype=np.int32)
        self.engine.logits_step(
            tokens,
            np.arange(count + 1, dtype=np.int32),
            np.zeros(count, np.int32),
            tokens,
            np.zeros(count, np.int32),
            first_slot + tokens.astype(np.int64),
            np.ones((count, 1), np.int32),
            tokens,
            np.empty((count, 1), np.float32),
        )

    def run(self, case: AttentionCase) -> float:
        """Seconds of one layer's attention."""
        return self._step(case.rows, case.query_len, case.context_len) / self.num_layers


@dataclass(frozen=True, slots=True)
class LinearAttentionShape:
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    kv_shapes: tuple[tuple[int, int], ...]
    """Layers whose keys and values a block has room for; part of a state lies there instead."""

    @property
    def state_floats(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim


class LinearAttentionEngine(_Runner):
    """Linear attention (the gated delta rule) of `num_layers` layers, whose states are of one row or several."""

    def __init__(
        self,
        shape: LinearAttentionShape,
        *,
        num_layers: int,
        max_rows: int,
        max_tokens: int,
        num_threads: int,
        variant: str,
        cpu_time: bool = False,
    ) -> None:
        state = PagedState(((shape.num_heads, shape.key_dim, shape.value_dim),) * num_layers)
        line = footprint.state_line(state)
        block_bytes = BLOCK_SIZE * sum(heads * KvDtype.INT8.head_bytes(head_dim) for heads, head_dim in shape.kv_shapes)
        num_state_blocks, own = footprint.num_state_blocks(state, block_bytes), 2 + (max_tokens + 2 * BLOCK_SIZE) // BLOCK_SIZE
        engine = Engine(
            kv_shapes=shape.kv_shapes,
            vocab_size=max_tokens,
            num_blocks=max_rows * (own + num_state_blocks) + 1,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_step_tokens=max_tokens,
            team=Team(num_threads),
            variant=variant,
            num_state_lines=footprint.num_state_lines(state, line),
            state_line=line,
        )
        first = 1 + max_rows * own
        super().__init__(engine, first, max_tokens, cpu_time=cpu_time)
        self._states = np.arange(first, first + max_rows * num_state_blocks, dtype=np.int32).reshape(max_rows, -1)
        self._num_layers = num_layers
        rng, heads, width = np.random.default_rng(0), shape.num_heads, shape.num_key_heads * shape.key_dim

        def embed(width: int) -> tuple[int, RowOp]:
            buffer = engine.add_buffer(width, per_sample=False)
            table = engine.add_matrix(SourceFormat.BF16, max_tokens, width, _bf16_rows(rng, max_tokens, width))
            return buffer, RowOp(RowOpKind.EMBED, out=buffer, weight=table, value=0.3)

        (x, embed_x), (steps, embed_steps) = embed(2 * width + heads * shape.value_dim), embed(2 * heads)
        out = engine.add_buffer(heads * shape.value_dim, per_sample=False)
        vector, factor = (
            engine.add_vector(np.full(heads, -0.1, np.float32)),
            engine.add_vector(np.ones(shape.key_dim, np.float32)),
        )
        prepared = engine.add_buffer(2 * width + 2 * heads, per_sample=False)
        matrix_lines = shape.num_heads * shape.key_dim * -(-shape.value_dim // line)
        layers = [
            engine.define_linear_attention(
                x=x,
                steps=steps,
                gates=steps,
                out=out,
                prepared=prepared,
                step_bias=vector,
                decay=vector,
                skip=NONE,
                num_heads=heads,
                num_key_heads=shape.num_key_heads,
                key_dim=shape.key_dim,
                value_dim=shape.value_dim,
                q_at=0,
                k_at=width,
                v_at=2 * width,
                scale=1.0,
                q_factor=factor,
                k_factor=factor,
                min_step=0.0,
                max_step=math.inf,
                first_line=i * matrix_lines,
                is_tiled=False,
            )
            for i in range(num_layers)
        ]
        engine.add_rows([embed_x, embed_steps, RowOp(RowOpKind.PREPARE_STATE, weight=layers[0])], samples=False)
        for layer in layers:
            engine.add_linear_attention(layer)

    def run(self, case: tuple[int, int]) -> float:
        """Seconds of one layer for so many rows, of so many tokens each, that go on from their states."""
        rows, num_tokens = case
        return self._step(rows, num_tokens, BLOCK_SIZE, self._states[:rows]) / self._num_layers


class RowsEngine(_Runner):
    """Operations on rows of random inputs, timed by what one thread had of a processor."""

    def __init__(self, max_rows: int, num_kv_heads: int, head_dim: int, variant: str) -> None:
        num_blocks = 2 + max_rows // BLOCK_SIZE + 1
        engine = Engine(
            kv_shapes=[(num_kv_heads, head_dim)],
            vocab_size=max_rows,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_rows=1,
            max_step_tokens=max_rows,
            team=Team(1),
            variant=variant,
        )
        super().__init__(engine, num_blocks, max_rows, cpu_time=True)
        self._max_rows = max_rows
        self._rng = np.random.default_rng(0)
        self._inputs: list[RowOp] = []

    def input(self, width: int, outlier_share: float = 0.0) -> int:
        """A buffer that holds random numbers in every step."""
        rows = _bf16_rows(self._rng, self._max_rows, width, outlier_share)
        table = self.engine.add_matrix(SourceFormat.BF16, self._max_rows, width, rows)
        buffer = self.engine.add_buffer(width, per_sample=False)
        self._inputs.append(RowOp(RowOpKind.EMBED, out=buffer, weight=table, value=1.0))
        return buffer

    def vector(self, values: NDArray[np.float32]) -> int:
        return self.engine.add_vector(values)

    def rope(self, head_dim: int) -> int:
        """Its angles are computed once in every step."""
        rope = self.engine.add_rope((10000.0 ** (-np.arange(0, head_dim, 2) / head_dim)).astype(np.float32), 1.0)
        self._inputs.append(RowOp(RowOpKind.ANGLES, weight=rope))
        return rope

    def add(self, operations: list[RowOp], times: int) -> None:
        """The work of a step, after its inputs: these operations so many times, one instruction each time."""
        self.engine.add_rows(self._inputs, samples=False)
        for _ in range(times):
            self.engine.add_rows(operations, samples=False)

    def run(self, rows: int) -> float:
        """Seconds of a step of one request's next `rows` tokens."""
        return self._step(1, rows, 0)


class StagesEngine(_Runner):
    """Stages of rows on which nothing is computed: what is left is what it costs threads to share and to meet."""

    def __init__(self, num_stages: int, num_threads: int) -> None:
        max_rows = 24 * num_threads
        engine = Engine(
            kv_shapes=[(1, 16)],
            vocab_size=max_rows,
            num_blocks=max_rows + 2,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_step_tokens=max_rows,
            team=Team(num_threads),
        )
        super().__init__(engine, max_rows + 2, max_rows, cpu_time=False)
        self._num_stages = num_stages
        for _ in range(num_stages):
            engine.add_rows([], samples=False)
        engine.use_all_members()

    @property
    def num_tasks(self) -> int:
        """Tasks of each stage of the last step."""
        return self.engine.stages[0][2]

    def run(self, rows: int) -> float:
        """Seconds of one stage of `rows` rows, by the clock."""
        begin = time.perf_counter()
        self._step(rows, 1, 0)
        return (time.perf_counter() - begin) / self._num_stages
