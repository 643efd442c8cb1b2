"""The description of Llama, and the table that finds it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from penstock.models import architectures, checks
from penstock.models.decoder import Decoder
from penstock.models.program import Attention, GatherRows, KvShape, KvWrite, Linear, Logits, Op, Program, Rope
from penstock.types.errors import ModelError
from penstock.types.model_spec import LayerFactors, LinearAttentionSpec, spec_of_equal_layers

FIELDS: dict[str, Any] = {
    "architecture": "llama",
    "vocab_size": 100,
    "hidden_size": 24,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "norm_eps": 1e-6,
    "rope_inv_freq": (1.0, 0.5, 0.25, 0.125),
    "max_model_len": 64,
    "tie_word_embeddings": True,
}
SPEC = spec_of_equal_layers(**FIELDS)


def reads(op: Op) -> set[str]:
    fields = {field.name: getattr(op, field.name) for field in dataclasses.fields(op)}
    return {
        value for name, value in fields.items() if name in ("x", "q", "k", "v", "gate", "up", "a", "b", "residual") and value
    }


def writes(op: Op) -> set[str]:
    return {op.x} if isinstance(op, Rope) else {op.out} if hasattr(op, "out") else set()


def test_every_buffer_is_written_before_it_is_read_and_has_a_width():
    program = architectures.describe(SPEC)
    written: set[str] = set()
    for op in program.ops:
        assert reads(op) <= written, op
        written |= writes(op)
    assert written == {name for name, _ in program.buffers}


def test_layer_order():
    program = architectures.describe(SPEC)
    kinds = [type(op).__name__ for op in program.ops]
    attention = ["RMSNorm", "Linear", "Linear", "Linear", "Rope", "Rope", "KvWrite", "Attention"]
    rest = ["Linear", "RMSNorm", "Linear", "Linear", "GatedActivation", "Linear"]
    layers = (attention + rest) * 2 + attention + ["GatherRows", "GatherRows"] + rest
    assert kinds == ["Embed", *layers, "RMSNorm", "Logits"]


def test_both_sublayers_add_to_the_residual_stream():
    added = [op for op in architectures.describe(SPEC).ops if isinstance(op, Linear) and op.residual]
    assert [op.weight.rpartition(".")[2] for op in added] == ["o", "down"] * 3
    assert all(op.out == op.residual == ("sampled_x" if op.weight.startswith("layers.2.") else "x") for op in added)


def test_each_layer_attends_over_its_own_cache():
    program = architectures.describe(SPEC)
    attentions = [op for op in program.ops if isinstance(op, Attention)]
    assert [op.layer for op in attentions] == [0, 1, 2]
    assert all(op.scale == pytest.approx(8**-0.5) for op in attentions)
    assert program.kv_shapes == (KvShape(2, 8),) * 3


def test_after_the_last_attention_only_sampled_rows_are_computed():
    ops = architectures.describe(SPEC).ops
    gathers = [op for op in ops if isinstance(op, GatherRows)]
    computed = {op.out for op in gathers}
    for op in ops[ops.index(gathers[-1]) + 1 :]:
        assert reads(op) <= computed, op
        computed |= writes(op)
    assert "logits" in computed


@pytest.mark.parametrize(("tied", "weight"), [(True, "embed"), (False, "output")])
def test_tied_embeddings_give_the_logits(tied, weight):
    program = architectures.describe(spec_of_equal_layers(**FIELDS | {"tie_word_embeddings": tied}))
    assert program.ops[-1] == Logits(out="logits", x="sampled_normed", weight=weight)


def test_bias_belongs_to_q_k_and_v_alone():
    program = architectures.describe(spec_of_equal_layers(**FIELDS | {"has_qkv_bias": True}))
    biased = [op.bias for op in program.ops if isinstance(op, Linear) and op.bias]
    assert biased[:3] == ["layers.0.q_bias", "layers.0.k_bias", "layers.0.v_bias"]
    assert len(biased) == 9


@pytest.mark.parametrize(("qk_norms", "softcap", "is_shared"), [(None, 0.0, True), ("heads", 0.0, False), (None, 30.0, False)])
def test_a_bias_is_taken_off_keys_only_where_every_key_has_it_and_only_softmax_sees_it(qk_norms, softcap, is_shared):
    spec = spec_of_equal_layers(**FIELDS | {"has_qkv_bias": True})
    attention = dataclasses.replace(spec.layers[0].attention, softcap=softcap)
    spec = dataclasses.replace(spec, layers=(dataclasses.replace(spec.layers[0], mixer=attention),))
    build = Decoder(spec)
    build.attention(0, build.embed(), qk_norms=qk_norms)
    ops = build.finish("x").ops
    assert [op.bias for op in ops if isinstance(op, KvWrite)] == ["layers.0.k_bias" if is_shared else None]
    assert "layers.0.k_bias" in [op.bias for op in ops if isinstance(op, Linear)]


def test_shapes_of_weights():
    shapes = checks.weight_shapes(
        architectures.describe(spec_of_equal_layers(**FIELDS | {"has_qkv_bias": True, "tie_word_embeddings": False}))
    )
    assert shapes["embed"] == shapes["output"] == (100, 24)
    assert shapes["layers.2.q"] == (48, 24)
    assert shapes["layers.2.k"] == shapes["layers.2.v"] == (16, 24)
    assert shapes["layers.2.k_bias"] == (1, 16)
    assert shapes["layers.2.o"] == (24, 48)
    assert shapes["layers.2.down"] == (24, 40)
    assert shapes["norm"] == (1, 24)


def test_mistral_is_described_as_llama():
    assert architectures.describe(spec_of_equal_layers(**FIELDS | {"architecture": "mistral"})) == architectures.describe(SPEC)


def test_unknown_architecture_lists_the_supported_ones():
    with pytest.raises(ModelError, match=r"'rwkv7'.*Supported architectures: .*llama, .*mistral"):
        architectures.describe(spec_of_equal_layers(**FIELDS | {"architecture": "rwkv7"}))


@pytest.mark.parametrize("target", architectures.ARCHITECTURES.values())
def test_every_registered_description_gives_a_program(target):
    name = next(key for key, value in architectures.ARCHITECTURES.items() if value == target)
    spec = spec_of_equal_layers(**FIELDS | {"architecture": name})
    if name == "falcon_h1":
        net = LinearAttentionSpec(num_heads=2, num_key_heads=1, key_dim=8, value_dim=8, kernel=4, has_delta_rule=False)
        spec = spec.with_layers(lambda _, layer: dataclasses.replace(layer, beside=net, factors=LayerFactors()))
    assert isinstance(architectures.describe(spec), Program)


def test_missing_and_left_over_weights_are_named():
    program = architectures.describe(SPEC)
    shapes = checks.weight_shapes(program)
    checks.check_weights(program, shapes, Path("m"))
    with pytest.raises(ModelError, match=r"layers\.1\.gate is missing"):
        checks.check_weights(program, {name: shapes[name] for name in shapes if name != "layers.1.gate"}, Path("m"))
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_gate_exps.weight is not part"):
        checks.check_weights(program, {**shapes, "blk.0.ffn_gate_exps.weight": (1, 1)}, Path("m"))


SIZES = {name: FIELDS[name] for name in checks.LIMITS}


@pytest.mark.parametrize(("name", "value"), [("num_layers", 0), ("num_layers", 1 << 31), ("num_kv_heads", 4), ("head_dim", 7)])
def test_absurd_sizes_are_refused(name, value):
    checks.check_sizes(SIZES, Path("m"))
    with pytest.raises(ModelError, match=r"m: .*(num_layers|heads|head_dim)"):
        checks.check_sizes(SIZES | {name: value}, Path("m"))
