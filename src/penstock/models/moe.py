"""Mixtures of experts: a layer has many small MLPs, and a router chooses a few of them for each token.

Sources: arXiv 2401.04088 (Mixtral), 2407.10671 (Qwen 2), 2409.02060 (OLMoE), 2505.09388 (Qwen 3), 2508.06471 (GLM 4.5) and
2508.10925 (gpt-oss); modeling_NAME.py of transformers; openai-moe.cpp, qwen2moe.cpp, glm4-moe.cpp, minimax-m2.cpp,
ernie4-5-moe.cpp and conversion/gpt_oss.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import checks, gemma, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Head, HeadLayer, Parts, with_defaults
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile
from penstock.models.layers import (
    GGUF_EXPERTS,
    dense_layers_of_hf,
    experts_of_gguf,
    experts_of_hf,
    local_layers,
    local_layers_of_gguf,
    read_gguf_experts,
    sigmoid_experts_of_hf,
    with_both_sides,
    with_experts,
    with_local_layers,
    with_windows,
)
from penstock.models.program import Program
from penstock.types.model_spec import ExpertsMlp, LayerSpec, ModelSpec

_GATE_UP, _DOWN = Parts(("expert_gate", "expert_up")), Parts(("expert_down",))
_CUBES: Mapping[str, Parts] = {"experts.gate_up_proj": _GATE_UP, "experts.down_proj": _DOWN}
"""Release 5 of transformers puts the matrices of all experts of a layer into one tensor."""
EXPERTS: Mapping[str, str | Parts] = {
    **{f"experts.*.{name}_proj.weight": f"expert_{name}" for name in ("gate", "up", "down")},
    **_CUBES,
}
"""Quantised files have a matrix for each expert, also those of models published with one tensor."""
GATE_UP_DOWN: Mapping[str, str | Parts] = {
    "mlp.gate.weight": "router",
    **{f"mlp.{name}": ours for name, ours in EXPERTS.items()},
}
SHARED: Mapping[str, str] = {
    f"mlp.shared_expert{plural}.{name}_proj.weight": f"shared_{name}" for plural in ("", "s") for name in ("gate", "up", "down")
}
_GGUF_LAYER: Mapping[str, str | Parts] = {**GGUF_LAYER, **GGUF_EXPERTS}


def _of_mixtral(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    spec = with_local_layers(spec, config.get("sliding_window", int), [True] * spec.num_layers, config.path)
    return experts_of_hf(config, spec, width="intermediate_size")


def _of_qwen3_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Put experts into every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    config.only("hidden_act", "silu")
    window = config.require("sliding_window", int) if config.get("use_sliding_window", bool) else None
    return of_qwen(config, with_local_layers(spec, window, [True] * spec.num_layers, config.path))


def of_qwen(config: JsonFile, spec: ModelSpec, **others: Any) -> ModelSpec:
    step, only = config.get("decoder_sparse_step", int) or 1, config.get("mlp_only_layers", list) or []
    dense = [i for i in range(spec.num_layers) if i in only or (i + 1) % step]
    others["is_renormalised"] = config.get("norm_topk_prob", bool) or False
    return experts_of_hf(config, spec, width="moe_intermediate_size", dense=dense, **others)


def _of_qwen2_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Add windows to every other one of the first `max_window_layers`, unless `layer_types` names the layers."""
    config.only("hidden_act", "silu")
    if config.get("use_sliding_window", bool):
        most = config.get("max_window_layers", int)
        usual = [i % 2 == 0 and i < (28 if most is None else most) for i in range(spec.num_layers)]
        spec = with_windows(config, spec, config.require("sliding_window", int), usual)
    width = config.require("shared_expert_intermediate_size", int)
    return of_qwen(config, spec, shared_size=width, has_shared_gate=True)


def _of_qwen2_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the experts' keys. Shares are never divided by their sum, as in llama.cpp."""
    width = file.get("qwen2moe.expert_shared_feed_forward_length", int) or file.require("qwen2moe.feed_forward_length", int)
    return experts_of_gguf(file, spec, is_renormalised=False, shared_size=width, has_shared_gate=True)


def _mellum_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "sliding_window": 1024,
        "norm_topk_prob": True,
        "first_k_dense_replace": 0,
        **values,
    }
    if not values.get("rope_parameters"):
        bases = {"full_attention": 5e5, "sliding_attention": 1e4}
        turns = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
        found["rope_parameters"] = turns if values.get("layer_types") else turns["full_attention"]
    return found


def _of_mellum(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    spec = with_windows(config, spec, config.require("sliding_window", int), [False] * spec.num_layers)
    dense = dense_layers_of_hf(config, spec)
    is_renormalised = config.require("norm_topk_prob", bool)
    return experts_of_hf(config, spec, width="moe_intermediate_size", dense=dense, is_renormalised=is_renormalised)


def _of_qwen3_vl_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", norm_topk_prob=True, use_sliding_window=False)
    return of_qwen(config, spec)


def _of_olmoe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", clip_qkv=None)
    is_renormalised = config.get("norm_topk_prob", bool) or False
    return experts_of_hf(config, spec, width="intermediate_size", is_renormalised=is_renormalised)


MIXTRAL = Architecture(
    describe=llama.describe,
    of_hf=_of_mixtral,
    hf_values=lambda values: {"rope_theta": 1e6, **values},
    hf_layer={
        **HF_LAYER,
        **GATE_UP_DOWN,
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.*.w1.weight": "expert_gate",
        "block_sparse_moe.experts.*.w3.weight": "expert_up",
        "block_sparse_moe.experts.*.w2.weight": "expert_down",
        **{f"block_sparse_moe.{name}": ours for name, ours in EXPERTS.items()},
    },
)
"""Mixtral has no GGUF name of its own: its files say `llama`."""
QWEN3_MOE = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_qwen3_moe,
    of_gguf=llama.of_gguf,
    hf_layer={**HF_LAYER, **GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
MELLUM = replace(
    QWEN3_MOE,
    of_hf=_of_mellum,
    hf_values=_mellum_values,
)
"""Mellum 2 (JetBrains): Qwen 3 MoE with windows and dense layers by lists."""
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    of_hf=_of_qwen3_vl_moe,
    hf_values=lambda values: {"rope_theta": 5e5, "norm_topk_prob": True, **values},
    hf_layer={
        **QWEN3_MOE.hf_layer,
        **{f"mlp.{name}": replace(parts, may_be_transposed=True) for name, parts in _CUBES.items()},
    },
)
"""The text part. Published expert tensors have inputs as rows. GGUF files and transformers 5.24 have outputs as rows."""
QWEN2_MOE = Architecture(
    describe=llama.describe,
    of_hf=_of_qwen2_moe,
    of_gguf=_of_qwen2_moe_gguf,
    hf_values=lambda values: {"qkv_bias": True, **values},
    hf_layer={**HF_LAYER, **GATE_UP_DOWN, **SHARED, "mlp.shared_expert_gate.weight": "shared_router"},
    gguf_layer=_GGUF_LAYER,
)
OLMOE = Architecture(
    describe=partial(llama.describe, qk_norms="rows"),
    of_hf=_of_olmoe,
    of_gguf=partial(experts_of_gguf, is_renormalised=False),
    hf_layer={**HF_LAYER, **GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
FLEX_OLMO = Architecture(
    describe=partial(llama.describe, norms="behind", qk_norms="rows"),
    of_hf=_of_olmoe,
    hf_values=lambda values: {"rope_theta": 5e5, **values},
    hf_layer={**gemma.OLMO2.hf_layer, **GATE_UP_DOWN},
)
"""FlexOlmo (Ai2; arXiv 2507.07024): OLMo 2 with experts."""
GRANITE_MOE = Architecture(
    describe=llama.describe,
    of_hf=lambda config, spec: experts_of_hf(config, llama.of_granite_hf(config, spec), width="intermediate_size"),
    of_gguf=llama.of_granite_gguf,
    hf_values=llama.granite_values,
    hf_layer={
        **HF_LAYER,
        "block_sparse_moe.router.layer.weight": "router",
        "block_sparse_moe.input_linear.weight": _GATE_UP,
        "block_sparse_moe.output_linear.weight": _DOWN,
        "block_sparse_moe.router.weight": "router",
        **{f"block_sparse_moe.{name}": ours for name, ours in EXPERTS.items()},
    },
    gguf_layer=_GGUF_LAYER,
    is_interleaved_in_gguf=True,
)


def _of_granite_shared(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    size = config.get("shared_intermediate_size", int) or 0
    return experts_of_hf(config, llama.of_granite_hf(config, spec), width="intermediate_size", shared_size=size)


GRANITE_MOE_SHARED = replace(
    GRANITE_MOE,
    of_hf=_of_granite_shared,
    hf_layer={
        **GRANITE_MOE.hf_layer,
        "shared_mlp.input_linear.weight": Parts(("shared_gate", "shared_up")),
        "shared_mlp.output_linear.weight": "shared_down",
    },
)
GRANITE_MOE_SWA = replace(
    GRANITE_MOE_SHARED,
    of_hf=lambda config, spec: llama.with_granite_windows(config, _of_granite_shared(config, spec)),
    hf_values=llama.granite_swa_values,
    hf_layer={**GRANITE_MOE_SHARED.hf_layer, "self_attn.sinks": "sinks"},
)


# Hunyuan A13B (Tencent): the attention of its dense models, and a shared expert as wide as the others.

_HUNYUAN_LISTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "num_shared_expert")


def _hunyuan_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with lists of equal numbers replaced by the number. Other lists are refused later."""
    found = with_defaults(llama.hunyuan_values(values), {}, {"moe_topk": "num_experts_per_tok"})
    for key in _HUNYUAN_LISTS:
        match found.get(key):
            case [first, *others] if all(other == first for other in others):
                found[key] = first
    return found


def _of_hunyuan_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    width = config.require("intermediate_size", int)
    config.only_all(hidden_act="silu", use_qk_norm=True, use_cla=False, num_shared_expert=1, moe_intermediate_size=width)
    config.only("moe_layer_num_skipped", 0)
    return experts_of_hf(config, spec, width="intermediate_size", shared_size=width)


HUNYUAN_MOE = Architecture(
    describe=llama.HUNYUAN.describe,
    of_hf=_of_hunyuan_moe,
    hf_values=_hunyuan_values,
    hf_layer={
        **llama.HUNYUAN.hf_layer,
        **GATE_UP_DOWN,
        "mlp.gate.wg.weight": "router",
        **{f"mlp.shared_mlp.{name}_proj.weight": f"shared_{name}" for name in ("gate", "up", "down")},
    },
)


# GLM 4.5 (Z.ai): sigmoid scores, shared experts, dense layers first. Multi-token-prediction layers follow the last.

_GLM4_DEFAULTS = {
    "partial_rotary_factor": 0.5,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


def _describe_glm4(spec: ModelSpec) -> Program:
    return llama.describe(spec, qk_norms="heads" if spec.attentions[0].has_qk_norms else None)


def _of_glm4_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", n_group=1, topk_group=1)
    mixed = sigmoid_experts_of_hf(config, spec, range(config.require("first_k_dense_replace", int)))
    return mixed.with_attention_fields(has_qk_norms=config.get("use_qk_norm", bool) or False)


def _of_glm4_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the keys of experts. Without `expert_weights_norm` shares are not divided by their sum, as in llama.cpp."""
    if any(file.get_list("glm4moe.rope.dimension_sections", int)):
        raise checks.unsupported(file.path, "glm4moe.rope.dimension_sections is set", "text-only models are")
    if (value := file.get("glm4moe.expert_group_count", int) or 1) != 1:
        raise checks.unsupported(file.path, f"glm4moe.expert_group_count is {value}", "1 is")
    mlp = read_gguf_experts(
        file,
        scoring="sigmoid",
        is_renormalised=file.get("glm4moe.expert_weights_norm", bool) or False,
        has_selection_bias=True,
        num_shared=file.require("glm4moe.expert_shared_count", int),
    )
    dense = range(file.get("glm4moe.leading_dense_block_count", int) or 0)
    has_qk_norms = "blk.0.attn_q_norm.weight" in file.tensors
    return with_experts(spec, mlp, file.path, dense=dense).with_attention_fields(has_qk_norms=has_qk_norms)


GLM4_MOE = Architecture(
    describe=_describe_glm4,
    of_hf=_of_glm4_moe,
    of_gguf=_of_glm4_moe_gguf,
    hf_values=lambda values: with_defaults(values, _GLM4_DEFAULTS, {"n_routed_experts": "num_local_experts"}),
    hf_layer={**HF_LAYER, **GATE_UP_DOWN, **SHARED, "mlp.gate.e_score_correction_bias": "selection_bias"},
    gguf_layer={**_GGUF_LAYER, "post_attention_norm.weight": "mlp_norm"},
    has_further_layers=True,
    has_partial_rope=True,
)


# MiniMax M2: norms of whole rows of q and k, partial RoPE, and a sigmoid router.

_M2_SCORES: Mapping[str, Any] = {"scoring": "sigmoid", "has_selection_bias": True}


def _m2_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5e6, "rms_norm_eps": 1e-6, **values}
    dim, head_dim = found.get("rotary_dim"), found["head_dim"]
    if type(dim) is int and type(head_dim) is int and head_dim > 0:
        found = {"partial_rotary_factor": max(0, min(dim, 2 * head_dim)) / head_dim, **found}
    return found


def _of_m2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", scoring_func="sigmoid", shared_intermediate_size=0, use_qk_norm=True)
    config.only("qk_norm_type", "per_layer")
    return experts_of_hf(config, spec, width="intermediate_size", **_M2_SCORES)


MINIMAX_M2 = Architecture(
    describe=partial(llama.describe, qk_norms="rows"),
    of_hf=_of_m2,
    of_gguf=partial(experts_of_gguf, **_M2_SCORES),
    hf_values=_m2_values,
    hf_layer={**MIXTRAL.hf_layer, **{f"{at}.e_score_correction_bias": "selection_bias" for at in ("mlp", "block_sparse_moe")}},
    gguf_layer=_GGUF_LAYER,
    has_partial_rope=True,
)


# ERNIE 4.5 (Baidu): a softmax router with biases that affect only the choice. Some layers are dense.

_ERNIE_DEFAULTS = {
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}
_ERNIE_NAMES = {"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"}


def _of_ernie4_5_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", use_bias=False, moe_norm_min=1e-12)
    first, last, step = (config.require(f"moe_layer_{name}", int) for name in ("start_index", "end_index", "interval"))
    if step < 1:
        raise config.error(f"moe_layer_interval is {step}")
    mixed = range(first, spec.num_layers if last == -1 else last + 1)
    return experts_of_hf(
        config,
        spec,
        width="moe_intermediate_size",
        dense=[i for i in range(spec.num_layers) if i not in mixed or (i + 1) % step],
        has_selection_bias=True,
        shared_size=config.require("moe_intermediate_size", int) * config.require("moe_num_shared_experts", int),
    )


def _of_ernie4_5_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = "ernie4_5-moe"
    step, first = file.require(f"{key}.interleave_moe_layer_step", int), file.get(f"{key}.leading_dense_block_count", int) or 0
    if step < 1:
        raise file.error(f"{key}.interleave_moe_layer_step is {step}")
    num_shared = file.get(f"{key}.expert_shared_count", int) or 0
    mlp = read_gguf_experts(file, has_selection_bias=True, num_shared=num_shared)
    dense = [i for i in range(spec.num_layers) if i < first or (i + 1) % step]
    return with_experts(spec, mlp, file.path, dense=dense)


ERNIE4_5_MOE = Architecture(
    describe=llama.describe,
    of_hf=_of_ernie4_5_moe,
    of_gguf=_of_ernie4_5_moe_gguf,
    hf_values=lambda values: with_defaults(values, _ERNIE_DEFAULTS, _ERNIE_NAMES),
    hf_layer={
        **HF_LAYER,
        **GATE_UP_DOWN,
        **SHARED,
        **{f"mlp.{at}moe_statics.e_score_correction_bias": "selection_bias" for at in ("", "gate.")},
    },
    gguf_layer=_GGUF_LAYER,
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
)


# gpt-oss (OpenAI): experts with biases and a clamped SwiGLU, sinks in the softmax, windows in every other layer

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GPT_OSS_DEFAULTS = {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128}


def _of_gpt_oss(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _gpt_oss_of_hf(config, spec, local_layers(spec))


def _gpt_oss_of_hf(config: JsonFile, spec: ModelSpec, is_local: Sequence[bool]) -> ModelSpec:
    config.only_all(hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)
    spec = experts_of_hf(config, spec, width="intermediate_size")
    spec = with_windows(config, spec, config.require("sliding_window", int), is_local)
    has_bias = config.get("attention_bias", bool) is not False
    spec = spec.with_attention_fields(has_qkv_bias=has_bias, has_o_bias=has_bias)
    return _with_gpt_oss(spec)


def _of_gpt_oss_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("gpt-oss.attention.sliding_window", int)
    spec = experts_of_gguf(file, spec)
    return _with_gpt_oss(with_local_layers(spec, window, local_layers_of_gguf(file, spec), file.path))


def _with_gpt_oss(spec: ModelSpec) -> ModelSpec:
    def own(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, ExpertsMlp)
        mlp = replace(layer.mlp, activation="swiglu_clamped", has_router_bias=True, has_bias=True)
        return replace(layer, mlp=mlp, mixer=replace(layer.attention, has_sinks=True))

    return spec.with_layers(own)


GPT_OSS = Architecture(
    describe=llama.describe,
    of_hf=_of_gpt_oss,
    of_gguf=_of_gpt_oss_gguf,
    hf_values=partial(llama.values_with_rope, defaults=_GPT_OSS_DEFAULTS, rope=_YARN),
    hf_layer={
        **HF_LAYER,
        "self_attn.sinks": "sinks",
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        "mlp.experts.gate_up_proj": replace(_GATE_UP, is_transposed=True, is_interleaved=True),
        "mlp.experts.gate_up_proj_blocks": replace(_GATE_UP, is_interleaved=True),
        "mlp.experts.gate_up_proj_bias": Parts(("expert_gate_bias", "expert_up_bias"), is_interleaved=True),
        "mlp.experts.down_proj": replace(_DOWN, is_transposed=True),
        "mlp.experts.down_proj_blocks": _DOWN,  # cubes of floats have inputs as rows, cubes in MXFP4 outputs
        "mlp.experts.down_proj_bias": "expert_down_bias",
    },
    gguf_layer={
        **GGUF_LAYER,
        **GGUF_EXPERTS,
        "post_attention_norm.weight": "mlp_norm",
        "attn_sinks.weight": "sinks",
        "ffn_gate_inp.bias": "router_bias",
        **{f"ffn_{name}_exps.bias": f"expert_{name}_bias" for name in ("gate", "up", "down")},
    },
    is_yarn_truncated_in_gguf=False,
)
"""YaRN's range is not rounded, as in training; llama.cpp rounds it."""


# OpenAI's privacy filter: gpt-oss that reads texts, with windows to both sides in all layers

_FILTER_GATE_UP = "mlp.experts.gate_up_proj"


def _of_privacy_filter(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return with_both_sides(_gpt_oss_of_hf(config, spec, [True] * spec.num_layers))


def _privacy_filter_head(hf_class: str, config: JsonFile) -> Head | None:
    if not hf_class.endswith("ForTokenClassification"):
        return None
    has_bias = config.get("token_classification_bias", bool) is not False
    return Head("each", (HeadLayer("score", is_last=True, has_bias=has_bias),))


PRIVACY_FILTER = Architecture(
    describe=llama.describe,
    is_encoder=True,
    of_hf=_of_privacy_filter,
    hf_values=GPT_OSS.hf_values,
    hf_name=lambda name: name.removeprefix("model."),
    hf_top={"embed_tokens.weight": "embed", "norm.weight": "norm"},
    hf_layers="layers.",
    hf_layer={
        **{name: found for name, found in GPT_OSS.hf_layer.items() if not name.endswith("_blocks")},
        _FILTER_GATE_UP: replace(_GATE_UP, is_transposed=True),
        f"{_FILTER_GATE_UP}_bias": Parts(("expert_gate_bias", "expert_up_bias")),
    },
    hf_head=_privacy_filter_head,
    is_interleaved_in_hf=True,
)
