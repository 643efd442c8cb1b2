"""Defaults of the families of models, and what is refused, where `tests/parity` has no tiny model for it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.models.architectures import describe, with_defaults
from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.program import Attention, GatherRows, KvWrite
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec
from support.parity.tiny import TinyCase, write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import write_hf_files

GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152},
}
"""The published config.json, but for the keys of pictures."""


def spec_of(directory: Path, config: dict[str, Any]) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(config))
    return read_hf_spec(directory)


def changed(case: TinyCase, **changes: Any) -> dict[str, Any]:
    """The case's config.json with other values; None leaves a key out."""
    return {key: value for key, value in {**case.config, **changes}.items() if value is not None}


def test_a_gemma_3_of_pictures_says_little_of_its_text_model(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, GEMMA_3_4B)
    local, far = spec.layers[0].attention, spec.layers[5].attention
    assert (local.num_heads, local.num_kv_heads, local.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert [layer.attention.window for layer in spec.layers[:7]] == [1024] * 5 + [0, 1024]
    assert local.rotation is not None
    assert far.rotation is not None
    assert local.rotation.inv_freq[1] == pytest.approx(10_000 ** (-2 / 256))
    assert far.rotation.inv_freq[1] == pytest.approx(1e6 ** (-2 / 256) / 8)
    assert (spec.embed_scale, local.scale, spec.logit_softcap) == (2560**0.5, 256**-0.5, 0.0)


def test_a_mistral_that_does_not_speak_of_a_window_has_that_of_the_first(tmp_path: Path) -> None:
    config = changed(CASES["mistral"], sliding_window=None)
    assert {layer.attention.window for layer in spec_of(tmp_path, config).layers} == {4096}
    assert {layer.attention.window for layer in spec_of(tmp_path, {**config, "sliding_window": None}).layers} == {0}


def test_a_qwen_2_vl_that_names_little_has_the_windows_and_the_base_of_transformers(tmp_path: Path) -> None:
    config = changed(CASES["qwen2_vl"], use_sliding_window=True, num_hidden_layers=81, rope_parameters=None)
    wrapped = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "text_config": config}
    layers = spec_of(tmp_path, wrapped).layers
    assert [layer.attention.window for layer in layers] == [0] * 80 + [4096]
    assert layers[0].attention.has_qkv_bias
    rotation = layers[0].attention.rotation
    assert rotation is not None
    assert rotation.inv_freq[1] == pytest.approx(1e6 ** (-2 / 24))


def test_a_mistral_of_pictures_without_a_window_has_none(tmp_path: Path) -> None:
    """null within `text_config` is a value."""
    text = {**changed(CASES["mistral"]), "sliding_window": None}
    config = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    assert {layer.attention.window for layer in spec_of(tmp_path, config).layers} == {0}


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ("gemma3", {"sliding_window": -1}, "window of attention is -1"),
        *[
            (name, {"sliding_window": 0}, "window of attention is 0")
            for name in ("gemma2", "gemma3", "gemma4", "gpt_oss", "cohere2", "mistral", "mixtral", "phi3", "starcoder2")
        ],
        ("gemma3", {"sliding_window": 1 << 31}, "window of attention is 2147483648"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
        ("gemma2", {"attn_logit_softcapping": -1.0}, "cap of"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0.0"),
        ("ministral", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ("ministral3", {"rope_parameters": None}, "rope_parameters is missing"),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers"),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling is 0.0"),
        ("olmo2", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic", "alpha": -1.0}}, "alpha is -1.0"),
        ("olmo3", {"attention_bias": True}, "attention_bias is True"),
        ("olmo3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("olmo3", {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}, "rope_parameters"),
        ("olmo3", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
        ("qwen3", {"is_causal": False}, "is_causal is False"),
    ],
)
def test_settings_that_are_not_computed_are_refused(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, changed(CASES[name], **changes))


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_factors_of_a_gguf_file_are_finite(tmp_path: Path, value: float) -> None:
    case = CASES["granite_gguf"]
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "embedding_scale": value})
    with pytest.raises(ModelError, match="factor"):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


def test_local_layers_of_a_gguf_file_may_be_told_one_by_one(tmp_path: Path) -> None:
    case = CASES["gemma3_gguf"]
    assert case.gguf is not None
    told = [True, False, True, True, False, True, True]
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "attention.sliding_window_pattern": told})
    spec = load_gguf(write_case(replace(case, gguf=gguf), tmp_path)).spec
    assert [layer.attention.window > 0 for layer in spec.layers] == told
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "attention.sliding_window_pattern": told[1:]})
    with pytest.raises(ModelError, match="6 values for 7 layers"):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


def test_a_tensor_that_a_family_does_not_have_is_refused(tmp_path: Path) -> None:
    case = CASES["olmo2"]
    path = write_case(case, tmp_path / "olmo2")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    with pytest.raises(ModelError, match="attn_norm"):
        load_hf_directory(path)


def test_a_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    case = CASES["gpt2"]
    weights = dict(case.weights())
    weights["wte.weight"] = weights["transformer.wte.weight"] + 1
    write_hf_files(tmp_path, case.config, weights, case.vocab_size)
    with pytest.raises(ModelError, match="stand for the same tensor"):
        load_hf_directory(tmp_path)


def test_old_files_of_gpt_2_have_no_prefix_and_hold_masks(tmp_path: Path) -> None:
    case = CASES["gpt2"]
    weights = {name.removeprefix("transformer."): values for name, values in case.weights().items()}
    for layer in range(2):
        weights[f"h.{layer}.attn.bias"] = np.ones((1, 1, 64, 64), np.float32)
        weights[f"h.{layer}.attn.masked_bias"] = np.float32([-1e4])
    write_hf_files(tmp_path, {**case.config, "n_inner": None}, weights, case.vocab_size)
    with pytest.raises(ModelError, match="require 288 x 72"):  # 4 * 72: the inner width of these files is not named
        load_hf_directory(tmp_path)
    write_hf_files(tmp_path, case.config, weights, case.vocab_size)
    model = load_hf_directory(tmp_path)
    assert np.array_equal(model.weights["layers.1.up"].dequantize(), weights["h.1.mlp.c_fc.weight"].T)
    whole = weights["h.0.attn.c_attn.bias"]
    assert np.array_equal(model.weights["layers.0.k_bias"].dequantize()[0], whole[72:144])


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}),
        ("granite_moe_shared", {"hidden_act": "gelu"}),
        ("granite_swa", {"hidden_act": "gelu"}),
        ("granite_swa", {"layer_rope_theta": [3000.0]}),
        ("granite_swa", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("granite_moe_swa", {"hidden_act": "gelu"}),
        ("jais2", {"hidden_act": "mish"}),
        ("hunyuan_moe", {"hidden_act": "gelu"}),
        ("hunyuan_moe", {"use_qk_norm": False}),
        ("hunyuan_moe", {"use_cla": True}),
        ("hunyuan_moe", {"num_experts": [7, 8]}),
        ("hunyuan_moe", {"num_shared_expert": [2, 2]}),
        ("hunyuan_moe", {"moe_intermediate_size": 56}),
        ("hunyuan_moe", {"moe_layer_num_skipped": 1}),
        ("flex_olmo", {"hidden_act": "gelu"}),
        ("mellum", {"hidden_act": "gelu"}),
        ("mellum", {"mlp_layer_types": ["dense"]}),
        ("codegen", {"activation_function": "mish"}),
        ("codegen", {"rotary_dim": None}),
        ("gpt_neo", {"activation_function": "mish"}),
        ("gpt_neo", {"attention_types": [[["global"], 1]]}),
        ("gpt_neo", {"attention_types": ["global"]}),
        ("olmo", {"clip_qkv": 8.0}),
        ("olmo", {"hidden_act": "gelu"}),
        ("nanochat", {"hidden_act": "mish"}),
        ("vaultgemma", {"hidden_activation": "gelu"}),
        ("cwm", {"hidden_act": "gelu"}),
        ("hyperclovax", {"hidden_act": "gelu"}),
        ("hyperclovax", {"use_post_norm": False}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"activation_function": "mish"}),
        ("seed_oss", {"hidden_act": "gelu"}),
        ("starcoder2", {"hidden_act": "mish"}),
        ("arcee", {"hidden_act": "mish"}),
        ("phi3", {"hidden_act": "gelu"}),
        ("ernie4_5", {"hidden_act": "gelu"}),
        ("exaone4", {"hidden_act": "gelu"}),
        ("helium", {"hidden_act": "gelu"}),
        ("nemotron", {"hidden_act": "mish"}),
        ("falcon", {"alibi": True}),
        ("falcon", {"parallel_attn": False}),
        ("falcon", {"multi_query": False}),
        ("falcon", {"activation": "mish"}),
        ("gemma4", {"hidden_activation": "gelu"}),
        ("gemma4", {"use_bidirectional_attention": "all"}),
        ("gemma4", {"num_global_key_value_heads": 3}),
        ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma4", {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}),
        ("gemma4", {"per_layer_config": {"1": {"head_dim": 40}}}),
        ("gemma4", {"per_layer_config": {"0": {"head_dim": 40}, "1": {"head_dim": 40}, "3": {"head_dim": 40}}}),
        ("gemma4", {"per_layer_config": {"1": {"intermediate_size": 90}, "3": {"intermediate_size": 90}}}),
        ("gemma4", {"per_layer_config": {"9": {}}}),
        ("gemma4", {"per_layer_config": {"3": 40}}),
        ("qwen3", {"per_layer_config": {"1": {"rms_norm_eps": 0.5}}}),
        ("gemma4_shared", {"vocab_size_per_layer_input": 300}),
        ("gemma", {"hidden_act": "mish"}),
        ("gemma", {"hidden_activation": "gelu"}),
        ("gemma", {"use_bidirectional_attention": True}),
        ("glm4", {"hidden_act": "gelu"}),
        ("hunyuan", {"hidden_act": "gelu"}),
        ("hunyuan", {"use_qk_norm": False}),
        ("hunyuan", {"use_cla": True}),
        ("qwen2_moe", {"hidden_act": "gelu"}),
        ("glm4_moe", {"hidden_act": "gelu"}),
        ("glm4_moe", {"n_group": 2}),
        ("glm4_moe", {"topk_group": 2}),
        ("deepseek_v2", {"hidden_act": "gelu"}),
        ("deepseek_v2", {"norm_topk_prob": True}),
        ("deepseek_v2", {"scoring_func": "sigmoid"}),
        ("deepseek_v2", {"topk_method": "noaux_tc"}),
        ("deepseek_v2", {"moe_layer_freq": 2}),
        ("deepseek_v2", {"num_key_value_heads": 1}),
        ("deepseek_v2", {"mlp_bias": True}),
        ("minicpm3", {"mlp_bias": True}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("deepseek_v3", {"scoring_func": "softmax"}),
        ("deepseek_v3", {"topk_method": "greedy"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("youtu", {"rope_interleave": False}),
        ("solar_open", {"hidden_act": "gelu"}),
        ("solar_open", {"first_k_dense_replace": 1}),
        ("solar_open", {"use_qk_norm": True}),
        ("solar_open", {"n_group": 0}),
        ("dots1", {"hidden_act": "gelu"}),
        ("exaone_moe", {"hidden_act": "gelu"}),
        ("afmoe", {"hidden_act": "gelu"}),
        ("afmoe", {"attention_bias": True}),
        ("afmoe", {"score_func": "softmax"}),
        ("afmoe", {"route_norm": False}),
        ("apertus", {"hidden_act": "silu"}),
        ("minimax_m2", {"scoring_func": "softmax"}),
        ("minimax_m2", {"use_qk_norm": False}),
        ("minimax_m2", {"qk_norm_type": "per_head"}),
        ("minimax_m2", {"shared_intermediate_size": 40}),
        ("ernie4_5_moe", {"hidden_act": "gelu"}),
        ("ernie4_5_moe", {"use_bias": True}),
        ("ernie4_5_moe", {"moe_norm_min": 0.1}),
        ("cohere", {"use_qk_norm": True}),
        ("cohere2", {"use_qk_norm": True}),
        ("cohere2", {"use_parallel_block": False}),
        ("cohere2", {"sliding_window": None}),
        ("cohere2", {"logit_scale": 0.0}),
        ("gpt_neox", {"hidden_act": "mish"}),
        ("phi", {"hidden_act": "mish"}),
        ("phi", {"qk_layernorm": True}),
        ("gptj", {"activation_function": "mish"}),
        ("gptj", {"rotary_dim": None}),
        ("opt", {"activation_function": "mish"}),
        ("opt", {"do_layer_norm_before": False}),
        ("opt", {"layer_norm_elementwise_affine": False}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("opt", {"word_embed_proj_dim": 36}),
        ("stablelm", {"hidden_act": "gelu"}),
        ("stablelm", {"qk_layernorm": True}),
        ("gpt_bigcode", {"multi_query": False}),
        ("gpt_bigcode", {"scale_attn_weights": False}),
        ("gpt_bigcode", {"activation_function": "mish"}),
    ],
)
def test_what_changes_the_numbers_and_is_not_computed_is_refused(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    (key,) = changes
    with pytest.raises(ModelError, match=key):
        spec_of(tmp_path, {**CASES[name].config, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma4", {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ("gemma4", {"num_kv_shared_layers": 4}, "4 of 4 layers read"),
        ("gemma4", {"num_kv_shared_layers": 3}, "no layer stores the keys and values that layer 1 reads"),
        ("gemma4", {"num_kv_shared_layers": -1}, "-1 of 4 layers"),
        ("gemma4", {"global_head_dim": 1 << 30}, "head_dim is 1073741824"),
        ("gemma4", {"num_global_key_value_heads": 0}, "num_global_key_value_heads is 0"),
        ("gemma4", {"global_head_dim": 41}, "an even head_dim"),
        ("gemma4", {"num_hidden_layers": 1 << 40, "layer_types": None}, "num_layers is 1099511627776"),
        ("gemma4_shared", {"hidden_size_per_layer_input": 1 << 22}, "4194304 columns"),
        ("gemma4_moe", {"top_k_experts": 8}, "8 of 7 experts"),
        ("gemma4_moe", {"num_global_key_value_heads": 2}, "3 heads can't share 2"),
        ("gemma4_moe", {"num_global_key_value_heads": 0}, "num_kv_heads is 0"),
    ],
)
def test_sizes_of_gemma_4_that_can_not_be_are_errors(tmp_path: Path, name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, {**CASES[name].config, **changes})


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("deepseek_v2", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "grow with their position"),
        ("glm4_moe_lite", {"mlp_layer_types": None, "first_k_dense_replace": 2}, "first_k_dense_replace is 2"),
        ("deepseek_v2", {"kv_lora_rank": 0}, "KV rank of latent attention is 0"),
        ("deepseek_v2", {"q_lora_rank": -1}, "q_lora_rank is -1"),
        ("deepseek_v2", {"v_head_dim": 1 << 20}, "value width of latent attention is 1048576"),
        ("deepseek_v2", {"qk_rope_head_dim": 11}, "even head_dim, not 11"),
        ("deepseek_v3", {"n_group": 4}, "9 experts are not in 4 groups"),
        ("deepseek_v3", {"n_group": 0}, "n_group is 0"),
        ("deepseek_v3", {"topk_group": 4}, "4 experts of 4 of 3 groups of 3 can't be chosen"),
        ("deepseek_v3", {"topk_group": 1}, "4 experts of 1 of 3 groups of 3 can't be chosen"),
        ("deepseek_v3", {"n_group": 9, "topk_group": 4}, "4 experts of 4 of 9 groups of 1 can't be chosen"),
        ("deepseek_v3", {"qk_nope_head_dim": 21}, "keys of latent attention have 21 columns"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types does not say for 3 layers"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", "sparse", 7]}, "mlp_layer_types does not say for 3 layers"),
    ],
)
def test_sizes_of_latent_attention_that_can_not_be_are_errors(
    tmp_path: Path, name: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        spec_of(tmp_path, {**CASES[name].config, **changes})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention.kv_lora_rank": 0}, "KV rank of latent attention is 0"),
        ({"attention.key_length_mla": 12}, "key width of latent attention is 0"),
        ({"expert_gating_func": 3}, "expert_gating_func is 3"),
        ({"expert_group_count": 2}, "9 experts are not in 2 groups"),
        ({"nextn_predict_layers": 2}, "nextn_predict_layers is 2"),
        ({"rope.scaling.yarn_log_multiplier": None}, "has no deepseek2.rope.scaling.yarn_log_multiplier"),
        ({"rope.dimension_count": 11}, "even head_dim, not 11"),
        ({"attention.temperature_scale": 0.1}, "queries grow with their position"),
    ],
)
def test_settings_of_latents_in_a_gguf_file_that_can_not_be_are_errors(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    case = CASES["deepseek_v3_gguf"]
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, **changes})
    with pytest.raises(ModelError, match=words):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


@pytest.mark.parametrize("dim", [-1, 26, 10**400], ids=["fewer than none", "too many", "far too many"])
def test_columns_that_heads_of_minimax_m2_lack_can_not_rotate(tmp_path: Path, dim: int) -> None:
    with pytest.raises(ModelError, match="partial_rotary_factor"):
        spec_of(tmp_path, {**CASES["minimax_m2"].config, "rope_parameters": None, "rotary_dim": dim})


def test_a_minicpm_3_without_factors_has_none(tmp_path: Path) -> None:
    config = {key: value for key, value in CASES["minicpm3"].config.items() if key != "v_head_dim"}
    spec = spec_of(tmp_path, {**config, "scale_depth": None, "dim_model_base": None})
    latent = spec.attentions[0].latent
    assert latent is not None
    assert (spec.residual_scale, spec.logit_scale, latent.value_dim) == (1.0, 1.0, 24)


def test_without_its_key_queries_have_the_two_projections_of_transformers_default(tmp_path: Path) -> None:
    config = {key: value for key, value in CASES["deepseek_v3"].config.items() if key != "q_lora_rank"}
    for found, rank in ((config, 1536), ({**config, "q_lora_rank": None}, 0)):
        latent = spec_of(tmp_path, found).attentions[0].latent
        assert latent is not None
        assert latent.query_rank == rank


@pytest.mark.parametrize("name", ["gemma4_gguf", "gpt_oss_gguf", "cohere2_gguf"])
def test_local_layers_of_a_gguf_file_need_a_window(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "attention.sliding_window": 0})
    with pytest.raises(ModelError, match="window of attention is 0"):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


@pytest.mark.parametrize(("period", "words"), [(None, "missing"), (0, "0")])
def test_a_gemma_4_in_a_gguf_file_names_its_local_layers(tmp_path: Path, period: int | None, words: str) -> None:
    case = CASES["gemma4_gguf"]
    assert case.gguf is not None
    key = "attention.sliding_window_pattern"
    metadata = {name: value for name, value in {**case.gguf.metadata, key: period}.items() if value is not None}
    with pytest.raises(ModelError, match=f"gemma4.{key} is {words}"):
        load_gguf(write_case(replace(case, gguf=replace(case.gguf, metadata=metadata)), tmp_path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lfm2", "a recurrent state"),
        ("mamba2", "a recurrent state"),
        ("falcon_h1", "a recurrent state"),
        ("deepseek_v2", "latent attention"),
        ("gemma2", "a cap of attention scores"),
        ("afmoe", "gated attention"),
        ("gemma4_shared", "layers that read the keys and values of another layer"),
    ],
)
def test_layers_of_generation_alone_are_refused_for_embeddings(tmp_path: Path, name: str, words: str) -> None:
    path = write_case(CASES[name], tmp_path / "model")
    with pytest.raises(ModelError, match=f"config.json: models with {words} are not supported for embeddings") as error:
        load_hf_directory(path, task="embed")
    assert "--task generate" in error.value.remedy


def test_layers_of_generation_alone_are_refused_for_embeddings_in_gguf_files_too(tmp_path: Path) -> None:
    path = write_case(CASES["lfm2_gguf"], tmp_path)
    with pytest.raises(ModelError, match=f"{path.name}: models with a recurrent state are not supported for embeddings"):
        load_gguf(path, task="embed")


def test_layers_of_gemma_4_that_keep_nothing_are_computed_for_samples_alone(tmp_path: Path) -> None:
    """Three of six layers read the keys and values of others: a prompt goes through the first three."""
    ops = describe(load_hf_directory(write_case(CASES["gemma4_shared"], tmp_path / "shared")).spec).ops
    first_gather = next(at for at, op in enumerate(ops) if isinstance(op, GatherRows))
    attentions = [at for at, op in enumerate(ops) if isinstance(op, Attention)]
    assert sum(at < first_gather for at in attentions) == sum(isinstance(op, KvWrite) for op in ops) == 3
    assert len(attentions) == 6


@pytest.mark.parametrize("name", ["gemma4", "gemma4_keys_as_values", "gemma4_moe", "gemma4_unified"])
@pytest.mark.parametrize("others", [{}, {"global_head_dim": 26, "num_global_key_value_heads": 2}])
def test_gemma_4_as_release_5_of_transformers_saves_it_is_the_same(tmp_path: Path, name: str, others: dict[str, int]) -> None:
    """It writes sizes of layers in place of two older keys, which do not count beside them."""
    config = CASES[name].config
    sizes = {"head_dim": config["global_head_dim"]}
    if "num_global_key_value_heads" in config:
        sizes["num_key_value_heads"] = config["num_global_key_value_heads"]
    own = {f"{layer:02}": sizes for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"}
    kept = {key: value for key, value in config.items() if "global" not in key}
    assert spec_of(tmp_path, {**kept, **others, "per_layer_config": own}) == spec_of(tmp_path, config)


def test_layers_of_gemma_4_without_sizes_of_their_own_are_as_the_others(tmp_path: Path) -> None:
    """Release 5 of transformers leaves out sizes that are as in other layers."""
    config = CASES["gemma4"].config
    kept = {key: value for key, value in config.items() if "global" not in key}
    wanted = spec_of(tmp_path, {**kept, "global_head_dim": config["head_dim"]})
    assert spec_of(tmp_path, {**kept, "per_layer_config": {}}) == wanted


@pytest.mark.parametrize(
    "name",
    ["arcee", "cohere", "ernie4_5", "glm4", "granite", "helium", "llama_biases", "nemotron", "qwen3", "seed_oss", "smollm3"],
)
def test_biases_that_settings_tell_of_are_those_of_the_weights(tmp_path: Path, name: str) -> None:
    """Without weights a description believes the settings; with weights that lack such biases, the model is refused."""
    case = CASES[name]
    path = write_case(case, tmp_path / name)
    assert {(layer.attention, layer.mlp) for layer in read_hf_spec(path).layers} == {
        (layer.attention, layer.mlp) for layer in load_hf_directory(path).spec.layers
    }
    biases = {shape for shape in case.shapes if shape.endswith("_proj.bias")}
    assert biases or not case.config.get("attention_bias")
    shapes = {key: shape for key, shape in case.shapes.items() if key not in biases}
    of_qkv, of_all = ("qkv_bias", "use_qkv_bias"), ("enable_bias", "use_bias")
    keys = ("attention_bias", "attention_out_bias", "mlp_bias", *of_qkv, *of_all)
    for key in keys:
        told = replace(case, config={**case.config, **dict.fromkeys(keys, False), key: True}, shapes=shapes)
        path = write_case(told, tmp_path / key)
        layer = read_hf_spec(path).layers[0]
        assert layer.attention.has_qkv_bias == (key in ("attention_bias", *of_qkv, *of_all))
        assert layer.mlp.has_bias == (key in ("mlp_bias", *of_all))
        with pytest.raises(ModelError, match=f"{key} is True, but the weights lack "):
            load_hf_directory(path)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("ernie4_5", "use_bias"),
        ("glm4_moe", "attention_bias"),
        ("gpt_neox", "attention_bias"),
        ("nemotron", "mlp_bias"),
        ("opt", "enable_bias"),
        ("qwen2_moe", "qkv_bias"),
        ("stablelm", "use_qkv_bias"),
    ],
)
def test_biases_that_a_setting_rules_out_are_refused(tmp_path: Path, name: str, key: str) -> None:
    """transformers leaves them out, so they would give other numbers."""
    case = CASES[name]
    path = write_case(replace(case, config={**case.config, key: False}), tmp_path)
    with pytest.raises(ModelError, match=f"{key} is False, but the weights include layers.0."):
        load_hf_directory(path)


def test_of_an_old_key_and_a_new_one_the_new_one_counts() -> None:
    for values in ({"old": 1, "new": 2}, {"new": 2, "old": 1}):
        assert with_defaults(values, {"new": 3, "other": 4}, {"old": "new"}) == {"new": 2, "other": 4}


def test_layers_behind_the_last_are_left_out_of_models_that_have_such_alone(tmp_path: Path) -> None:
    case = CASES["llama_biases"]
    path = write_case(replace(case, config={**case.config, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}), tmp_path)
    with pytest.raises(ModelError, match="not part of this architecture"):
        load_hf_directory(path)


def test_a_layer_with_a_number_of_many_digits_is_refused(tmp_path: Path) -> None:
    case = CASES["glm4_moe"]
    shapes = {**case.shapes, f"model.layers.{'9' * 4400}.input_layernorm.weight": (72,)}
    path = write_case(replace(case, config={**case.config, "num_nextn_predict_layers": 1}, shapes=shapes), tmp_path)
    with pytest.raises(ModelError, match="not part of this architecture"):
        load_hf_directory(path)


def test_phi_3_of_old_names_has_long_factors(tmp_path: Path) -> None:
    """`yarn` was longrope in its first files, and `su` in the next."""
    config = CASES["phi4_mini"].config
    specs = [
        spec_of(tmp_path, {**config, "rope_scaling": None, key: {**config["rope_scaling"], "type": None, kind: name}})
        for key, kind in (("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type"))
        for name in ("longrope", "su", "yarn")
    ]
    assert len(set(specs)) == 1
    rotation = specs[0].layers[0].attention.rotation
    assert rotation is not None
    assert len(rotation.inv_freq) == 9


def test_a_hunyuan_without_alpha_has_the_dynamic_rotation_of_all_models(tmp_path: Path) -> None:
    config = changed(CASES["hunyuan"], rope_parameters=None, rope_theta=3000.0)
    stretched = {"type": "dynamic", "factor": 1.0, "alpha": 7.0}
    assert spec_of(tmp_path, {**config, "rope_scaling": stretched}) == spec_of(tmp_path, dict(CASES["hunyuan"].config))
    rotation = spec_of(tmp_path, {**config, "rope_scaling": {**stretched, "alpha": None}}).layers[0].attention.rotation
    assert rotation is not None
    assert rotation.inv_freq[1] == pytest.approx(3000 ** (-2 / 24))


def test_a_glm_4_of_pictures_in_a_gguf_file_is_refused(tmp_path: Path) -> None:
    case = CASES["glm4_gguf"]
    assert case.gguf is not None
    for key, value in (("rope.dimension_sections", [4, 4, 4, 0]), ("nextn_predict_layers", 1)):
        gguf = replace(case.gguf, metadata={**case.gguf.metadata, key: value})
        with pytest.raises(ModelError, match=key):
            load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


@pytest.mark.parametrize(("key", "value"), [("alpha", 2.0), ("yarn_attn_factor", 1.2), ("yarn_attn_factor", math.nan)])
def test_factors_of_rotations_that_llama_cpp_does_not_compute_are_refused(tmp_path: Path, key: str, value: float) -> None:
    """The case itself has the `yarn_attn_factor` that llama.cpp computes."""
    case = CASES["olmo3_gguf"]
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, f"rope.scaling.{key}": value})
    with pytest.raises(ModelError, match=key):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


@pytest.mark.parametrize("name", ["gemma3_gguf", "gemma4_gguf"])
@pytest.mark.parametrize("base", [-10000.0, 1.0, math.inf, math.nan])
def test_a_base_of_windows_that_gives_no_frequencies_is_refused(tmp_path: Path, name: str, base: float) -> None:
    case = CASES[name]
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "rope.freq_base_swa": base})
    with pytest.raises(ModelError, match="freq_base_swa is"):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path))


def test_a_cohere_turns_at_the_base_of_its_release_if_it_names_none(tmp_path: Path) -> None:
    for name, base in (("cohere", 500_000), ("cohere2", 10_000)):
        rotation = spec_of(tmp_path, changed(CASES[name], rope_parameters=None)).layers[0].attention.rotation
        assert rotation is not None
        assert rotation.inv_freq[1] == pytest.approx(base ** (-2 / 24))


def test_a_cohere_2_that_names_no_types_has_a_period_of_four(tmp_path: Path) -> None:
    config = changed(CASES["cohere2"], layer_types=None, num_hidden_layers=8)
    for period, told in ((4, {}), (2, {"sliding_window_pattern": 2})):
        layers = spec_of(tmp_path, {**config, **told}).layers
        assert [layer.attention.window for layer in layers] == [*[6] * (period - 1), 0] * (8 // period)
        assert all((layer.attention.rotation is None) == (layer.attention.window == 0) for layer in layers)


def test_an_exaone_4_without_windows_turns_in_all_layers(tmp_path: Path) -> None:
    config = CASES["exaone4"].config
    spec = spec_of(tmp_path, {**config, "sliding_window": None})
    assert all(layer.attention.rotation and not layer.attention.window for layer in spec.layers)
    usual = spec_of(tmp_path, {**config, "layer_types": None, "num_hidden_layers": 8})
    assert [layer.attention.window for layer in usual.layers] == [6, 6, 6, 0] * 2
    assert [layer.attention.rotation is None for layer in usual.layers] == [False, False, False, True] * 2


def test_an_exaone_4_of_32b_has_a_letter_for_each_layer_of_a_period(tmp_path: Path) -> None:
    """The published file says so, beside `layer_types`."""
    config = {**CASES["exaone4"].config, "sliding_window_pattern": "LLG", "num_hidden_layers": 4}
    spec = spec_of(tmp_path, {**config, "layer_types": None})
    assert [layer.attention.window for layer in spec.layers] == [6, 6, 0, 6]
    told = spec_of(tmp_path, {**config, "layer_types": ["full_attention", *["sliding_attention"] * 3]})
    assert [layer.attention.window for layer in told.layers] == [0, 6, 6, 6]
    for pattern in ("", "LXG"):
        with pytest.raises(ModelError, match="sliding_window_pattern"):
            spec_of(tmp_path, {**config, "layer_types": None, "sliding_window_pattern": pattern})


def test_a_base_that_a_file_leaves_out_is_that_of_transformers(tmp_path: Path) -> None:
    for name, base in (("ernie4_5", 5e5), ("mixtral", 1e6), ("smollm3", 2e6)):
        config = changed(CASES[name], rope_parameters=None, rope_theta=None)
        rotation = spec_of(tmp_path, config).layers[0].attention.rotation
        assert rotation is not None
        assert rotation.inv_freq[1] == pytest.approx(base ** (-2 / 24))
    for name in ("ernie4_5", "gemma", "smollm3"):
        assert spec_of(tmp_path, changed(CASES[name], tie_word_embeddings=None)).tie_word_embeddings


def test_a_starcoder_2_in_a_gguf_file_has_the_window_of_all(tmp_path: Path) -> None:
    case = CASES["starcoder2_gguf"]
    assert case.gguf is not None
    without = replace(case.gguf, metadata={"attention.layer_norm_epsilon": 1e-5})
    spec = load_gguf(write_case(replace(case, gguf=without), tmp_path)).spec
    assert {layer.attention.window for layer in spec.layers} == {4096}


def test_old_files_of_falcon_40b_say_by_their_heads_that_it_is_the_newer_one(tmp_path: Path) -> None:
    config = CASES["falcon_40b"].config
    old = {key: value for key, value in config.items() if key not in ("num_kv_heads", "new_decoder_architecture")}
    old |= {"architectures": ["RWForCausalLM"], "model_type": "RefinedWeb", "n_head_kv": 2}
    assert spec_of(tmp_path, old) == spec_of(tmp_path, dict(config))
    with pytest.raises(ModelError, match=r"layers\.0\.q is 0 x 72"):  # three heads do not share the rows evenly
        load_hf_directory(write_case(replace(CASES["falcon_40b"], old_config={**old, "n_head_kv": 3}), tmp_path))


def test_a_falcon_2_in_a_gguf_file_needs_the_base_of_its_rotation(tmp_path: Path) -> None:
    case = CASES["falcon_40b_gguf"]
    shapes = {name: shape for name, shape in case.shapes.items() if "ln_attn" not in name}
    assert load_gguf(write_case(replace(case, shapes=shapes), tmp_path / "told")).spec.layers[0].has_attn_norm is False
    assert case.gguf is not None
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "rope.freq_base": None})
    with pytest.raises(ModelError, match=r"falcon\.rope\.freq_base is missing"):
        load_gguf(write_case(replace(case, shapes=shapes, gguf=gguf), tmp_path))


def test_old_files_of_gpt_neox_hold_masks_and_another_name_of_the_output(tmp_path: Path) -> None:
    case = CASES["gpt_neox"]
    weights = dict(case.weights())
    weights["embed_out.weight"] = weights.pop("lm_head.weight")
    weights["gpt_neox.layers.0.attention.bias"] = np.ones((1, 1, 64, 64), np.float32)
    weights["gpt_neox.layers.0.attention.masked_bias"] = np.float32([-1e9])
    write_hf_files(tmp_path, case.config, weights, case.vocab_size)
    assert np.array_equal(load_hf_directory(tmp_path).weights["output"].dequantize(), weights["embed_out.weight"])


def test_a_gpt_neox_is_parallel_and_turns_a_quarter_of_its_heads_unless_its_file_says_otherwise(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, changed(CASES["gpt_neox"], rotary_pct=None, rotary_emb_base=None))
    rotation = spec.layers[0].attention.rotation
    assert rotation is not None
    assert rotation.inv_freq == pytest.approx([10_000 ** (-pair / 3) for pair in range(3)])
    assert spec.has_parallel_halves
    case = CASES["gpt_neox_gguf"]
    assert case.gguf is not None
    for told in (True, False):
        gguf = replace(case.gguf, metadata={**case.gguf.metadata, "use_parallel_residual": told})
        assert load_gguf(write_case(replace(case, gguf=gguf), tmp_path / str(told))).spec.has_parallel_halves is told
    gguf = replace(case.gguf, metadata={**case.gguf.metadata, "use_parallel_residual": None})
    with pytest.raises(ModelError, match=r"no gptneox\.use_parallel_residual"):
        load_gguf(write_case(replace(case, gguf=gguf), tmp_path / "untold"))


@pytest.mark.parametrize("name", ["gpt2", "gpt_bigcode", "gpt_neox", "opt", "stablelm"])
def test_a_decoder_of_old_names_reads_texts(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    whole = load_hf_directory(write_case(case, tmp_path / "whole"), task="embed")
    stem = {"gpt2": "transformer.", "gpt_bigcode": "transformer.", "gpt_neox": "gpt_neox."}.get(name, "model.")
    weights = {key.removeprefix(stem): values for key, values in case.weights().items() if key != "lm_head.weight"}
    write_hf_files(tmp_path, case.config, weights, case.vocab_size)  # as `AutoModel` saves them
    alone = load_hf_directory(tmp_path, task="embed")
    assert alone.weights.keys() == whole.weights.keys()
    assert alone.spec == whole.spec


def test_apertus_cuts_negative_inputs_by_too_little_to_matter(tmp_path: Path) -> None:
    """Published files have the number, which is left out, and all numbers of the activation as scalars or lists of one."""
    case = CASES["apertus"]
    weights = case.weights()
    for layer in range(2):
        weights[f"model.layers.{layer}.mlp.act_fn.eps"] = np.array(-1e-6, np.float32)
    write_hf_files(tmp_path, case.config, weights, case.vocab_size)
    model = load_hf_directory(tmp_path)
    assert not any(name.endswith("eps") for name in model.weights)
    assert {model.weights[f"layers.1.act_{name}"].dequantize().shape for name in ("p", "n", "beta")} == {(1, 1)}
