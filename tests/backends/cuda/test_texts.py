"""Texts that a step computes whole: programs on the device answer as the reference and transformers do, alone and together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from penstock.backends.batch import NO_USABLE_STATE
from penstock.backends.cuda import attention_choice
from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.reference.executor import ReferenceExecutor
from penstock.engine.ports import Executor
from penstock.models import architectures, catalog
from penstock.models.load import load_model
from penstock.models.program import (
    Embed,
    FirstRows,
    GatherRows,
    KvShape,
    Logits,
    MeanRows,
    Op,
    Program,
    States,
    TextAttention,
)
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.testing import make_core, make_text, run_to_completion, text_capacity
from penstock.testing.builders import sizes_of
from penstock.types.errors import ConfigError, ModelError
from penstock.types.events import Add
from penstock.types.model_spec import Pooling
from penstock.types.plan import AdmitRow, Capacity, PaddingId, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.interpreted import DEVICE
from support.parity.encoder_cases import ENCODERS, load_states, texts, write_encoder

F32 = NDArray[np.float32]
Text = tuple[tuple[int, ...], int]
"""Token ids, and the position of a pair's second text."""
VOCAB_SIZE = 97
MAX_LEN = 200
CAPACITY = text_capacity(MAX_LEN, max_rows=8, max_step_tokens=480)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def reference(model: LoadedModel, program: Program, capacity: Capacity = CAPACITY) -> ReferenceExecutor:
    return ReferenceExecutor(model, program, **sizes_of(capacity))


def cuda(model: LoadedModel, program: Program, capacity: Capacity = CAPACITY, **changes: Any) -> CudaExecutor:
    settings: dict[str, Any] = {"device": DEVICE, "dtype": torch.float32, "deterministic": True, "poison": True}
    executor = CudaExecutor(model, program, **sizes_of(capacity), **(settings | changes))
    assert executor.capacity == replace(capacity, vocab_size=program.vocab_size)
    return executor


class Steps:
    """Steps of an executor, each of whole texts."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._ids = itertools.count()
        self._past: tuple[str, ...] = ()

    def run(self, of: Sequence[Text], *, num_padding: int = 0) -> list[F32 | str]:
        """The answer to each, or why there is none; padding lies between them."""
        names = [f"r{next(self._ids)}" for _ in of]
        admits = [
            AdmitRow(name, ids, len(ids), (1 + i,), 0, GREEDY, second_at)
            for i, (name, (ids, second_at)) in enumerate(zip(names, of, strict=True))
        ]
        rows = [RowPlan(name, 0, len(ids), (), 1) for name, (ids, _) in zip(names, of, strict=True)]
        padding = [PaddingId(f"pad{next(self._ids)}") for _ in range(num_padding)]
        admits += [AdmitRow(name, (1,) * 7, 7, (0,), 0, GREEDY) for name in padding]
        rows[1:1] = [RowPlan(name, 0, 7, (), 0) for name in padding]
        plan = StepPlan(next(self._ids), 0, tuple(admits), tuple(rows), self._past)
        self._past = (*names, *padding)
        result = self._executor.collect(self._executor.submit(plan))
        assert not result.token_ids
        assert set(result.states) | set(result.failures) == set(names)
        return [
            np.frombuffer(result.states[name], np.float32) if name in result.states else result.failures[name] for name in names
        ]


def answers(found: Sequence[F32 | str]) -> list[F32]:
    assert not [answer for answer in found if isinstance(answer, str)]
    return cast("list[F32]", found)


def token_ids(num_tokens: int, seed: int, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(3, vocab_size, num_tokens).tolist())


def attention_case(op: TextAttention) -> tuple[LoadedModel, Program]:
    """Attention alone: every token id has a query, a key and a value of its own, and every token an answer."""
    rng = np.random.default_rng(op.head_dim)
    width, kv_width = op.num_heads * op.head_dim, op.num_kv_heads * op.head_dim
    widths = {"q": width, "k": kv_width, "v": kv_width, "y": width}
    shapes = {name: (VOCAB_SIZE, widths[name]) for name in ("q", "k", "v")} | {"d": (op.num_heads, 2 * op.num_distances + 1)}
    weights = {
        name: WeightTensor(name, *shape, WeightFormat.F32, rng.standard_normal(shape).astype(np.float32))
        for name, shape in shapes.items()
    }
    ops: list[Op] = [*(Embed(name, name) for name in ("q", "k", "v")), op, States("y")]
    model = cast("LoadedModel", SimpleNamespace(weights=weights))
    return model, Program(tuple(ops), tuple(widths.items()), (KvShape(1, 16),), VOCAB_SIZE)


def attention(num_heads: int, num_kv_heads: int, head_dim: int, **fields: Any) -> TextAttention:
    return TextAttention("y", "q", "k", "v", num_heads, num_kv_heads, head_dim, 1.7 / head_dim**0.5, **fields)


@pytest.mark.parametrize(
    "op",
    [
        attention(3, 3, 32),
        attention(4, 2, 64, mask="causal"),
        attention(2, 1, 80, window=9),
        attention(3, 3, 6, mask="causal", window=70),
        attention(2, 2, 16, distances="d", num_distances=20),
        attention(6, 2, 34, window=67, distances="d", num_distances=500),
        attention(3, 1, 160, mask="causal", distances="d", num_distances=1),
    ],
    ids=["all", "causal", "window", "causal-window", "distances", "far-distances", "wide-heads"],
)
def test_attention_within_texts(op: TextAttention) -> None:
    case = attention_case(op)
    of = [(token_ids(length, seed), 0) for seed, length in enumerate((1, 5, 64, 65, 17, 129))]
    expected = answers(Steps(reference(*case)).run(of))
    on_device = Steps(cuda(*case))
    together = answers(on_device.run(of))
    for found, wanted in zip(together, expected, strict=True):
        np.testing.assert_allclose(found, wanted, **CLOSE)
    for text, found in zip(of[2:], together[2:], strict=True):
        assert answers(on_device.run([text]))[0].tobytes() == found.tobytes()


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    """Writes and loads a tiny encoder."""

    def get(name: str) -> LoadedModel:
        path = write_encoder(ENCODERS[name], tmp_path_factory.mktemp(name) / "model")
        return load_model(catalog.resolve(str(path), path))

    return get


ENDINGS = ("bert_first_token", "bert_dense", "bert_tokens")
DESCRIPTIONS = (*ENDINGS, "xlm_roberta", "distilbert", "mpnet", "nomic_bert", "jina_bert")


@pytest.mark.parametrize("name", [*DESCRIPTIONS, "mpnet_classes", "modernbert", "modernbert_classes", "qwen3_embedding"])
def test_answers_are_those_of_transformers(load: Callable[[str], LoadedModel], name: str) -> None:
    model, expected = load(name), np.concatenate(load_states(name))
    capacity = text_capacity(min(64, model.spec.max_model_len))
    with closing(cuda(model, architectures.describe(model.spec), capacity, deterministic=False)) as executor:
        found = answers(Steps(executor).run([(text.token_ids, text.second_at) for text in texts(ENCODERS[name])]))
    states = np.concatenate([answer.reshape(-1, model.spec.result_width) for answer in found])
    assert np.sqrt(((states - expected) ** 2).mean()) < 1e-3 * expected.std()


PAIRS = [(token_ids(length, seed), length // 3) for seed, length in enumerate((24, 1, 9, 40))]
SHORT = text_capacity(48)


def pooled(model: LoadedModel, pooling: Pooling, *, is_normalised: bool = False) -> tuple[LoadedModel, Program]:
    """The model with another ending."""
    assert model.spec.ending is not None
    spec = replace(model.spec, ending=replace(model.spec.ending, pooling=pooling, dense=(), is_normalised=is_normalised))
    return model, architectures.describe(spec)


def test_sparse_embeddings_are_refused(load: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(ModelError, match="SparseRows"):
        cuda(*pooled(load("bert"), "sparse"), SHORT)


@pytest.mark.parametrize("pooling", sorted({*get_args(Pooling)} - {"sparse"}))
def test_each_pooling_is_the_references(load: Callable[[str], LoadedModel], pooling: Pooling) -> None:
    """A text's bits are the same alone, beside others and beside padding."""
    case = *pooled(load("bert"), pooling, is_normalised=pooling in ("mean", "each")), SHORT
    expected = answers(Steps(reference(*case)).run(PAIRS))
    on_device = Steps(cuda(*case))
    together = answers(on_device.run(PAIRS, num_padding=2))
    for found, wanted in zip(together, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)
        if pooling in ("mean", "each"):
            np.testing.assert_allclose(np.linalg.norm(found.reshape(-1, 72), axis=1), 1.0, rtol=1e-5)
    assert [answers(on_device.run([text]))[0].tobytes() for text in PAIRS] == [found.tobytes() for found in together]


def test_where_the_second_text_begins_matters(load: Callable[[str], LoadedModel]) -> None:
    ids = PAIRS[0][0]
    one, pair, other = answers(Steps(cuda(*pooled(load("bert"), "first"), SHORT)).run([(ids, 0), (ids, 8), (ids, 9)]))
    assert min(np.abs(one - pair).max(), np.abs(pair - other).max()) > 1e-3


@pytest.mark.parametrize("pooling", ["mean", "each"])
def test_a_text_without_a_usable_answer_fails_alone(load: Callable[[str], LoadedModel], pooling: Pooling) -> None:
    """Shorter steps do not read the numbers that it leaves in buffers."""
    model, program = pooled(load("bert"), pooling)
    embed = model.weights["embed"].dequantize()
    embed[5] = np.nan
    broken = WeightTensor("embed", *embed.shape, WeightFormat.F32, embed)
    steps = Steps(cuda(replace(model, weights={**model.weights, "embed": broken}), program, SHORT))
    good, bad = ((6, 7, 8), 0), ((6, 5, 8, 9, 10), 0)
    (alone,) = answers(steps.run([good]))
    first, second, third = steps.run([good, bad, good])
    assert second == NO_USABLE_STATE
    for answer in (first, third, *steps.run([good])):
        assert isinstance(answer, np.ndarray)
        assert answer.tobytes() == alone.tobytes()


def test_the_core_gets_each_text_its_answer(load: Callable[[str], LoadedModel]) -> None:
    """With two steps in flight, of which each has two texts."""
    case = pooled(load("bert"), "mean")
    expected = answers(Steps(cuda(*case, SHORT)).run(PAIRS))
    executor = cuda(*case, SHORT, depth=2)
    core = make_core(replace(executor.capacity, max_rows=2), enable_prefix_caching=False)
    requests = [make_text(f"r{i}", ids, second_at=second_at) for i, (ids, second_at) in enumerate(PAIRS)]
    found = run_to_completion(core, executor, *map(Add, requests))
    assert [found[f"r{i}"].last.states for i in range(len(PAIRS))] == [answer.tobytes() for answer in expected]


def test_texts_have_no_keys_no_graphs_and_no_logits(load: Callable[[str], LoadedModel]) -> None:
    case = pooled(load("bert"), "mean")
    executor = cuda(*case, SHORT, use_graphs=True)
    assert (executor.block_bytes, executor.num_graphs_left, executor.capture_graphs().num_captured) == (0, 0, 0)
    with pytest.raises(ValueError, match="no logits"):
        executor.forward_logits([1, 2])
    assert executor.choose_attention()
    executor.resize(5, max_model_len=40)
    assert len(answers(Steps(executor).run(PAIRS))) == len(PAIRS)
    executor.close()


def test_flashinfer_reads_no_texts(load: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_choice, "is_installed", lambda: True)
    with pytest.raises(ConfigError, match="the model reads texts"):
        cuda(*pooled(load("bert"), "mean"), SHORT, attention="flashinfer", deterministic=False, dtype=torch.bfloat16)


EMBED = Embed("x", "embed")
TEXTS = TextAttention("x", "x", "x", "x", 1, 1, 16, 1.0)


@pytest.mark.parametrize(
    ("ops", "complaint"),
    [
        ((EMBED, GatherRows("s", "x"), States("s")), "States of a program that reads a KV cache"),
        ((EMBED, TEXTS, GatherRows("s", "x"), Logits("l", "s", "embed")), "Logits of a program that reads texts"),
        ((EMBED, FirstRows("s", "x"), Logits("l", "s", "embed")), "FirstRows of a program that reads a KV cache"),
        ((EMBED, MeanRows("s", "x"), Logits("l", "s", "embed")), "MeanRows of a program that reads a KV cache"),
        ((EMBED, MeanRows("s", "x"), replace(TEXTS, out="s"), States("s")), "TextAttention after GatherRows"),
    ],
)
def test_what_can_not_be_computed_is_refused_with_a_remedy(ops: tuple[Op, ...], complaint: str) -> None:
    program = Program(ops, (("x", 16), ("s", 16), ("l", 8)), (KvShape(1, 16),), 8)
    weights = {"embed": WeightTensor("embed", 8, 16, WeightFormat.F32, np.ones((8, 16), np.float32))}
    with pytest.raises(ModelError, match=complaint) as error:
        cuda(cast("LoadedModel", SimpleNamespace(weights=weights)), program)
    assert error.value.remedy
