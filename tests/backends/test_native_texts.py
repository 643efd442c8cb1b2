"""Texts that a step computes whole: each operation as the reference computes it, and the same bits alone and beside others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.backends.batch import NO_USABLE_STATE
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.native.footprint import relative_bytes
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.models.program import (
    Act,
    Add,
    Embed,
    EmbedPositions,
    EmbedTypes,
    FirstRows,
    GatedActivation,
    GatherRows,
    KvShape,
    LayerNorm,
    Linear,
    MeanRows,
    Op,
    Program,
    Relative,
    Rope,
    SparseRows,
    States,
    TextAttention,
)
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.testing.builders import make_core, make_text, sizes_of, text_capacity
from penstock.testing.driver import run_to_completion
from penstock.types.events import Add as AddRequest
from penstock.types.model_spec import Mask, RelativeSpec
from penstock.types.plan import AdmitRow, PaddingId, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.native_variants import VARIANTS

F32 = NDArray[np.float32]
VOCAB_SIZE = 97
MAX_LEN = 420
LENGTHS = (1, 5, 16, 17, 64, 33, 270, 100)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
Text = tuple[tuple[int, ...], int]
"""Token ids, and the position of a pair's second text."""


def token_ids(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB_SIZE, num_tokens).tolist())


class Case:
    """A program and its weights; `of` makes an executor."""

    def __init__(self, ops: Sequence[Op], widths: dict[str, int], weights: dict[str, F32]) -> None:
        self.program = Program(tuple(ops), tuple(widths.items()), (KvShape(1, 16),), VOCAB_SIZE)
        tensors = {
            name: WeightTensor(name, *np.atleast_2d(values).shape, WeightFormat.F32, np.atleast_2d(values).astype(np.float32))
            for name, values in weights.items()
        }
        self.model = cast("LoadedModel", SimpleNamespace(weights=tensors))

    def native(
        self, variant: str = "", num_threads: int = 2, *, poison: bool = True, rounds_floats: bool | None = None
    ) -> NativeExecutor:
        capacity = text_capacity(MAX_LEN, max_rows=24, max_step_tokens=1024)
        sizes = sizes_of(capacity)
        executor = NativeExecutor(
            self.model,
            self.program,
            variant=variant,
            num_threads=num_threads,
            poison=poison,
            rounds_floats=rounds_floats,
            **sizes,
        )
        assert executor.capacity == replace(capacity, vocab_size=self.program.vocab_size)
        return executor

    def reference(self) -> ReferenceExecutor:
        return ReferenceExecutor(
            self.model, self.program, **sizes_of(text_capacity(MAX_LEN, max_rows=24, max_step_tokens=1024))
        )


class Steps:
    """Steps of an executor, each of whole texts."""

    def __init__(self, executor: NativeExecutor | ReferenceExecutor) -> None:
        self.executor = executor
        self._ids: Iterator[int] = itertools.count()
        self._past: tuple[str, ...] = ()

    def run(self, texts: Sequence[Text], *, num_padding: int = 0) -> list[F32 | str]:
        """The answer to each, or why there is none."""
        names = [f"r{next(self._ids)}" for _ in texts]
        admits = [
            AdmitRow(name, ids, len(ids), (1 + i,), 0, GREEDY, second_at)
            for i, (name, (ids, second_at)) in enumerate(zip(names, texts, strict=True))
        ]
        rows = [RowPlan(name, 0, len(ids), (), 1) for name, (ids, _) in zip(names, texts, strict=True)]
        padding = [PaddingId(f"pad{next(self._ids)}") for _ in range(num_padding)]
        admits += [AdmitRow(name, (1,) * 7, 7, (0,), 0, GREEDY) for name in padding]
        rows += [RowPlan(name, 0, 7, (), 0) for name in padding]
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), self._past)
        self._past = (*names, *padding)
        result = self.executor.collect(self.executor.submit(plan))
        assert not result.token_ids
        assert set(result.states) | set(result.failures) == set(names)
        return [
            np.frombuffer(result.states[name], np.float32) if name in result.states else result.failures[name] for name in names
        ]


def answers(found: Sequence[F32 | str]) -> list[F32]:
    for answer in found:
        assert not isinstance(answer, str), answer
    return cast("list[F32]", found)


def relative_rms(actual: F32, expected: F32) -> float:
    assert actual.shape == expected.shape
    return float(np.sqrt(((actual - expected) ** 2).mean() / (expected**2).mean()))


def attention_case(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mask: Mask = "all",
    window: int = 0,
    num_distances: int = 0,
    relative: RelativeSpec | None = None,
    sinks: str | None = None,
) -> Case:
    """Attention alone: every token id has a query, a key and a value of its own, and every token an answer."""
    rng = np.random.default_rng(head_dim)
    widths = {"q": num_heads * head_dim, "k": num_kv_heads * head_dim, "v": num_kv_heads * head_dim, "y": num_heads * head_dim}
    weights = {name: rng.standard_normal((VOCAB_SIZE, widths[name])).astype(np.float32) for name in ("q", "k", "v")}
    distances = "d" if num_distances else None
    weights["d"] = rng.standard_normal((num_heads, 2 * num_distances + 1)).astype(np.float32)
    sizes = num_heads, num_kv_heads, head_dim, 1.7 / head_dim**0.5
    of_distances = None
    if relative is not None:
        width = num_heads * head_dim
        for name, rows in {"table": 2 * relative.span, "wk": width, "wq": width}.items():
            weights[name] = rng.standard_normal((rows, width)).astype(np.float32) / np.float32(width**0.5)
        weights |= {name: rng.standard_normal((1, width)).astype(np.float32) for name in ("norm", "shift", "bk", "bq")}
        of_distances = Relative(relative, "table", "norm", "shift", "wk", "bk", "wq", "bq", 1e-3)
    op = TextAttention("y", "q", "k", "v", *sizes, mask, window, distances, num_distances, of_distances, sinks)
    weights |= {} if sinks is None else {sinks: 3 * rng.standard_normal((1, num_heads)).astype(np.float32)}
    return Case([*(Embed(name, name) for name in ("q", "k", "v")), op, States("y")], widths, weights)


@cache
def texts_and_answers(*settings: Any) -> tuple[list[Text], list[F32]]:
    """Texts, and the answers of the reference to an attention of these settings."""
    texts = [(token_ids(length, seed), 0) for seed, length in enumerate(LENGTHS)]
    return texts, answers(Steps(attention_case(*settings).reference()).run(texts))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "settings",
    [
        (12, 12, 32),
        (4, 2, 64, "causal"),
        (2, 1, 80, "all", 9),
        (3, 3, 6, "causal", 40),
        (4, 4, 16, "all", 0, 20),
        (6, 2, 34, "all", 3, 500),
        (3, 3, 64, "all", 0, 0, RelativeSpec(span=64, farthest=200)),
        (2, 2, 17, "all", 0, 9, RelativeSpec(span=400)),
        (6, 2, 24, "all", 8, 0, None, "s"),
    ],
)
def test_attention_within_texts(variant: str, settings: tuple[Any, ...]) -> None:
    texts, expected = texts_and_answers(*settings)
    native = Steps(attention_case(*settings).native(variant))
    for actual, wanted in zip(answers(native.run(texts)), expected, strict=True):
        assert relative_rms(actual, wanted) < 2e-3
    for text, wanted in zip(texts, expected, strict=True):
        assert relative_rms(answers(native.run([text]))[0], wanted) < 2e-3


def test_the_memory_for_distances_is_planned() -> None:
    plain, case = (attention_case(3, 3, 17, "all", 0, 0, relative) for relative in (None, RelativeSpec(span=8, farthest=20)))
    held = case.native().weight_bytes - plain.native().weight_bytes
    assert 0.9 * relative_bytes(case.program, MAX_LEN) < held <= relative_bytes(case.program, MAX_LEN)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("name", ["table", "norm", "shift", "wk", "bk", "wq", "bq", "s"])
def test_what_is_no_number_in_a_weight_of_distances_is_not_hidden(name: str, value: float) -> None:
    case = attention_case(2, 2, 34, "all", 0, 0, RelativeSpec(span=8, farthest=20), "s")
    cast("F32", case.model.weights[name].stored)[0, 1] = value
    (found,) = Steps(case.native()).run([((3, 6, 8) * 9, 0)])
    assert isinstance(found, str) or (value == 1e30 and np.isfinite(found).all()) or (name == "s" and value == np.inf)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_integers_of_attention_hide_no_number_that_is_none(variant: str, name: str, value: float) -> None:
    case = attention_case(2, 1, 34)
    good, bad = ((3, 6, 8) * 9, 0), ((3, 6, 8, 5, 4) * 9, 0)
    expected = answers(Steps(case.native(variant)).run([good]))[0]
    cast("F32", case.model.weights[name].stored)[5, 33] = value
    first, second = Steps(case.native(variant)).run([good, bad])
    assert second == NO_USABLE_STATE
    assert isinstance(first, np.ndarray)
    assert first.tobytes() == expected.tobytes()


@pytest.mark.parametrize("pool", [MeanRows, SparseRows])
def test_pooling_hides_no_number_that_is_none(pool: type[MeanRows | SparseRows]) -> None:
    """Whichever token of the text it comes from."""
    plain = attention_case(2, 2, 16)
    weights = {name: tensor.stored for name, tensor in plain.model.weights.items()}
    weights["late"] = np.zeros((VOCAB_SIZE, 32), np.float32)
    weights["late"][5, 17] = np.nan
    ops = (*plain.program.ops[:-1], Embed("late", "late"), Add("y", "y", "late"), pool("pooled", "y"), States("pooled"))
    case = Case(ops, dict(plain.program.buffers) | {"late": 32, "pooled": 32}, weights)
    texts = [((3, 5), 0), ((5, 3), 0), ((3, 5, 4), 0), ((3, 6), 0)]
    found = Steps(case.native()).run(texts)
    assert [answer if isinstance(answer, str) else None for answer in found] == [NO_USABLE_STATE] * 3 + [None]


HIDDEN, HEADS, INNER = 96, 3, 160


def encoder(ending: str, *, is_modern: bool = False) -> Case:
    """A small encoder: like BERT, with norms after the sums, learned positions and types; or like ModernBERT."""
    rng = np.random.default_rng(11)
    weights: dict[str, F32] = {}
    widths = dict.fromkeys(("x", "q", "k", "v", "attn", "normed", "pooled", "dense"), HIDDEN)
    widths |= {"gate": INNER, "up": INNER, "scores": 3}

    def weight(name: str, rows: int, cols: int, size: float = 0.0) -> str:
        weights[name] = (rng.standard_normal((rows, cols)) * (size or cols**-0.5)).astype(np.float32)
        return name

    def vector(name: str, cols: int, mean: float = 0.0) -> str:
        weights[name] = (mean + 0.1 * rng.standard_normal((1, cols))).astype(np.float32)
        return name

    def norm(name: str, x: str, out: str) -> Op:
        return LayerNorm(out, x, vector(name, HIDDEN, 1.0), None if is_modern else vector(f"{name}_bias", HIDDEN), 1e-12)

    def linear(out: str, x: str, name: str, residual: str | None = None) -> Op:
        bias = None if is_modern else vector(f"{name}_bias", widths[out])
        return Linear(out, x, weight(name, widths[out], widths[x]), bias, residual)

    ops: list[Op] = [Embed("x", weight("embed", VOCAB_SIZE, HIDDEN, 1.0))]
    if not is_modern:
        ops += [
            EmbedPositions("x", "x", weight("positions", MAX_LEN + 2, HIDDEN, 0.5), MAX_LEN, first=2),
            EmbedTypes("x", "x", weight("types", 2, HIDDEN, 0.5)),
        ]
    ops.append(norm("embed_norm", "x", "x"))
    for layer in range(3):
        x = "x"
        if is_modern and layer > 0:
            x = "normed"
            ops.append(norm(f"{layer}.attn_norm", "x", x))
        ops += [linear(name, x, f"{layer}.{name}") for name in ("q", "k", "v")]
        if is_modern:
            ops += [Rope(name, HEADS, HIDDEN // HEADS, tuple(100.0 ** -(i / 16) for i in range(16))) for name in ("q", "k")]
        window = 24 if is_modern and layer % 2 else 0
        ops.append(TextAttention("attn", "q", "k", "v", HEADS, HEADS, HIDDEN // HEADS, 0.2, window=window))
        ops.append(linear("x", "attn", f"{layer}.o", "x"))
        if is_modern:
            ops.append(norm(f"{layer}.mlp_norm", "x", "normed"))
            ops += [linear(name, "normed", f"{layer}.{name}") for name in ("gate", "up")]
            ops.append(GatedActivation("gate", "gate", "up", "gelu"))
            ops.append(linear("x", "gate", f"{layer}.down", "x"))
        else:
            ops.append(norm(f"{layer}.attn_norm", "x", "x"))
            ops += [linear("up", "x", f"{layer}.up"), Act("up", "up", "gelu"), linear("x", "up", f"{layer}.down", "x")]
            ops.append(norm(f"{layer}.mlp_norm", "x", "x"))
    if is_modern:
        ops.append(norm("norm", "x", "x"))
    if ending == "each":
        ops.append(States("x", is_normalised=True))
    elif ending == "mean":
        ops += [MeanRows("pooled", "x"), States("pooled", is_normalised=True)]
    elif ending == "sparse":
        ops += [SparseRows("pooled", "x"), States("pooled")]
    elif ending == "last":
        ops += [GatherRows("pooled", "x"), Add("pooled", "pooled", "pooled", 0.5), States("pooled")]
    else:
        ops += [FirstRows("pooled", "x"), linear("dense", "pooled", "dense"), Act("dense", "dense", "tanh")]
        ops += [linear("scores", "dense", "scores"), States("scores")]
    return Case(ops, widths, weights)


PAIRS = [(token_ids(length, seed), length // 3) for seed, length in enumerate((24, 1, 9, 131, 60, 17, 30, 402))]


@pytest.mark.parametrize(
    ("ending", "is_modern"),
    [*((ending, False) for ending in ("first", "last", "mean", "each", "sparse")), ("first", True), ("each", True)],
)
def test_an_encoder_answers_as_the_reference_does(ending: str, is_modern: bool) -> None:
    """In bf16, and with more distance in int8: so few columns are harder for it than a model's."""
    case = encoder(ending, is_modern=is_modern)
    expected = answers(Steps(case.reference()).run(PAIRS))
    for rounds_floats, bound in ((False, 0.02), (None, 0.04)):
        actual = answers(Steps(case.native(rounds_floats=rounds_floats)).run(PAIRS))
        assert relative_rms(np.concatenate(actual), np.concatenate(expected)) < bound
    if ending in ("mean", "each"):
        lengths = [np.linalg.norm(answer.reshape(-1, HIDDEN), axis=1) for answer in actual]
        np.testing.assert_allclose(np.concatenate(lengths), 1.0, rtol=1e-5)


def test_where_the_second_text_begins_matters() -> None:
    case = encoder("mean")
    ids = PAIRS[0][0]
    one, pair = answers(Steps(case.native()).run([(ids, 0), (ids, 8)]))
    assert relative_rms(pair, one) > 0.05


@pytest.mark.parametrize("ending", ["first", "each"])
def test_a_texts_bits_are_the_same_alone_and_beside_others(ending: str) -> None:
    case = encoder(ending)
    alone = [answers(Steps(case.native(num_threads=1)).run([text]))[0].tobytes() for text in PAIRS]
    for num_threads in (1, 2, 3, 32):
        steps = Steps(case.native(num_threads=num_threads))
        steps.executor._engine.use_all_members()
        for picked in ([0, 1], [2, 3, 4, 5, 6, 7], [7], [6, 0], [1, 0, 1, 0, 2, 2, 5], list(range(8))):
            together = answers(steps.run([PAIRS[i] for i in picked], num_padding=len(picked) % 2))
            assert [answer.tobytes() for answer in together] == [alone[i] for i in picked]


def test_strands_are_of_whole_texts() -> None:
    """Two equal texts of 128 tokens are a strand each; a long one beside short ones, and one alone, are not divided."""
    executor = encoder("mean").native(num_threads=2)
    steps = Steps(executor)
    for lengths, num_strands in (((130, 130), 2), ((90, 96, 84, 99, 93), 2), ((400, 9), 1), ((300,), 1)):
        steps.run([(token_ids(length, length), 0) for length in lengths])
        assert executor.num_strands == num_strands, lengths


def test_a_text_without_a_usable_answer_fails_alone() -> None:
    case = encoder("mean")
    cast("F32", case.model.weights["embed"].stored)[5] = np.nan
    bad, good = (3, 5, 8), (3, 6, 8)
    expected = answers(Steps(case.native()).run([(good, 0)]))[0]
    first, second, third = Steps(case.native()).run([(good, 0), (bad, 0), (good, 0)])
    assert second == NO_USABLE_STATE
    for answer in (first, third):
        assert isinstance(answer, np.ndarray)
        assert answer.tobytes() == expected.tobytes()


def test_the_core_gets_each_text_its_answer() -> None:
    case = encoder("mean")
    executor = case.native()
    requests = [make_text(f"r{i}", ids, second_at=second_at) for i, (ids, second_at) in enumerate(PAIRS)]
    core = make_core(executor.capacity, enable_prefix_caching=False)
    found = run_to_completion(core, executor, *(AddRequest(request) for request in requests))
    for i, text in enumerate(PAIRS):
        (expected,) = answers(Steps(case.native()).run([text]))
        assert found[f"r{i}"].last.states == expected.tobytes()


def test_a_text_is_computed_whole_and_once() -> None:
    executor = encoder("mean").native(poison=False)
    admit = AdmitRow("a", (1, 2, 3), 3, (1,), 0, GREEDY)
    with pytest.raises(ValueError, match="'a' does not compute its whole text"):
        executor.submit(StepPlan(0, 0, (admit,), (RowPlan("a", 0, 2, (), 0),), ()))
    executor = encoder("mean").native(poison=False)
    executor.collect(executor.submit(StepPlan(0, 0, (admit,), (RowPlan("a", 0, 3, (), 1),), ())))
    with pytest.raises(ValueError, match="'a' has a context_len unlike what was computed"):
        executor.submit(StepPlan(1, 0, (), (RowPlan("a", 0, 3, (), 1),), ()))
    executor = encoder("mean").native(poison=False)
    pair = AdmitRow("a", (1, 2, 3), 3, (1,), 0, GREEDY, second_at=3)
    with pytest.raises(ValueError, match="'a' has a second text that begins after its last token"):
        executor.submit(StepPlan(0, 0, (pair,), (RowPlan("a", 0, 3, (), 1),), ()))


def test_a_model_of_texts_has_no_keys_and_values() -> None:
    executor = encoder("mean").native(poison=False)
    assert executor.block_bytes == 0
    with pytest.raises(ValueError, match="no logits"):
        executor.forward_logits([1, 2])
