"""gpt-oss: experts in MXFP4 to the bit, what its files must have, and its end tokens. `parity/test_tiny.py` has its numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models import architectures, catalog
from penstock.models.formats import WeightFormat
from penstock.models.hf import read_hf_spec
from penstock.models.load import load_model
from penstock.models.moe import GPT_OSS
from penstock.models.program import KvWrite
from penstock.models.safetensors_file import StoredTensor, open_safetensors
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import ModelError
from penstock.types.model_spec import ExpertsMlp
from support.models.moe import changed, load
from support.parity.tiny import TinyCase, is_cube, to_mxfp4, write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import Encoded, write_encoded

MXFP4 = CASES["gpt_oss_mxfp4"]
GATES = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "gpt_oss_mxfp4_gguf"])
def test_experts_in_mxfp4_keep_their_bits(tmp_path: Path, name: str) -> None:
    """In a directory as in a GGUF file: gate and up take turns in the rows of the one, and are two tensors of the other."""
    weights, values = load(CASES[name], tmp_path).weights, MXFP4.weights()
    for layer in range(3):
        at = f"model.layers.{layer}.mlp.experts"
        gates, downs = to_mxfp4(values[f"{at}.gate_up_proj"]), to_mxfp4(values[f"{at}.down_proj"])
        for ours, blocks in (("expert_gate", gates[:, ::2]), ("expert_up", gates[:, 1::2]), ("expert_down", downs)):
            tensor = weights[f"layers.{layer}.{ours}"]
            assert tensor.format is WeightFormat.MXFP4
            assert np.array_equal(tensor.data, blocks.reshape(tensor.num_rows, -1))
            assert np.array_equal(tensor.rows(5, 70), tensor.data[5:70])


def test_experts_in_mxfp4_are_the_numbers_that_transformers_makes_of_them(tmp_path: Path) -> None:
    """A number of E2M1 times 2^(scale - 127); a byte has an even column below, and the odd one beside it above."""
    path = write_case(MXFP4, tmp_path / "model")
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    numbers = np.concatenate([numbers, -numbers])
    stored = open_safetensors(path / "model.safetensors")
    blocks, scales = (stored[f"{GATES}_{end}"].integers("U8").astype(np.int64) for end in ("blocks", "scales"))
    pairs = np.stack([numbers[blocks & 15], numbers[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
    expected = np.ldexp(pairs, scales[..., None] - 127).reshape(7, 128, 96)
    tensor = load_model(catalog.resolve(str(path), path)).weights["layers.1.expert_up"]
    assert np.array_equal(tensor.dequantize().reshape(7, 64, 96), expected[:, 1::2])
    assert len(np.unique(blocks)) > 200
    assert len(np.unique(scales)) > 1


def test_layers_have_windows_by_turns_and_experts_of_its_kind(tmp_path: Path) -> None:
    """Without `layer_types` the first layer has a window, as in a GGUF file."""
    mlp = ExpertsMlp(
        num_experts=7,
        num_experts_per_token=3,
        intermediate_size=40,
        activation="swiglu_clamped",
        has_router_bias=True,
        has_bias=True,
    )
    for name in ("gpt_oss", "gpt_oss_gguf"):
        case = changed(name, layer_types=None) if name == "gpt_oss" else CASES[name]
        spec = load(case, tmp_path / name).spec
        assert [layer.attention.window for layer in spec.layers] == [6, 0, 6]
        assert all(layer.mlp == mlp and layer.attention.has_sinks for layer in spec.layers)
    assert read_hf_spec(tmp_path / "gpt_oss" / "model") == load(CASES["gpt_oss"], tmp_path / "again").spec


def test_a_gguf_file_says_which_layers_have_windows(tmp_path: Path) -> None:
    told = changed("gpt_oss_gguf", **{"attention.sliding_window_pattern": [False, True, True]})
    assert [layer.attention.window for layer in load(told, tmp_path).spec.layers] == [0, 6, 6]


def test_settings_that_a_config_leaves_out_are_those_of_transformers() -> None:
    values = GPT_OSS.hf_values({"vocab_size": 5})
    assert (values["rope_theta"], values["sliding_window"], values["rms_norm_eps"]) == (150000.0, 128, 1e-5)
    assert (values["rope_parameters"]["factor"], values["rope_parameters"]["truncate"]) == (32.0, False)
    assert "rope_parameters" not in GPT_OSS.hf_values({"rope_scaling": {"rope_type": "yarn"}})


def test_keys_are_stored_whole_where_a_sink_sees_what_they_share(tmp_path: Path) -> None:
    writes = [op for op in architectures.describe(load(CASES["gpt_oss"], tmp_path).spec).ops if isinstance(op, KvWrite)]
    assert [op.bias for op in writes] == [None] * 3


@pytest.mark.parametrize(
    ("name", "changes", "complaint"),
    [
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit is 5.0"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window is missing"),
        ("gpt_oss", {"layer_types": ["linear_attention"] * 3}, "linear_attention"),
        ("gpt_oss", {"attention_bias": False}, "q_bias"),
        ("gpt_oss", {"num_experts_per_tok": 8}, "8 of 7 experts"),
        ("gpt_oss_gguf", {"rope.freq_base_swa": 10.0}, "freq_base_swa"),
        ("gpt_oss_gguf", {"attention.sliding_window": None}, "sliding_window"),
        ("gpt_oss_mxfp4", {"intermediate_size": 96}, "expert_gate is 0 x 96"),
    ],
)
def test_other_settings_are_refused_by_name(tmp_path: Path, name: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ModelError, match=complaint) as refused:
        load(changed(name, **changes), tmp_path)
    assert refused.value.remedy


@pytest.mark.parametrize("missing", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj_bias"])
@pytest.mark.parametrize("name", ["gpt_oss", "gpt_oss_gguf"])
def test_a_file_without_its_sinks_or_biases_is_refused(tmp_path: Path, name: str, missing: str) -> None:
    case: TinyCase = CASES[name]
    case = replace(case, shapes={key: shape for key, shape in case.shapes.items() if not key.endswith(missing)})
    with pytest.raises(ModelError, match="are missing"):
        load(case, tmp_path)


def _encoded(tensor: StoredTensor) -> Encoded:
    kinds = {"BF16": np.uint16, "U8": np.uint8}
    values = tensor.array() if tensor.dtype == "BF16" else tensor.integers("U8")
    return tensor.dtype, tensor.shape, values.astype(kinds[tensor.dtype]).tobytes()


def _number(data: bytes) -> bytes:
    return data[:40] + b"\xff" + data[41:]


@pytest.mark.parametrize(
    ("end", "change", "complaint"),
    [
        ("scales", lambda dtype, shape, data: (dtype, shape, _number(data)), "is not a number"),
        ("scales", lambda dtype, shape, data: (dtype, (*shape[:2], 1), data[: 7 * 128]), "a scale each"),
        ("scales", lambda dtype, shape, data: ("I8", shape, data), "of type I8"),
        ("blocks", lambda dtype, shape, data: (dtype, (*shape[:3], 8), data[: len(data) // 2]), "a scale each"),
        ("blocks", lambda dtype, shape, data: (dtype, (7, 128, 48), data), "a scale each"),
        ("blocks", lambda dtype, shape, data: (dtype, (7, 127, 3, 16), data[: 7 * 127 * 48]), "a scale each"),
        ("blocks", lambda dtype, shape, data: (dtype, (0, 128, 3, 16), b""), "a scale each"),
        ("scales", None, "has no .*gate_up_proj_scales"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_refused(
    tmp_path: Path, end: str, change: Callable[[str, tuple[int, ...], bytes], Encoded] | None, complaint: str
) -> None:
    path = write_case(MXFP4, tmp_path / "model")
    tensors = {name: _encoded(tensor) for name, tensor in open_safetensors(path / "model.safetensors").items()}
    name = f"{GATES}_{end}"
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(*tensors[name])
    write_encoded(path / "model.safetensors", tensors)
    with pytest.raises(ModelError, match=complaint) as refused:
        load_model(catalog.resolve(str(path), path)).weights["layers.1.expert_up"].dequantize()
    assert refused.value.remedy


def test_a_config_that_names_mxfp4_may_have_experts_of_floats(tmp_path: Path) -> None:
    """`modules_to_not_convert` may leave out any module: what has no blocks is as it is."""
    model = load(
        changed("gpt_oss", quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model"]}), tmp_path
    )
    assert model.weights["layers.0.expert_gate"].format is WeightFormat.BF16
    assert all(not is_cube(name) for name in model.weights)


def test_a_reply_ends_where_its_files_say_and_not_behind_a_message(tmp_path: Path) -> None:
    """`<|end|>` is between the messages of a reply."""
    path = write_case(CASES["gpt_oss"], tmp_path / "model")
    texts = ("<|return|>", "<|call|>", "<|end|>")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    for number, text in enumerate(texts):  # in the place of the first ones
        old = tokenizer["added_tokens"][number]["content"]
        tokenizer["added_tokens"][number]["content"] = text
        tokenizer["model"]["vocab"] = {text if key == old else key: idx for key, idx in tokenizer["model"]["vocab"].items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|return|>"}))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 1]}))
    (path / "config.json").write_text(json.dumps({**CASES["gpt_oss"].config, "eos_token_id": 0}))
    model = load_model(catalog.resolve(str(path), path))
    read = load_tokenizer(model.tokenizer_source, eos_token_ids=model.eos_token_ids, special_tokens=model.special_tokens)
    assert [texts[token_id] for token_id in read.eos_token_ids] == ["<|return|>", "<|call|>"]
