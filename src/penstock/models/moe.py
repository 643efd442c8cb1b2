"""Mixtures of experts: a layer has many small MLPs, and a router chooses a few of them for each token.

Sources: arXiv 2401.04088 (Mixtral), 2407.10671 (Qwen 2), 2409.02060 (OLMoE), 2505.09388 (Qwen 3) and 2508.10925 (gpt-oss);
modeling_NAME.py of transformers; openai-moe.cpp, qwen2moe.cpp and conversion/gpt_oss.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile
from penstock.models.layers import (
    GGUF_EXPERTS,
    experts_of_gguf,
    experts_of_hf,
    local_layers,
    local_layers_of_gguf,
    with_windows,
)
from penstock.types.model_spec import ExpertsMlp, LayerSpec, ModelSpec

_GATE_UP, _DOWN = Parts(("expert_gate", "expert_up")), Parts(("expert_down",))
_CUBES: Mapping[str, Parts] = {"experts.gate_up_proj": _GATE_UP, "experts.down_proj": _DOWN}
"""Release 5 of transformers puts the matrices of all experts of a layer into one tensor."""
_GATE_UP_DOWN: Mapping[str, str | Parts] = {
    "mlp.gate.weight": "router",
    **{f"mlp.experts.*.{name}_proj.weight": f"expert_{name}" for name in ("gate", "up", "down")},
    **{f"mlp.{name}": parts for name, parts in _CUBES.items()},
}
_SHARED: Mapping[str, str] = {
    f"mlp.shared_expert{plural}.{name}_proj.weight": f"shared_{name}" for plural in ("", "s") for name in ("gate", "up", "down")
}
_GGUF_LAYER: Mapping[str, str | Parts] = {**GGUF_LAYER, **GGUF_EXPERTS}


def _of_mixtral(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    spec = spec.with_windows(config.get("sliding_window", int) or 0, [True] * spec.num_layers)
    return experts_of_hf(config, spec, width="intermediate_size")


def _of_qwen3_moe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Put experts into every `decoder_sparse_step`-th layer, except those in `mlp_only_layers`."""
    config.only("hidden_act", "silu")
    window = config.require("sliding_window", int) if config.get("use_sliding_window", bool) else 0
    return _of_qwen(config, spec.with_windows(window, [True] * spec.num_layers))


def _of_qwen(config: JsonFile, spec: ModelSpec, **others: Any) -> ModelSpec:
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
    return _of_qwen(config, spec, shared_size=width, has_shared_gate=True)


def _of_qwen2_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the experts' keys. Shares are never divided by their sum, as in llama.cpp."""
    width = file.get("qwen2moe.expert_shared_feed_forward_length", int) or file.require("qwen2moe.feed_forward_length", int)
    factor = file.get("qwen2moe.expert_weights_scale", float) or 1.0
    return experts_of_gguf(file, spec, is_renormalised=False, share_factor=factor, shared_size=width, has_shared_gate=True)


def _of_olmoe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("clip_qkv", None)
    is_renormalised = config.get("norm_topk_prob", bool) or False
    return experts_of_hf(config, spec, width="intermediate_size", is_renormalised=is_renormalised)


MIXTRAL = Architecture(
    describe=llama.describe,
    of_hf=_of_mixtral,
    hf_values=lambda values: {"rope_theta": 1e6, **values},
    hf_layer={
        **HF_LAYER,
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.*.w1.weight": "expert_gate",
        "block_sparse_moe.experts.*.w3.weight": "expert_up",
        "block_sparse_moe.experts.*.w2.weight": "expert_down",
        "mlp.gate.weight": "router",
        **{f"mlp.{name}": parts for name, parts in _CUBES.items()},
    },
)
"""Mixtral has no GGUF name of its own: its files say `llama`."""
QWEN3_MOE = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_qwen3_moe,
    of_gguf=llama.of_gguf,
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
QWEN2_MOE = Architecture(
    describe=llama.describe,
    of_hf=_of_qwen2_moe,
    of_gguf=_of_qwen2_moe_gguf,
    hf_values=lambda values: {"qkv_bias": True, **values},
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN, **_SHARED, "mlp.shared_expert_gate.weight": "shared_router"},
    gguf_layer=_GGUF_LAYER,
)
OLMOE = Architecture(
    describe=partial(llama.describe, qk_norms="rows"),
    of_hf=_of_olmoe,
    of_gguf=partial(experts_of_gguf, is_renormalised=False),
    hf_layer={**HF_LAYER, **_GATE_UP_DOWN},
    gguf_layer=_GGUF_LAYER,
)
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
        **{f"block_sparse_moe.{name}": parts for name, parts in _CUBES.items()},
    },
    gguf_layer=_GGUF_LAYER,
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


def _gpt_oss_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128, **values}
    return found if values.get("rope_parameters") or values.get("rope_scaling") else {**found, "rope_parameters": _YARN}


def _of_gpt_oss(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    spec = experts_of_hf(config, spec, width="intermediate_size")
    spec = with_windows(config, spec, config.require("sliding_window", int), local_layers(spec))
    has_bias = config.get("attention_bias", bool) is not False
    spec = spec.with_attention(lambda _, attention: replace(attention, has_qkv_bias=has_bias, has_o_bias=has_bias))
    return _with_gpt_oss(spec)


def _of_gpt_oss_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("gpt-oss.attention.sliding_window", int)
    spec = experts_of_gguf(file, spec)
    return _with_gpt_oss(spec.with_windows(window, local_layers_of_gguf(file, spec)))


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
    hf_values=_gpt_oss_values,
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
