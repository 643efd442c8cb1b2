"""Mixtures of experts in the native engine: the experts of a row, and its result whatever rows are computed with it."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from penstock.backends.native import footprint
from penstock.backends.native._native import Engine, Team
from penstock.backends.native.lowering import ACTIVATION_KINDS, lower
from penstock.backends.reference.interpreter import Interpreter, RowRun
from penstock.backends.reference.kv_cache import KvCache
from penstock.models.formats import WeightFormat
from penstock.models.program import Embed, Experts, GatherRows, KvShape, Op, Program, States
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Activation, AttentionSpec, ExpertsMlp, LayerSpec, ModelSpec
from support.backends.format_blocks import random_blocks
from support.backends.native_probe import F32, bf16
from support.native_variants import VARIANTS

F32_ = WeightFormat.F32
NUM_IDS, MAX_TOKENS = 120, 100
ODD = Experts("y", "x", "r", "g", "u", "d", num_experts=7, num_experts_per_token=3, intermediate_size=40, activation="silu")
EVEN = replace(ODD, num_experts=6, num_experts_per_token=2, intermediate_size=96)
BIASES = {"gate_bias": "gb", "up_bias": "ub", "down_bias": "db"}
GPT_OSS = replace(EVEN, activation="swiglu_clamped", router_bias="rb", **BIASES)
KINDS = {
    "renormalised": {},
    "all of a softmax": {"is_renormalised": False, "share_factor": 2.5},
    "sigmoid": {"scoring": "sigmoid", "selection_bias": "s"},
    "sigmoid as it is": {"scoring": "sigmoid", "is_renormalised": False, "router_bias": "rb"},
    "softmax with a bias": {"selection_bias": "s", "router_bias": "rb"},
    "biases": BIASES,
    "no gates": {"gate": None, "activation": "relu2", "up_bias": "ub"},
}


class Buffers:
    """An engine that knows the buffer that was added last."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.last = engine, -1

    def add_buffer(self, *args: Any, **kwargs: Any) -> int:
        self.last = self.engine.add_buffer(*args, **kwargs)
        return self.last

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Layer:
    """Experts alone: of the step's tokens, or of its samples. Every token id has an input of its own, with outliers."""

    def __init__(
        self, op: Experts, hidden: int, formats: tuple[WeightFormat, WeightFormat] = (F32_, F32_), *, of_samples: bool = False
    ) -> None:
        rng, num = np.random.default_rng(3), op.num_experts
        made = [
            tensor(rng, "embed", NUM_IDS, hidden),
            tensor(rng, "r", num, hidden, size=0.3),
            tensor(rng, "g", num * op.intermediate_size, hidden, formats[0]),
            tensor(rng, "u", num * op.intermediate_size, hidden, formats[0]),
            tensor(rng, "d", num * hidden, op.intermediate_size, formats[1]),
            *(tensor(rng, name, 1, num) for name in ("s", "rb")),
            *(tensor(rng, name, num, op.intermediate_size) for name in ("gb", "ub")),
            tensor(rng, "db", num, hidden),
        ]
        self.values("embed", made)[:, 5::29] *= 16
        self.weights = {weight.name: weight for weight in made}
        self.hidden = hidden
        gather = GatherRows("picked", "y")
        self.ops: tuple[Op, ...] = (Embed("x", "embed"), op, gather)
        if of_samples:
            self.ops = (Embed("x", "embed"), replace(gather, x="x", out="x2"), replace(op, x="x2", out="picked"))

    def values(self, name: str, among: Sequence[WeightTensor] | None = None) -> F32:
        """The numbers of a weight of floats, to be changed."""
        found = next(weight for weight in among or self.weights.values() if weight.name == name)
        return cast("F32", found.stored)

    def program(self, *ending: Op) -> Program:
        widths = tuple((name, self.hidden) for name in ("x", "y", "x2", "picked"))
        return Program((*self.ops, *ending), widths, kv_shapes=(KvShape(1, 16),), vocab_size=NUM_IDS)

    def expected(self, token_ids: Sequence[int]) -> F32:
        """The reference's result. [tokens, hidden]"""
        cache = KvCache(shapes=(KvShape(1, 16),), num_blocks=2, block_size=16, dtype=KvDtype.BF16)
        each = np.arange(len(token_ids))
        row = RowRun(cache, np.array(token_ids, np.int32), 0, each, np.ones(1, np.int32), each)
        return Interpreter(self.program(States("picked")), self.weights).run(row)

    def native(self, variant: str, num_threads: int = 2, file: int | None = None) -> Engine:
        shape = {"kv_shapes": [(1, 16)], "num_blocks": 2, "block_size": 16}
        engine = Engine(
            **shape,
            vocab_size=NUM_IDS,
            max_rows=MAX_TOKENS,
            max_step_tokens=MAX_TOKENS,
            team=Team(num_threads),
            variant=variant,
        )
        if file is not None:
            engine.keep_partly_read_in(file)
        buffers = Buffers(engine)
        lower(self.program(), self.weights, cast("Engine", buffers), num_positions=1)
        engine.set_logits(buffers.last)
        return engine

    def run(self, engine: Engine, token_ids: Sequence[int], samples: Sequence[int] | None = None) -> F32:
        """A row for each id; what comes of all, or of some of them. [samples, hidden]"""
        num = len(token_ids)
        each, zeros = np.arange(num, dtype=np.int32), np.zeros(num, np.int32)
        picked = each if samples is None else np.array(samples, np.int32)
        out = np.full((len(picked), self.hidden), np.nan, np.float32)
        starts, tables = np.arange(num + 1, dtype=np.int32), np.ones((num, 1), np.int32)
        ids = np.array(token_ids, np.int32)
        engine.logits_step(each, starts, zeros, ids, zeros, np.full(num, 16, np.int64), tables, picked, out)
        return out


def tensor(
    rng: np.random.Generator, name: str, rows: int, cols: int, fmt: WeightFormat = F32_, *, size: float = 0.1
) -> WeightTensor:
    if fmt is F32_:
        return WeightTensor(name, rows, cols, fmt, bf16(size * rng.standard_normal((rows, cols)).astype(np.float32)))
    return WeightTensor(name, rows, cols, fmt, random_blocks(rng, fmt, rows, cols))


def assert_close(found: F32, expected: F32, bound: float) -> None:
    """An expert in another's place, or with another's share, differs by about as much as there is."""
    assert found.shape == expected.shape
    errors = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert errors.max() < bound


FORMATS = {
    "odd floats": (ODD, 72, (F32_, F32_), 0.02),
    "4 bits": (EVEN, 64, (WeightFormat.Q4_0, WeightFormat.Q4_1), 0.1),
    "down of another kind": (ODD, 64, (WeightFormat.Q8_0, F32_), 0.1),
    "gpt-oss": (GPT_OSS, 64, (WeightFormat.MXFP4, WeightFormat.MXFP4), 0.1),
    "up of floats": (replace(EVEN, intermediate_size=64), 72, (F32_, WeightFormat.Q4_0), 0.1),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_are_those_of_the_reference(variant: str, name: str) -> None:
    """One row, fewer rows than there are experts, and a prompt."""
    op, hidden, formats, bound = FORMATS[name]
    layer = Layer(op, hidden, formats)
    engine = layer.native(variant)
    for num in (1, 3, 8, 33, MAX_TOKENS):
        assert_close(layer.run(engine, range(num)), layer.expected(range(num)), bound)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("of_samples", [False, True])
def test_every_kind_of_router_and_every_bias(kind: str, of_samples: bool) -> None:
    layer = Layer(replace(ODD, **cast("dict[str, Any]", KINDS[kind])), 72, of_samples=of_samples)
    found = layer.run(layer.native(""), range(50), samples=[0, 3, 49])
    assert_close(found, layer.expected(range(50))[[0, 3, 49]], 0.02)


def test_activations_are_those_of_the_reference() -> None:
    for activation in ACTIVATION_KINDS:
        layer = Layer(replace(ODD, activation=cast("Activation", activation), up_bias="ub", gate_bias="gb", down_bias="db"), 72)
        assert_close(layer.run(layer.native(""), range(9)), layer.expected(range(9)), 0.02)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_row_is_the_same_to_the_bit_whatever_rows_come_with_it(variant: str, name: str) -> None:
    op, hidden, formats, _ = FORMATS[name]
    layer = Layer(op, hidden, formats)
    alone = layer.native(variant, num_threads=1)
    expected = np.concatenate([layer.run(alone, [i]) for i in range(MAX_TOKENS)])
    rng = np.random.default_rng(5)
    for num_threads in (1, 2, 5, 32):
        engine = layer.native(variant, num_threads)
        engine.use_all_members()
        for num in (2, 5, 17, 64, MAX_TOKENS):
            ids = rng.permutation(MAX_TOKENS)[:num]
            assert np.array_equal(layer.run(engine, ids.tolist()), expected[ids])


@pytest.mark.parametrize("favoured", [0, 4, 6])
def test_all_rows_go_to_one_expert_and_none_to_the_others(favoured: int) -> None:
    layer = Layer(replace(EVEN, num_experts=7, num_experts_per_token=1, router_bias="rb"), 64, FORMATS["4 bits"][2])
    layer.values("rb")[:] = 0
    layer.values("rb")[0, favoured] = 1000
    engine = layer.native("")
    for num in (1, MAX_TOKENS):
        assert_close(layer.run(engine, range(num)), layer.expected(range(num)), 0.1)


def test_of_equal_scores_the_first_experts_are_chosen() -> None:
    layer = Layer(ODD, 72)
    layer.values("r")[:] = 0
    assert_close(layer.run(layer.native(""), range(5)), layer.expected(range(5)), 0.02)


def test_every_expert_may_be_chosen() -> None:
    layer = Layer(replace(ODD, num_experts_per_token=7), 72)
    assert_close(layer.run(layer.native(""), range(5)), layer.expected(range(5)), 0.02)


@pytest.mark.parametrize("name", ["odd floats", "4 bits"])
def test_a_broken_row_breaks_no_other(name: str) -> None:
    op, hidden, formats, _ = FORMATS[name]
    layer = Layer(op, hidden, formats)
    whole = layer.run(layer.native(""), range(20))
    for broken in (np.nan, np.inf):
        layer.values("embed")[7, 3] = broken
        found = layer.run(layer.native(""), range(20))
        assert not np.isfinite(found[7]).any()
        assert np.array_equal(np.delete(found, 7, axis=0), np.delete(whole, 7, axis=0))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_layers", [1, 3])
def test_a_server_counts_the_memory_of_the_largest_step_before_it_starts(name: str, num_layers: int) -> None:
    """Layers of one shape share it."""
    op, hidden, formats, _ = FORMATS[name]
    layer = Layer(op, hidden, formats)
    layer.ops = (layer.ops[0], *[op] * num_layers, layer.ops[-1])
    mlp = ExpertsMlp(
        num_experts=op.num_experts, num_experts_per_token=op.num_experts_per_token, intermediate_size=op.intermediate_size
    )
    attention = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=16, rotation=None)
    spec = ModelSpec(
        architecture="mixtral",
        vocab_size=NUM_IDS,
        hidden_size=hidden,
        layers=(LayerSpec(mixer=attention, mlp=mlp),) * num_layers,
        norm_eps=1e-5,
        max_model_len=1,
        tie_word_embeddings=True,
    )
    counted = footprint.expert_bytes(spec, MAX_TOKENS)
    assert 0.8 * counted < layer.native("").experts_bytes <= counted


def test_a_step_in_which_nothing_samples_computes_no_sample() -> None:
    layer = Layer(ODD, 72, of_samples=True)
    assert layer.run(layer.native(""), range(9), samples=[]).shape == (0, 72)


def test_a_gate_and_an_up_projection_of_different_formats_are_refused() -> None:
    layer = Layer(EVEN, 64, (WeightFormat.Q4_0, WeightFormat.Q4_0))
    layer.weights["u"] = tensor(np.random.default_rng(1), "u", 6 * 96, 64, WeightFormat.Q8_0)
    with pytest.raises(ModelError, match="Q4_0 and Q8_0"):
        layer.native("")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", FORMATS)
def test_experts_in_a_file_give_the_same_bits_as_those_in_memory(tmp_path: Path, variant: str, name: str) -> None:
    op, hidden, formats, _ = FORMATS[name]
    layer = Layer(op, hidden, formats)
    in_memory = layer.native(variant)
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        engine = layer.native(variant, file=file.fileno())
        engine.settle()
        assert os.fstat(file.fileno()).st_size >= engine.file_bytes > 0
    assert engine.file_bytes == engine.weight_bytes == in_memory.weight_bytes
    assert in_memory.file_bytes == 0
    for num in (1, 33, MAX_TOKENS):
        assert np.array_equal(layer.run(engine, range(num)), layer.run(in_memory, range(num)))


def test_a_disk_without_room_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """A limit on the size of files is met like the end of the disk: the place is reserved at once."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    layer = Layer(EVEN, 64, FORMATS["4 bits"][2])
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                layer.native("", file=file.fileno())
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert os.fstat(file.fileno()).st_size <= 4096


def test_a_file_that_lies_in_memory_itself_is_refused() -> None:
    with tempfile.TemporaryFile(dir="/dev/shm") as file, pytest.raises(OSError, match="lies in memory"):
        Layer(EVEN, 64).native("", file=file.fileno())
