"""Weights that a file has otherwise than we do: several in a tensor, transposed, by turns, one tensor for each expert."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from penstock.models import architectures
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, REFUSED, Architecture, Parts
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory
from penstock.models.llama import describe
from penstock.models.weights import BlockScales, Cut, LoadedModel, WeightFormat, WeightTensor, stacked
from penstock.types.errors import ModelError
from penstock.types.model_spec import ExpertsMlp, ModelSpec
from support.fp8_models import write_fp8_hf
from support.packed_models import Packing, write_packed_hf
from support.tiny_models import FloatArray, TinyLlama, encode, write_encoded, write_gguf, write_hf

QKV, GATE_UP = ("q", "k", "v"), ("gate", "up")
NUM_EXPERTS = 3
TINY = TinyLlama(has_qkv_bias=True)


def _with_experts(_: object, spec: ModelSpec) -> ModelSpec:
    mlp = ExpertsMlp(num_experts=NUM_EXPERTS, num_experts_per_token=1, intermediate_size=96)
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp))


FUSED = Architecture(
    describe=describe,
    hf_layer={
        **HF_LAYER,
        "self_attn.qkv_proj.weight": Parts(QKV),
        "self_attn.qkv_proj.bias": Parts(tuple(f"{name}_bias" for name in QKV)),
        "self_attn.qkv_conv.weight": Parts(QKV, is_transposed=True),
        "self_attn.o_conv.weight": Parts(("o",), is_transposed=True),
        "mlp.gate_up_proj.weight": Parts(GATE_UP),
        "mlp.by_turns.weight": Parts(GATE_UP, is_interleaved=True),
    },
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": Parts(QKV), "attn_qkv.bias": Parts(tuple(f"{name}_bias" for name in QKV))},
)
MIXED = Architecture(
    describe=describe,
    of_hf=_with_experts,
    hf_layer={
        **HF_LAYER,
        "mlp.router.weight": "router",
        "mlp.experts.*.w1.weight": "expert_gate",
        "mlp.experts.*.w3.weight": "expert_up",
        "mlp.experts.*.w2.weight": "expert_down",
        "mlp.experts.gate_up_proj": Parts(("expert_gate", "expert_up")),
        "mlp.experts.turns": Parts(("expert_gate", "expert_up"), is_transposed=True, is_interleaved=True),
        "mlp.experts.down_proj": Parts(("expert_down",)),
    },
)


def load(folder: Path, architecture: Architecture, weights: Mapping[str, FloatArray], **kinds: Any) -> LoadedModel:
    """The model of a directory or, with a `gguf_type`, of a GGUF file, with these tensors by their Hugging Face names."""

    class Model(TinyLlama):
        def weights(self) -> dict[str, FloatArray]:
            return dict(weights)

    model = Model(has_qkv_bias=True, architecture="qwen2")
    here = f"{__name__}:{'FUSED' if architecture is FUSED else 'MIXED'}"
    with mock.patch.multiple(architectures, ARCHITECTURES={**architectures.ARCHITECTURES, "qwen2": here}):
        if kinds:
            names = {"self_attn.qkv_proj": "attn_qkv"}
            return load_gguf(write_gguf(folder / f"{len(weights)}.gguf", model, matrix_type=kinds["gguf_type"], names=names))
        return load_hf_directory(write_hf(folder, model, dtype="f32"))


def fused(*kinds: str) -> dict[str, FloatArray]:
    """The tensors of `TINY`, of which `kinds` are put together."""
    found: dict[str, FloatArray] = {}
    for name, values in TINY.weights().items():
        stem, _, part = name.rpartition("self_attn.")
        if part in ("q_proj.weight", "q_proj.bias", "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias"):
            end = part.split(".")[1]
            together = np.concatenate([TINY.weights()[f"{stem}self_attn.{kind}_proj.{end}"] for kind in "qkv"])
            if end == "weight" and "conv" in kinds:
                found[f"{stem}self_attn.qkv_conv.weight"] = np.ascontiguousarray(together.T)
            else:
                found[f"{stem}self_attn.qkv_proj.{end}"] = together
        elif part == "o_proj.weight" and "conv" in kinds:
            found[f"{stem}self_attn.o_conv.weight"] = np.ascontiguousarray(values.T)
        elif name.endswith(("gate_proj.weight", "up_proj.weight")) and kinds:
            stem = name.rpartition("mlp.")[0]
            both = [TINY.weights()[f"{stem}mlp.{kind}_proj.weight"] for kind in GATE_UP]
            if "turns" in kinds:
                found[f"{stem}mlp.by_turns.weight"] = np.stack(both, axis=1).reshape(-1, 64)
            else:
                found[f"{stem}mlp.gate_up_proj.weight"] = np.concatenate(both)
        else:
            found[name] = values
    return found


def assert_same(model: LoadedModel, wanted: LoadedModel) -> None:
    assert model.weights.keys() == wanted.weights.keys()
    for name, weight in wanted.weights.items():
        assert (model.weights[name].num_rows, model.weights[name].num_cols) == (weight.num_rows, weight.num_cols)
        assert np.array_equal(model.weights[name].dequantize(), weight.dequantize()), name
        middle = weight.num_rows // 2
        assert np.array_equal(model.weights[name].dequantize(middle, middle + 1), weight.dequantize(middle, middle + 1)), name


@pytest.mark.parametrize("kinds", [("plain",), ("conv", "plain"), ("turns",)], ids=lambda kinds: kinds[0])
def test_parts_of_a_tensor_are_the_weights_that_it_holds(kinds: tuple[str, ...], tmp_path: Path):
    wanted = load(tmp_path / "whole", FUSED, TINY.weights())
    model = load(tmp_path / "fused", FUSED, fused(*kinds))
    assert_same(model, wanted)
    assert model.num_weight_bytes == wanted.num_weight_bytes
    for weight in model.weights.values():
        weight.forget()
    assert_same(model, wanted)


@pytest.mark.parametrize("gguf_type", ["F32", "Q8_0", "Q4_0"])
def test_parts_of_a_tensor_of_a_gguf_file(gguf_type: str, tmp_path: Path):
    wanted, model = (load(tmp_path, FUSED, weights, gguf_type=gguf_type) for weights in (TINY.weights(), fused()))
    assert model.weights["layers.1.k"].format is WeightFormat[gguf_type]
    assert_same(model, wanted)


TURNED = Architecture(describe=describe, is_interleaved_in_hf=True)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "gptq"])
def test_pairs_side_by_side_are_put_in_halves_with_their_scales(kind: str, tmp_path: Path):
    tiny = TinyLlama(has_qkv_bias=True, architecture="qwen2")
    match kind:
        case "bf16":
            write_hf(tmp_path, tiny)
        case "fp8":
            write_fp8_hf(tmp_path, tiny, "row")
        case "gptq":
            write_packed_hf(tmp_path, tiny, Packing())
    plain = load_hf_directory(tmp_path)
    changed = {**architectures.ARCHITECTURES, "qwen2": f"{__name__}:TURNED"}
    with mock.patch.multiple(architectures, ARCHITECTURES=changed):
        turned = load_hf_directory(tmp_path)
    for name, weight in plain.weights.items():
        values = weight.dequantize()
        if name.split(".")[-1] in ("q", "k"):
            values = values.reshape(-1, tiny.head_dim // 2, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        elif name.split(".")[-1] in ("q_bias", "k_bias"):
            values = values.reshape(-1, tiny.head_dim // 2, 2).swapaxes(1, 2).reshape(1, -1)
        assert np.array_equal(turned.weights[name].dequantize(), values), name
        assert np.array_equal(turned.weights[name].dequantize(0, 1), values[:1]), name


def mixed(kind: str) -> dict[str, FloatArray]:
    rng = np.random.default_rng(5)
    found = {name: values for name, values in TINY.weights().items() if ".mlp." not in name}
    for layer in range(TINY.num_layers):
        at = f"model.layers.{layer}.mlp"
        gate, up, down = (rng.standard_normal(shape).astype(np.float32) for shape in [(3, 96, 64), (3, 96, 64), (3, 64, 96)])
        found[f"{at}.router.weight"] = rng.standard_normal((NUM_EXPERTS, 64)).astype(np.float32)
        if kind == "apart":
            for expert in (2, 0, 1):
                names = {"w1": gate, "w3": up, "w2": down}
                found |= {f"{at}.experts.{expert}.{name}.weight": values[expert] for name, values in names.items()}
            continue
        found[f"{at}.experts.down_proj"] = down
        if kind == "cubes":
            found[f"{at}.experts.gate_up_proj"] = np.concatenate([gate, up], axis=1)
        else:
            turns = np.stack([gate, up], axis=2).reshape(3, 192, 64)
            found[f"{at}.experts.turns"] = np.ascontiguousarray(turns.swapaxes(1, 2))
    return found


@pytest.mark.parametrize("kind", ["cubes", "turns"])
def test_experts_are_one_matrix_whether_apart_or_in_cubes(kind: str, tmp_path: Path):
    wanted, model = (load(tmp_path / name, MIXED, mixed(name)) for name in ("apart", kind))
    gate = wanted.weights["layers.1.expert_gate"]
    assert gate.num_rows == NUM_EXPERTS * 96
    assert np.array_equal(gate.dequantize(96, 192), mixed("apart")["model.layers.1.mlp.experts.1.w1.weight"])
    assert_same(model, wanted)


def test_tensors_that_do_not_hold_their_parts_are_refused(tmp_path: Path):
    weights = fused("plain")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    for count, change in enumerate((lambda values: values[:-1], lambda values: values[:, :-1], lambda values: values[:0])):
        with pytest.raises(ModelError, match=r"layers\.1\.[qkv] is "):
            load(tmp_path / str(count), FUSED, {**weights, name: change(weights[name])})
    with pytest.raises(ModelError, match=r"layers\.1\.q is 0 x 0"):
        load(tmp_path / "twice", FUSED, {**weights, "model.layers.1.self_attn.q_proj.weight": np.ones((64, 64), np.float32)})
    experts = mixed("apart")
    moved = experts.pop("model.layers.0.mlp.experts.2.w1.weight")
    with pytest.raises(ModelError, match=r"layers\.0\.expert_gate is 0 x 0"):
        load(tmp_path / "gap", MIXED, {**experts, "model.layers.0.mlp.experts.7.w1.weight": moved})


def test_scales_go_with_their_rows():
    codes, scales = np.full((8, 32), 0x38, np.uint8), np.arange(1.0, 5.0, dtype=np.float32)[:, None]
    blocks = WeightTensor("a", 8, 32, WeightFormat.F8_E4M3, codes, BlockScales(scales, 2, 32))
    whole = WeightTensor("b", 8, 32, WeightFormat.F8_E4M3, codes, BlockScales(np.full((1, 1), 9, np.float32), 8, 32))
    both = stacked("c", [Cut(blocks, 1, 3, step=2), Cut(whole, 6, 2)])
    assert both.dequantize()[:, 0].tolist() == [1.0, 2.0, 3.0, 9.0, 9.0]
    assert both.dequantize(2, 4)[:, 0].tolist() == [3.0, 9.0]
    plain = WeightTensor("d", 1, 32, WeightFormat.F32, np.ones((1, 32), np.float32))
    with pytest.raises(ModelError, match="parts of e are stored in different ways"):
        stacked("e", [Cut(blocks, 0, 1), Cut(plain, 0, 1)])


WRAPPER = {"architectures": ["Qwen3VLForConditionalGeneration"], "vision_config": {"depth": 2}}


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_of_a_model_of_text_and_pictures_the_text_part_is_served(prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tiny = TinyLlama(is_tied=False)
    norms = {f"model.layers.{i}.self_attn.{x}_norm.weight": np.ones(16, np.float32) for i in range(2) for x in "qk"}
    weights = {**tiny.weights(), **norms}
    directory = write_hf(tmp_path, tiny)
    config = json.loads((directory / "config.json").read_text())
    outer = {**WRAPPER, "eos_token_id": 2, "text_config": {**config, "eos_token_id": None, "architectures": None}}
    (directory / "config.json").write_text(json.dumps(outer))
    head = "language_model." if prefix.startswith("language") else ""
    renamed = {
        f"{head}{name}" if name.startswith("lm_head") else name.replace("model.", prefix, 1): v for name, v in weights.items()
    }
    renamed |= {"visual.patch.weight": np.ones((3, 3), np.float32), "model.projector.0.weight": np.ones((3, 3), np.float32)}
    tensors = {name: ("BF16", values.shape, encode(values, "bf16")) for name, values in renamed.items()}
    write_encoded(directory / "model.safetensors", tensors)
    with caplog.at_level(logging.INFO, "penstock"):
        model = load_hf_directory(directory)
    assert "only the text model is loaded; left out: model.projector, visual.patch" in caplog.text
    assert (model.spec.architecture, model.spec.tie_word_embeddings, model.eos_token_ids) == ("qwen3", False, (2, 0))
    assert {"embed", "output", "layers.1.q_norm", "layers.1.down"} < model.weights.keys()


OF_DOCS = (
    *(
        "DeepseekV32ForCausalLM",
        "GlmMoeDsaForCausalLM",
        "Qwen4ExpForConditionalGeneration",
        "MambaForCausalLM",
    ),
    *("FalconMambaForCausalLM", "Llama4ForConditionalGeneration", "MiniMaxText01ForCausalLM", "minimax-m3"),
    *(
        "kimi-linear",
        "Gemma3nForConditionalGeneration",
    ),
    *(
        "Gemma3nForCausalLM",
        "MPTForCausalLM",
        "BloomForCausalLM",
        "DebertaV2Model",
        "neo-bert",
        "T5ForConditionalGeneration",
        "PhimoeForCausalLM",
        "PersimmonForCausalLM",
        "JetMoeForCausalLM",
        "hunyuan-moe",
    ),
)


@pytest.mark.parametrize("name", [*REFUSED, *OF_DOCS])
def test_what_is_not_served_is_refused_with_its_reason(name: str, tmp_path: Path):
    with pytest.raises(ModelError, match=f"architecture {name} is not supported: .*docs/models.md lists all"):
        architectures.our_name(name, architectures.GGUF_NAMES, tmp_path)


def test_no_family_is_both_served_and_refused():
    for name in (*architectures.HF_CLASSES, *architectures.GGUF_NAMES):
        with pytest.raises(ModelError, match=f"the architecture {name} is not supported\\. "):
            architectures.our_name(name, {}, Path())


def test_gguf_files_of_models_that_are_read_from_directories_are_refused_with_that_reason():
    for name in ("apertus", "exaone-moe", "jais2", "mamba2", "neo-bert"):
        with pytest.raises(ModelError, match="only Hugging Face directories"):
            architectures.our_name(name, architectures.GGUF_NAMES, Path())
    for name in ("gptoss", "modernbert"):  # served under another spelling
        with pytest.raises(ModelError, match=f"architecture {name} is not supported\\. "):
            architectures.our_name(name, architectures.GGUF_NAMES, Path())
    with pytest.raises(ModelError, match="architecture NeoBERTForTokenClassification is not supported\\. "):
        architectures.our_name("NeoBERTForTokenClassification", architectures.HF_CLASSES, Path())


def test_an_unknown_architecture_gets_the_nearest_names() -> None:
    with pytest.raises(ModelError) as refused:
        architectures.our_name("LlamoForCausalLM", architectures.HF_CLASSES, Path())
    assert "The nearest that are supported: LlamaForCausalLM" in refused.value.remedy
    assert len(refused.value.remedy) < 200, "not all that are supported"
