"""Layers whose keys and values differ in shape, and layers that read those of an earlier one, on both CPU backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.native import footprint
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.lab.sizing import decode_shape, size_of, work_of
from penstock.models import architectures
from penstock.models.checks import weight_shapes
from penstock.models.formats import WeightFormat
from penstock.models.program import Attention, KvShape, KvWrite
from penstock.models.weights import LoadedModel, WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import AttentionSpec, ModelSpec, Rotation, spec_of_equal_layers
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.answer_bench import Bench, answer_of, spoil_free_blocks
from support.native_variants import ONE_OF_EACH, VARIANTS

BLOCK_SIZE = 16
NUM_HEADS = 6
LAYERS = ((2, 20, 0, None), (1, 36, 20, None), (1, 40, 0, None), (1, 36, 24, 1), (1, 40, 0, 2), (6, 16, 0, None))
"""Heads of keys and values, their columns, window, and the layer whose keys and values are read."""
WINDOWED = ((2, 20, 20, None), (1, 36, 8, None), (1, 36, 44, 1), (2, 20, 12, 0))
"""Likewise, all with a window. The third layer sees more than the layer that stores its keys and values."""
WIDE = tuple((heads, 32 * (1 + i % 2), window, shared) for i, (heads, _, window, shared) in enumerate(LAYERS))
"""The same with heads that `INT4` can store."""
SHAPES = tuple(KvShape(heads, dim) for heads, dim, _, shared in LAYERS if shared is None)
TOKENS = tuple(3 + 7 * i % 250 for i in range(330))
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=5)
Executor = NativeExecutor | ReferenceExecutor
BACKENDS: dict[str, Callable[..., Executor]] = {
    "reference": ReferenceExecutor,
    **{
        variant: lambda *args, _variant=variant, **options: NativeExecutor(*args, variant=_variant, **options)
        for variant in VARIANTS
    },
}


def make_spec(layers: Sequence[tuple[int, int, int, int | None]] = LAYERS) -> ModelSpec:
    spec = spec_of_equal_layers(
        architecture="llama",
        vocab_size=264,
        hidden_size=72,
        num_layers=len(layers),
        num_heads=NUM_HEADS,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=100,
        norm_eps=1e-5,
        rope_inv_freq=(),
        max_model_len=512,
        tie_word_embeddings=True,
    )

    def own(number: int, _: AttentionSpec) -> AttentionSpec:
        heads, dim, window, kv_layer = layers[number]
        turn = Rotation(inv_freq=tuple(10000.0 ** (-2 * pair / dim) for pair in range(dim // 2)))
        sizes = {"num_heads": NUM_HEADS, "num_kv_heads": heads, "head_dim": dim}
        return AttentionSpec(**sizes, rotation=turn, window=window, kv_layer=kv_layer)

    return spec.with_attention(own)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return make_model(make_spec())


def make_model(spec: ModelSpec) -> LoadedModel:
    rng = np.random.default_rng(5)
    weights = {}
    for name, (rows, cols) in weight_shapes(architectures.describe(spec)).items():
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        values = 1 + values / 8 if name.endswith("norm") else values / np.float32(cols**0.5)
        weights[name] = WeightTensor(name, rows, cols, WeightFormat.F32, values)
    return LoadedModel("odd", spec, weights, Path("tokenizer.json"), None, (), Path("odd"))


def open_executor(model: LoadedModel, backend: str, num_blocks: int = 80, **options: object) -> Executor:
    sizes = {"num_blocks": num_blocks, "block_size": BLOCK_SIZE, "max_rows": 8, "max_step_tokens": 512, "max_model_len": 512}
    return BACKENDS[backend](model, architectures.describe(model.spec), **sizes, poison=True, **options)


class Rows:
    """Answers of one executor, a row at a time: the token after `TOKENS`, and its log-probability."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._ids = itertools.count()

    def answer(self, num_tokens: int, *chunks: int, num_computed: int = 0, first_block: int = 1) -> tuple[int, float]:
        name, tokens = f"{next(self._ids)}", TOKENS[:num_tokens]
        blocks = tuple(first_block + i for i in range(-(-num_tokens // BLOCK_SIZE)))
        sampling = SamplingParams(temperature=0.0, logprobs=0)
        self._step([AdmitRow(name, tokens, num_tokens, blocks, num_computed, sampling)], [])
        at = num_computed
        for chunk in chunks:
            self._step([], [RowPlan(name, at, chunk, (), False)])
            at += chunk
        result = self._step([], [RowPlan(name, at, num_tokens - at, (), True)])
        self._step([], [], (name,))
        assert not result.failures
        (logprobs,) = result.logprobs[name]
        return logprobs.token_id, logprobs.logprob

    def _step(self, admits: list[AdmitRow], rows: list[RowPlan], releases: tuple[str, ...] = ()):
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), releases)
        return self.executor.collect(self.executor.submit(plan))


def test_a_layer_that_reads_those_of_another_stores_none() -> None:
    program = architectures.describe(make_spec())
    assert program.kv_shapes == SHAPES
    assert [op.layer for op in program.ops if isinstance(op, KvWrite)] == [0, 1, 2, 3]
    assert [op.layer for op in program.ops if isinstance(op, Attention)] == [0, 1, 2, 1, 2, 3]
    assert {f"layers.3.{name}" for name in "qkv"} & weight_shapes(program).keys() == {"layers.3.q"}


def test_attention_that_reads_another_shape_is_refused() -> None:
    program = architectures.describe(make_spec())
    with pytest.raises(ModelError, match="layer 0 stores"):
        replace(program, kv_shapes=(KvShape(1, 20), *SHAPES[1:]))


@cache
def model_and_logits(dtype: KvDtype) -> tuple[LoadedModel, NDArray[np.float32]]:
    """A model whose keys and values can have this type, and what the reference computes of 70 tokens."""
    model = make_model(make_spec(WIDE if dtype is KvDtype.INT4 else LAYERS))
    return model, open_executor(model, "reference", kv_dtype=dtype).forward_logits(TOKENS[:70])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", list(KvDtype))
def test_native_logits_are_those_of_the_reference(dtype: KvDtype, variant: str) -> None:
    model, wanted = model_and_logits(dtype)
    found = open_executor(model, variant, kv_dtype=dtype).forward_logits(TOKENS[:70])
    assert np.sqrt(np.mean((found - wanted) ** 2)) / np.sqrt(np.mean(wanted**2)) < (0.12 if dtype is KvDtype.INT4 else 0.03)


@pytest.mark.parametrize("backend", ["reference", *ONE_OF_EACH])
def test_chunks_and_threads_do_not_change_the_bits(model: LoadedModel, backend: str) -> None:
    rows = Rows(open_executor(model, backend))
    expected = rows.answer(len(TOKENS))
    assert rows.answer(len(TOKENS), 1, 150, 37, 141) == expected
    if backend != "reference":
        for num_threads in (2, 3):
            threads = Rows(open_executor(model, backend, num_threads=num_threads))
            assert [threads.answer(len(TOKENS)), threads.answer(len(TOKENS), 300)] == [expected] * 2


@pytest.mark.parametrize("backend", BACKENDS)
def test_blocks_move_with_all_layers(model: LoadedModel, backend: str) -> None:
    rows, others = Rows(open_executor(model, backend)), Rows(open_executor(model, backend))
    expected, count = rows.answer(100), 7
    content = [memoryview(bytearray(rows.executor.block_bytes)) for _ in range(count)]
    rows.executor.read_blocks(range(1, 1 + count), content)
    others.executor.write_blocks(range(20, 20 + count), content)
    assert others.answer(100, num_computed=96, first_block=20) == expected
    others.executor.copy_blocks([(20 + i, 40 + i) for i in range(count)])
    assert others.answer(100, num_computed=96, first_block=40) == expected


@pytest.mark.parametrize("backend", ["reference", *ONE_OF_EACH])
def test_blocks_that_no_sharing_layer_reads_any_more_are_freed(backend: str) -> None:
    """In a pool far smaller than the text, with NaN in the free blocks."""
    executor = open_executor(make_model(make_spec(WINDOWED)), backend)
    assert executor.capacity.window == 44
    bench = Bench(executor, [TOKENS[:250], TOKENS[40:300]], (GREEDY, GREEDY))
    expected = bench.run(bench.requests((0, 1)), window=0)
    num_needed = replace(executor.capacity, max_step_tokens=32).most_blocks(512)
    assert num_needed * BLOCK_SIZE < 150
    outcomes = bench.outcomes(
        bench.requests((0, 1)), num_blocks=1 + num_needed, max_step_tokens=32, after_turn=spoil_free_blocks
    )
    assert [answer_of(outcome) for outcome in outcomes] == expected


@pytest.mark.parametrize("dtype", list(KvDtype))
def test_a_block_has_the_planned_size(model: LoadedModel, dtype: KvDtype) -> None:
    if dtype is KvDtype.INT4:
        model = make_model(make_spec(WIDE))
    planned = footprint.block_bytes(model.spec, dtype, BLOCK_SIZE)
    assert open_executor(model, VARIANTS[0], kv_dtype=dtype).block_bytes == planned
    assert planned == BLOCK_SIZE * sum(
        shape.num_kv_heads * dtype.head_bytes(shape.head_dim) for shape in architectures.describe(model.spec).kv_shapes
    )


def test_sizes_count_what_is_stored_and_what_is_read() -> None:
    program = architectures.describe(make_spec())
    size = size_of(program, name="odd", kv_dtype=KvDtype.INT8, num_weight_bytes=0, num_read_bytes=0, is_quantised=False)
    stored = [shape.num_kv_heads * KvDtype.INT8.head_bytes(shape.head_dim) for shape in SHAPES]
    assert size.kv_bytes_per_token == sum(stored)
    assert size.kv_read_bytes == sum(stored) + stored[1] + stored[2]
    assert work_of(size, decode_shape(2, 9))[1] == 2 * 10 * size.kv_read_bytes
    assert size.num_attention_products == 2 * NUM_HEADS * sum(dim for _, dim, _, _ in LAYERS)
