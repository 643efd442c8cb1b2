"""Models whose layers keep a state in place of keys and values: settings that are refused, and tensors in other forms.

`tests/parity` holds their numbers to those of transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.backends.native import footprint
from penstock.models import architectures
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.weights import LoadedModel, Stacked
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import write_hf_files


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("qwen3_5", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate is False"),
        ("qwen3_5", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "missing"),
        ("qwen3_5", {"layer_types": ["linear_attention", "full_attention", "conv", "conv"]}, "has the unknown conv"),
        ("qwen3_5", {"linear_num_key_heads": 4}, "linear attention is not possible with 6 value heads"),
        ("qwen3_5", {"linear_num_key_heads": 0}, "linear attention is not possible"),
        ("qwen3_5", {"linear_key_head_dim": 1 << 40}, "linear attention is not possible"),
        ("qwen3_5", {"linear_conv_kernel_dim": 1}, "kernel has 1 positions"),
        ("qwen3_5", {"linear_conv_kernel_dim": "4"}, "linear_conv_kernel_dim is '4'"),
        ("qwen3_5", {"linear_value_head_dim": 12}, "require"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "missing"),
        ("qwen3_5", {"attention_bias": True}, "attention_bias is True"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3_next", {"num_experts": 0}, "not a possible mixture"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "require"),
        ("qwen3_next", {"linear_key_head_dim": 11}, "require"),
        ("granite_hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("granite_hybrid", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("granite_hybrid", {"layer_types": ["mamba"] * 3}, "missing"),
        ("granite_hybrid", {"layer_types": ["mamba", "attention", "conv"]}, "has the unknown conv"),
        ("granite_hybrid", {"mamba_n_groups": 4}, "linear attention is not possible"),
        ("granite_hybrid", {"mamba_n_heads": 0}, "0 heads"),
        ("granite_hybrid", {"mamba_n_heads": 5, "mamba_d_head": "auto"}, "are not mamba_expand 2 times 72"),
        ("granite_hybrid", {"mamba_d_state": 11}, "require"),
        ("granite_hybrid", {"mamba_conv_bias": False}, "not part of this architecture"),
        ("granite_hybrid", {"time_step_limit": [0.5, 0.1]}, r"not \[smallest step, largest step\]"),
        ("granite_hybrid", {"time_step_limit": [0.5]}, r"not \[smallest step, largest step\]"),
        ("granite_hybrid", {"time_step_limit": [10**400, 10**401]}, r"not \[smallest step, largest step\]"),
        ("granite_hybrid", {"time_step_limit": [1e30, {"__float__": "Infinity"}]}, r"not \[smallest step, largest step\]"),
        ("granite_hybrid_dense", {"shared_intermediate_size": 0}, "shared_intermediate_size is 0"),
        ("bamba", {"attn_layer_indices": []}, "missing"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("falcon_h1", {"projectors_bias": True}, "projectors_bias is True"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "not a list of 5 positive numbers"),
        ("falcon_h1", {"mlp_multipliers": [0.0, 1.0]}, "not a list of 2 positive numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, 10**400]}, "not a list of 2 positive numbers"),
        ("falcon_h1", {"attention_in_multiplier": 1e300}, "too large"),
        ("falcon_h1", {"key_multiplier": -1.0}, "key_multiplier is -1.0"),
        ("falcon_h1", {"key_multiplier": 1e30}, "too large"),
        ("falcon_h1", {"mamba_d_ssm": 90}, "are not mamba_d_ssm"),
        ("falcon_h1", {"mamba_rms_norm": True}, "missing"),
        ("falcon_h1_normed", {"mamba_n_groups": 5}, "linear attention is not possible"),
        ("nemotron_h", {"use_bias": True}, "use_bias is True"),
        ("nemotron_h", {"mamba_hidden_act": "gelu"}, "mamba_hidden_act is 'gelu'"),
        ("nemotron_h", {"attention_head_dim": 32}, "attention_head_dim is 32"),
        ("nemotron_h", {"n_groups": 5}, "linear attention is not possible"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-MX"}, "a layer is 'X'"),
        ("nemotron_h", {"hybrid_override_pattern": "M*-M"}, "not part of this architecture"),
        ("nemotron_h", {"hybrid_override_pattern": "-----"}, "no layer attends"),
        ("nemotron_h", {"hybrid_override_pattern": None}, "layer"),
        ("olmo_hybrid", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention", "conv", "conv"]}, "has the unknown conv"),
        ("olmo_hybrid", {"linear_num_key_heads": 4}, "linear attention is not possible"),
        ("olmo_hybrid", {"linear_num_key_heads": "3"}, "linear_num_key_heads is '3'"),
        ("olmo_hybrid", {"linear_key_head_dim": [1]}, "linear_key_head_dim is"),
        ("olmo_hybrid_defaults", {"hidden_size": 10**400}, "hidden_size is 1000"),
        ("olmo_hybrid_defaults", {"num_attention_heads": 10**400}, "num_heads is 1000"),
        ("olmo_hybrid", {"linear_num_value_heads": None}, "not possible with 3 value heads"),
        ("mamba2", {"expand": 3}, "are not expand times 72"),
        ("mamba2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("mamba2", {"use_bias": False}, "not part of this architecture"),
        ("nemotron_h_moe", {"n_group": 7}, "n_group is 7"),
        ("nemotron_h_moe", {"moe_latent_size": 36}, "moe_latent_size is 36"),
        ("nemotron_h_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0"),
        ("bamba", {"mamba_n_groups": 0}, "linear attention is not possible"),
    ],
)
def test_settings_that_are_not_possible_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    case = CASES[name]
    write_hf_files(tmp_path, {**case.config, **changes}, case.weights(), case.vocab_size)
    with pytest.raises(ModelError, match=words):
        load_hf_directory(tmp_path)


@pytest.mark.parametrize("limits", [None, [0.0, float("inf")], [0.0, {"__float__": "Infinity"}], [0, 10**400]])
def test_steps_without_a_largest_are_read_as_all_releases_of_transformers_write_them(tmp_path: Path, limits: object) -> None:
    case = CASES["mamba2"]
    write_hf_files(tmp_path, {**case.config, "time_step_limit": limits}, case.weights(), case.vocab_size)
    assert {(net.min_step, net.max_step) for net in read_hf_spec(tmp_path).linear_attentions} == {(0.0, float("inf"))}


@pytest.mark.parametrize("embedding", ["embeddings", "embedding"])
def test_names_and_kinds_of_layers_of_all_forms_of_nemotron_h_are_read(tmp_path: Path, embedding: str) -> None:
    """The names that are published, those that release 5 of transformers saves, and those that it has in memory."""
    case = CASES["nemotron_h_moe"]
    kinds = ["moe", "linear_attention", "full_attention", "moe", "mlp"]
    new = {**case.config, "hybrid_override_pattern": None, "layers_block_type": kinds}
    old = {"mtp.layers.0.norm.weight": np.ones(3, np.float32)}
    for name, values in case.weights().items():
        name = name.replace("model.", "backbone.", 1).replace(".embeddings.", f".{embedding}.")
        at, found, part = name.partition("experts.")
        is_cube = found and values.ndim == 3
        old |= {f"{at}experts.{i}.{part}.weight": values[i] for i in range(7)} if is_cube else {at + found + part: values}
    write_hf_files(tmp_path / "new", new, case.weights(), case.vocab_size)
    write_hf_files(tmp_path / "old", case.config, old, case.vocab_size)
    first, second = (load_hf_directory(tmp_path / name) for name in ("new", "old"))
    assert first.spec == second.spec
    assert_same_weights(first, second)


def assert_same_weights(first: LoadedModel, second: LoadedModel) -> None:
    assert first.weights.keys() == second.weights.keys()
    for name, tensor in first.weights.items():
        assert np.array_equal(tensor.dequantize(), second.weights[name].dequantize()), name


def test_olmo_hybrid_is_read_by_its_published_names(tmp_path: Path) -> None:
    """transformers joins the three convolutions of a layer and renames two norms, but saves them as published."""
    case = CASES["olmo_hybrid"]
    published = {}
    for name, values in case.weights().items():
        if name.endswith("conv1d.weight"):
            parts = zip("qkv", np.split(values, [20, 40]), strict=True)
            published |= {name.replace("conv1d", f"{part}_conv1d"): rows for part, rows in parts}
            continue
        name = name.replace("input_layernorm", "attention_layer_norm")
        published[name.replace("post_attention_layernorm", "feedforward_layer_norm")] = values
    write_hf_files(tmp_path / "published", case.config, published, case.vocab_size)
    model = load_hf_directory(tmp_path / "published")
    assert_same_weights(model, load_hf_directory(write_case(case, tmp_path / "joined")))
    conv = model.weights["layers.0.mix_conv"].stored
    assert isinstance(conv, Stacked)
    assert [cut.num_rows for cut in conv.cuts] == [20, 20, 84]


def test_layers_for_further_tokens_and_pictures_are_left_out(tmp_path: Path) -> None:
    """A text model may also keep the prefix of the larger model that it was."""
    case = CASES["qwen3_5"]
    more = {"mtp.fc.weight": np.ones((3, 5), np.float32), "model.visual.patch.weight": np.ones((3, 5), np.float32)}
    prefixed = {name.replace("model.", "model.language_model.", 1): values for name, values in case.weights().items()}
    write_hf_files(tmp_path, case.config, {**prefixed, **more}, case.vocab_size)
    assert load_hf_directory(tmp_path).weights.keys() == load_hf_directory(write_case(case, tmp_path / "plain")).weights.keys()


@pytest.mark.parametrize("dtype", [KvDtype.BF16, KvDtype.INT8])
def test_a_position_without_keys_and_values_takes_a_small_part_of_a_state(tmp_path: Path, dtype: KvDtype) -> None:
    """The blocks of a state are few enough to list, and those of a text cost little."""
    sizes = {"hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64, "state_size": 128, "n_groups": 1}
    write_hf_files(tmp_path, {**CASES["mamba2"].config, "use_bias": False, **sizes}, {}, 263)
    spec = read_hf_spec(tmp_path)
    block_bytes = footprint.block_bytes(spec, dtype, 16)
    state_bytes = sum(4 * net.num_state_floats for net in spec.linear_attentions)
    num_blocks = footprint.num_state_blocks(architectures.describe(spec).paged_state, block_bytes)
    assert state_bytes < num_blocks * block_bytes < 1.02 * state_bytes
    assert 900 < num_blocks < 2200
