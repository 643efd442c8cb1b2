"""gpt-oss (OpenAI): experts with biases and a clamped SwiGLU, sinks in the softmax, windows in every other layer.

Sources: arXiv 2508.10925; modeling_gpt_oss.py of transformers; openai-moe.cpp and conversion/gpt_oss.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts
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

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_PERIOD = 2
"""One layer in so many sees all positions, unless the file says otherwise."""


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The defaults of transformers."""
    found = {"rope_theta": 150000.0, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128, **values}
    return found if values.get("rope_parameters") or values.get("rope_scaling") else {**found, "rope_parameters": _YARN}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    config.only("swiglu_alpha", 1.702)
    config.only("swiglu_limit", 7.0)
    spec = experts_of_hf(config, spec, width="intermediate_size")
    spec = with_windows(config, spec, config.require("sliding_window", int), local_layers(spec, _PERIOD))
    has_bias = config.get("attention_bias", bool) is not False
    spec = spec.with_attention(lambda _, attention: replace(attention, has_qkv_bias=has_bias, has_o_bias=has_bias))
    return _with_own(spec)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("gpt-oss.attention.sliding_window", int)
    spec = experts_of_gguf(file, spec)
    return _with_own(spec.with_windows(window, local_layers_of_gguf(file, spec, _PERIOD)))


def _with_own(spec: ModelSpec) -> ModelSpec:
    """Return the spec with what all of these models have and no file says."""

    def own(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, ExpertsMlp)
        mlp = replace(layer.mlp, activation="swiglu_clamped", has_router_bias=True, has_bias=True)
        return replace(layer, mlp=mlp, mixer=replace(layer.attention, has_sinks=True))

    return spec.with_layers(own)


_EXPERTS: Mapping[str, Parts] = {
    "gate_up_proj": Parts(("expert_gate", "expert_up"), is_transposed=True, is_interleaved=True),
    "gate_up_proj_blocks": Parts(("expert_gate", "expert_up"), is_interleaved=True),
    "gate_up_proj_bias": Parts(("expert_gate_bias", "expert_up_bias"), is_interleaved=True),
    "down_proj": Parts(("expert_down",), is_transposed=True),
    "down_proj_blocks": Parts(("expert_down",)),
}
"""Cubes of floats have inputs as rows, cubes in MXFP4 outputs."""

GPT_OSS = Architecture(
    describe=llama.describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_layer={
        **HF_LAYER,
        "self_attn.sinks": "sinks",
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        **{f"mlp.experts.{name}": parts for name, parts in _EXPERTS.items()},
        "mlp.experts.down_proj_bias": "expert_down_bias",
    },
    gguf_layer={
        **GGUF_LAYER,
        **GGUF_EXPERTS,
        "post_attention_norm.weight": "mlp_norm",
        "attn_sinks.weight": "sinks",
        "ffn_gate_inp.bias": "router_bias",
        "ffn_gate_exps.bias": "expert_gate_bias",
        "ffn_up_exps.bias": "expert_up_bias",
        "ffn_down_exps.bias": "expert_down_bias",
    },
    is_yarn_truncated_in_gguf=False,
)
"""llama.cpp truncates YaRN's range here, but the models were trained without that."""
