"""A program on the device gives the reference interpreter's logits, for every kind of step, model, format and operation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from penstock.backends.cuda.supported import ACTIVATIONS, only_kv_shape
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.program import (
    Act,
    Add,
    Attention,
    CausalConv,
    Embed,
    EmbedPositions,
    GatedActivation,
    GatherRows,
    KvShape,
    KvWrite,
    LayerNorm,
    Linear,
    LinearAttention,
    Logits,
    Program,
    RMSNorm,
    Rope,
    Softcap,
)
from penstock.models.weights import LoadedModel, WeightFormat, WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Activation
from support.backends.cuda.float8_weights import rounded
from support.backends.cuda.twins import Twins, compile_program
from support.fp8_models import Scales, write_fp8_hf
from support.packed_models import Packing, write_packed_hf
from support.tiny_models import TinyLlama, write_gguf, write_hf

CLOSE = {"rtol": 1e-3, "atol": 1e-3}
SMALL = TinyLlama(num_layers=2)
QWEN = TinyLlama(architecture="qwen2", has_qkv_bias=True, num_layers=2, seed=1)
STEPS: tuple[tuple[tuple[int, int], ...], ...] = (
    ((0, 17), (1, 3)),  # prompts
    ((0, 1), (1, 1)),  # all decode
    ((1, 1), (2, 20), (0, 1)),  # a new prompt beside them
    ((2, 5), (3, 1), (0, 2)),
    ((0, 1), (1, 1), (2, 1), (3, 1)),
)


def gguf(path: Path, model: TinyLlama, matrix_type: str) -> LoadedModel:
    return load_gguf(write_gguf(path / "tiny.gguf", model, matrix_type=matrix_type))


def twins(model: LoadedModel, **changes: Any) -> Twins:
    return Twins(architectures.describe(model.spec), model.weights, **changes)


@pytest.mark.parametrize(
    ("model", "deterministic", "kv_dtype"),
    [
        (SMALL, False, KvDtype.BF16),
        (replace(SMALL, is_tied=False, num_layers=1), True, KvDtype.BF16),
        (replace(QWEN, num_layers=1), False, KvDtype.BF16),
        (QWEN, True, KvDtype.INT8),
    ],
    ids=["tied", "untied", "biases", "biases-int8"],
)
def test_every_kind_of_step_gives_the_references_logits(
    model: TinyLlama, deterministic: bool, kv_dtype: KvDtype, tmp_path: Path
) -> None:
    both = twins(load_hf_directory(write_hf(tmp_path / "hf", model)), deterministic=deterministic, kv_dtype=kv_dtype)
    for step in STEPS:
        wanted, found = both.step(*step)
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("matrix_type", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_format_gives_the_references_logits(matrix_type: str, deterministic: bool, tmp_path: Path) -> None:
    both = twins(gguf(tmp_path, replace(SMALL, num_layers=1), matrix_type), deterministic=deterministic)
    wanted, found = both.step((0, 5), (1, 1))
    np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("scales", get_args(Scales))
def test_checkpoints_in_fp8_give_the_references_logits(scales: Scales, deterministic: bool, tmp_path: Path) -> None:
    model = load_hf_directory(write_fp8_hf(tmp_path / "fp8", replace(SMALL, num_layers=1), scales))
    both = twins(model, deterministic=deterministic)
    wanted, found = both.step((0, 5), (1, 1))
    np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("packing", [Packing("gptq", order="input"), Packing("gptq", bits=8, order="matrix")], ids=["4", "8"])
def test_checkpoints_in_act_order_give_the_references_logits(packing: Packing, deterministic: bool, tmp_path: Path) -> None:
    """In one order for all matrices that read a value, and in each its own."""
    write_packed_hf(tmp_path, TinyLlama(num_layers=1, hidden_size=64, intermediate_size=96), packing)
    both = twins(load_hf_directory(tmp_path), deterministic=deterministic)
    for step in (((0, 5), (1, 2)), ((0, 1), (1, 1))):
        wanted, found = both.step(*step)
        np.testing.assert_allclose(found, wanted, **CLOSE)


def test_rows_are_not_looked_up_in_a_matrix_in_act_order() -> None:
    ordered = replace(WEIGHTS["embed"], column_order=np.arange(32)[::-1])
    for changed in (program(EMBED), program(EMBED, EmbedPositions("x", "x", "embed", 64))):
        with pytest.raises(ModelError, match="act-order"):
            compile_program(changed, WEIGHTS | {"embed": ordered})
    compile_program(program(EMBED), WEIGHTS | {"output": ordered})


@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_of_linear_operations_alone_are_rounded_to_fp8(is_tied: bool, tmp_path: Path) -> None:
    model = load_hf_directory(write_hf(tmp_path / "hf", replace(SMALL, is_tied=is_tied)))
    tables = {"embed", "output"}
    weights = {
        name: rounded(tensor) if tensor.num_rows > 1 and name not in tables else tensor
        for name, tensor in model.weights.items()
    }
    both = twins(model, round_to_fp8=True, reference_weights=weights)
    for step in STEPS[:3]:
        wanted, found = both.step(*step)
        np.testing.assert_allclose(found, wanted, **CLOSE)
    narrow, wide = both.compiled.weight_bytes, twins(model).compiled.weight_bytes
    assert narrow < wide
    plain, _ = twins(model).step(*STEPS[0])
    rounded_logits, _ = twins(model, reference_weights=weights).step(*STEPS[0])
    assert np.abs(plain - rounded_logits).max() > 10 * CLOSE["atol"], "rounding is more than what is allowed above"


def test_products_in_splits_give_the_references_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.backends.cuda.kernels.gemm.LEAST_STEPS", 1)
    for matrix_type, deterministic in (("Q4_1", False), ("F32", True)):
        wide = replace(SMALL, num_layers=1, hidden_size=128, intermediate_size=160)
        both = twins(gguf(tmp_path, wide, matrix_type), deterministic=deterministic)
        for step in (((0, 5), (1, 1)), ((0, 1), (1, 1))):
            wanted, found = both.step(*step)
            np.testing.assert_allclose(found, wanted, **CLOSE)


def test_rows_that_do_not_sample_have_no_logits(tmp_path: Path) -> None:
    both = twins(gguf(tmp_path, SMALL, "F32"))
    wanted, found = both.step((0, 4), (1, 5), samples=[])
    assert found.shape == wanted.shape == (0, SMALL.vocab_size)
    wanted, found = both.step((0, 4), (1, 5), (2, 1), samples=[1])
    assert found.shape == (1, SMALL.vocab_size)
    np.testing.assert_allclose(found, wanted, **CLOSE)


def test_deterministic_logits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = gguf(tmp_path, SMALL, "Q4_1")
    together, alone = twins(model, deterministic=True), twins(model, deterministic=True)
    bits = []
    for step in (((0, 17), (1, 3)), ((1, 4), (0, 1)), ((2, 3), (1, 1), (0, 1))):
        _, found = together.step(*step)
        bits += [found[i] for i, (row, _) in enumerate(step) if row == 1]
    for count, wanted in zip((3, 4, 1), bits, strict=True):
        _, found = alone.step((1, count))
        assert np.array_equal(found[0], wanted)


def test_a_step_allocates_nothing_that_it_keeps_and_moves_no_buffer(tmp_path: Path) -> None:
    both = twins(gguf(tmp_path, SMALL, "Q8_0"))
    step = both.step_tensors([(0, 3)], [0])
    first, second = both.compiled.run(step), both.compiled.run(step)
    assert first.data_ptr() == second.data_ptr()
    assert both.compiled.weight_bytes > 0


# Operations that no served architecture has

HEAD = 16
WIDTHS = {"x": 32, "y": 32, "z": 32, "q": 32, "k": HEAD, "v": HEAD, "a": 32, "b": 48, "c": 48, "s": 32, "t": 32, "logits": 40}
ATTENTION = Attention(out="a", q="q", layer=0, num_heads=2, num_kv_heads=1, head_dim=HEAD, scale=0.3)
WRITE = KvWrite(layer=0, k="k", v="v")
INV_FREQ = (1.0, 0.3, 0.02)
WHOLE_FREQ = tuple(0.5**i for i in range(HEAD // 2))
EMBED = Embed("x", "embed", scale=2.0)
END = (GatherRows("s", "x"), Logits("logits", "s", "output"))


def tensor(*shape: int, seed: int = 0, size: float = 0.3) -> WeightTensor:
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32) * np.float32(size)
    matrix = np.atleast_2d(values)
    return WeightTensor("w", *matrix.shape, WeightFormat.F32, matrix)


WEIGHTS = {
    "embed": tensor(40, 32),
    "output": tensor(40, 32, seed=1),
    "norm": tensor(32, seed=2),
    "group": tensor(8, seed=3),
    "bias": tensor(32, seed=4),
    "square": tensor(32, 32, seed=5),
    "wide": tensor(48, 32, seed=6),
    "wide2": tensor(48, 32, seed=7),
    "narrow": tensor(32, 48, seed=8),
    "kv": tensor(HEAD, 32, seed=9),
    "kv2": tensor(HEAD, 32, seed=10),
    "kv_bias": tensor(HEAD, seed=11),
    "positions": tensor(64, 32, seed=12),
    "sinks": tensor(2, seed=13, size=2.0),
}


def program(*ops: Any, end: tuple[Any, ...] = END) -> Program:
    return Program((*ops, *end), tuple(WIDTHS.items()), (KvShape(1, HEAD),), 40)


PROJECTIONS = (
    Linear("q", "x", "square"),
    Linear("k", "x", "kv", bias="kv_bias"),
    Linear("v", "x", "kv2"),
)
PROGRAMS = {
    "embed": (),
    "rms_norm_of_groups": (RMSNorm("y", "x", "group", 1e-3, 8), RMSNorm("x", "y", "norm", 1e-3)),
    "layer_norm": (LayerNorm("x", "x", "norm", "bias", 1e-3), LayerNorm("x", "x", "norm", None, 1e-3)),
    "positions": (EmbedPositions("y", "x", "positions", 64), EmbedPositions("x", "y", "positions", 64)),
    "act": (Act("y", "x", "silu"), Act("x", "y", "gelu_tanh")),
    "add": (Act("y", "x", "silu"), Add("x", "x", "y"), Add("x", "y", "x", factor=-0.37)),
    "softcap": (Softcap("x", 0.7),),
    "bias_and_other_residual": (
        Act("y", "x", "silu"),
        Linear("z", "x", "square", bias="bias", residual="y"),
        Add("x", "x", "z"),
    ),
    "residual_in_place": (Act("y", "x", "silu"), Linear("x", "y", "square", bias="bias", residual="x")),
    "gate_and_up": (
        Linear("b", "x", "wide"),
        Linear("c", "x", "wide2"),
        GatedActivation("b", "b", "c", "gelu_tanh"),
        Linear("x", "b", "narrow"),
    ),
    "runs_that_share_a_result": (
        Linear("b", "x", "wide"),
        Linear("c", "x", "wide2"),
        Act("y", "x", "silu"),
        Linear("c", "y", "wide"),
        Linear("b", "y", "wide2"),
        GatedActivation("c", "b", "c", "silu"),
        Linear("x", "c", "narrow"),
    ),
    "attention": (
        *PROJECTIONS,
        Rope("q", 2, HEAD, INV_FREQ, 1.2),
        Rope("k", 1, HEAD, INV_FREQ, 1.2),
        WRITE,
        ATTENTION,
        Linear("x", "a", "square"),
    ),
    "queries_that_grow": (
        *PROJECTIONS,
        Rope("q", 2, HEAD, WHOLE_FREQ, 1.2, growth=0.6, growth_len=3),
        Rope("k", 1, HEAD, WHOLE_FREQ, 1.2),
        WRITE,
        ATTENTION,
        Linear("x", "a", "square"),
    ),
    "keys_that_are_read_later": (
        *PROJECTIONS,
        Rope("q", 2, HEAD, INV_FREQ),
        Rope("k", 1, HEAD, INV_FREQ),
        WRITE,
        ATTENTION,
        RMSNorm("k", "k", "kv_bias", 1e-3),
        KvWrite(layer=0, k="k", v="v"),
        Linear("x", "a", "square"),
    ),
    "attention_without_positions": (*PROJECTIONS, WRITE, ATTENTION, Linear("x", "a", "square")),
    "one_rotation": (*PROJECTIONS, Rope("k", 1, HEAD, INV_FREQ), WRITE, ATTENTION, Linear("x", "a", "square")),
    "sinks": (*PROJECTIONS, WRITE, replace(ATTENTION, sinks="sinks"), Linear("x", "a", "square")),
    "sinks_and_softcap": (*PROJECTIONS, WRITE, replace(ATTENTION, sinks="sinks", softcap=0.4), Linear("x", "a", "square")),
    "window_and_softcap": (*PROJECTIONS, WRITE, replace(ATTENTION, window=5, softcap=0.4), Linear("x", "a", "square")),
    "norm_of_heads": (
        *PROJECTIONS,
        RMSNorm("q", "q", "kv_bias", 1e-3, HEAD),
        RMSNorm("k", "k", "kv_bias", 1e-3, HEAD),
        WRITE,
        ATTENTION,
        Linear("x", "a", "square"),
    ),
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_operation_is_the_references(name: str, deterministic: bool) -> None:
    both = Twins(program(EMBED, *PROGRAMS[name]), WEIGHTS, deterministic=deterministic)
    for step in (((0, 6), (1, 9)), ((0, 1), (1, 1))):
        wanted, found = both.step(*step)
        np.testing.assert_allclose(found, wanted, **CLOSE)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_every_activation_is_the_references(kind: Activation) -> None:
    """Gates are those of two products, and x itself; some numbers are cut, where an activation cuts."""
    wide = {"embed": tensor(40, 32, size=2.0)}
    products = Linear("b", "x", "wide"), Linear("c", "x", "wide2")
    gated = (*products, GatedActivation("b", "b", "c", kind), Linear("y", "b", "narrow"))
    alone = (GatedActivation("z", "x", "x", kind),) if kind == "swiglu_clamped" else (Act("z", "x", kind),)
    both = Twins(program(EMBED, *alone, *gated, Add("x", "z", "y", factor=1e-3)), WEIGHTS | wide)
    wanted, found = both.step((0, 6), (1, 9))
    assert np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, **CLOSE)


def test_capped_logits_and_work_on_samples() -> None:
    end = (
        GatherRows("s", "x"),
        LayerNorm("t", "s", "norm", "bias", 1e-3),
        Add("s", "s", "t"),
        Logits("logits", "s", "embed", scale=0.4),
        Softcap("logits", 1.5),
    )
    both = Twins(program(EMBED, end=end), WEIGHTS)
    wanted, found = both.step((0, 6), (1, 9), (2, 1), samples=[0, 2])
    np.testing.assert_allclose(found, wanted, **CLOSE)


def test_a_weight_that_an_embedding_and_the_logits_share_is_held_once() -> None:
    end = (GatherRows("s", "x"), Logits("logits", "s", "embed"))
    assert Twins(program(EMBED, end=end), WEIGHTS).compiled.weight_bytes == 40 * 32 * 4


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        (program(EMBED, Linear("y", "x", "absent")), "'absent' is missing"),
        (program(EMBED, end=(Logits("logits", "x", "output"),)), "gathered rows"),
        (program(EMBED, Linear("x", "x", "square")), "where its input is"),
        (program(EMBED, GatherRows("s", "x"), Rope("s", 2, HEAD, INV_FREQ)), "Rope after GatherRows"),
        (program(EMBED, Act("unheard", "x", "silu")), "'unheard'"),
        (program(EMBED, Act("x", "x", "swiglu_clamped")), "can't compute Act with swiglu_clamped"),
        (program(EMBED, Rope("x", 2, HEAD, INV_FREQ, growth=0.1)), r"Rope\.growth of columns that do not turn"),
        (program(EMBED, CausalConv("x", "x", 0, "square", 4)), "can't compute CausalConv"),
        (program(EMBED, LinearAttention("y", "x", 0, "x", "b", "d", 1, 1, 4, 8, 0, 4, 8)), "can't compute LinearAttention"),
        (program(EMBED, EmbedPositions("x", "x", "positions", 63)), "64 tokens have more positions than the 63"),
        (program(EMBED, GatherRows("s", "x"), EmbedPositions("s", "s", "positions", 64)), "EmbedPositions after GatherRows"),
    ],
)
def test_what_can_not_be_computed_is_refused_with_a_remedy(changed: Program, complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as error:
        compile_program(changed, WEIGHTS)
    assert error.value.remedy


def test_half_precision_is_close(tmp_path: Path) -> None:
    both = twins(gguf(tmp_path, SMALL, "Q4_1"), dtype=torch.float16)
    wanted, found = both.step((0, 9), (1, 2))
    assert np.abs(found - wanted).max() < 0.05 * np.abs(wanted).max()


def test_layers_of_several_shapes_are_refused() -> None:
    shapes = (KvShape(2, 64), KvShape(2, 64), KvShape(1, 128))
    assert only_kv_shape(Program((), (), shapes[:2], 7)) == KvShape(2, 64)
    with pytest.raises(ModelError, match="2 x 64 and 1 x 128 columns"):
        only_kv_shape(Program((), (), shapes, 7))
    with pytest.raises(ModelError, match="can't compute latent attention"):
        only_kv_shape(Program((), (), (KvShape(1, 576, 512),), 7))
