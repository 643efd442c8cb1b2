"""Mixtures whose experts are chosen as in DeepSeek V3: Solar Open, dots.llm1, K-EXAONE, and AFMoE (Trinity).

Sources: modeling_solar_open.py, modeling_dots1.py, modeling_exaone_moe.py and modeling_afmoe.py of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import gemma, llama
from penstock.models.architectures import HF_LAYER, Architecture, Parts, with_defaults
from penstock.models.hf_config import JsonFile
from penstock.models.layers import (
    dense_layers_of_hf,
    local_layers,
    sigmoid_experts_of_hf,
    with_windows,
    without_global_rotations,
)
from penstock.models.moe import GATE_UP_DOWN, SHARED
from penstock.types.model_spec import ModelSpec

_ONE_GROUP = {"n_group": 1, "topk_group": 1}
_SOLAR_DEFAULTS = {
    **_ONE_GROUP,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_DOTS_DEFAULTS = {
    **_ONE_GROUP,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "sliding_window": 4096,
    "max_window_layers": 62,
}
_EXAONE_DEFAULTS = {
    **_ONE_GROUP,
    "first_k_dense_replace": 1,
    "num_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_AFMOE_DEFAULTS = {
    **_ONE_GROUP,
    "head_dim": 128,
    "num_dense_layers": 1,
    "num_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "global_attn_every_n_layers": 4,
    "sliding_window": 1024,
}
_OLD_NAMES = {"n_routed_experts": "num_local_experts"}
_HF_LAYER: Mapping[str, str | Parts] = {
    **HF_LAYER,
    **GATE_UP_DOWN,
    **SHARED,
    **{f"mlp.{at}e_score_correction_bias": "selection_bias" for at in ("", "gate.")},
}


def _solar_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in transformers' defaults. No layer is dense, and not every file has a width of such layers."""
    found = with_defaults(values, _SOLAR_DEFAULTS, _OLD_NAMES)
    return {"intermediate_size": found.get("moe_intermediate_size"), **found}


def _of_solar(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", first_k_dense_replace=0, use_qk_norm=False)
    return sigmoid_experts_of_hf(config, spec, ())


SOLAR_OPEN = Architecture(
    describe=llama.describe,
    of_hf=_of_solar,
    hf_values=_solar_values,
    hf_layer=_HF_LAYER,
)


def _of_dots(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    first = config.require("max_window_layers", int)
    usual = [number >= first for number in range(spec.num_layers)]
    windowed = with_windows(config, spec, config.get("sliding_window", int), usual)
    return sigmoid_experts_of_hf(config, windowed, range(config.require("first_k_dense_replace", int)))


DOTS1 = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_dots,
    hf_values=lambda values: with_defaults(values, _DOTS_DEFAULTS, _OLD_NAMES, nulls=("sliding_window",)),
    hf_layer=_HF_LAYER,
)


def _of_exaone(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    spec = gemma.of_exaone4_hf(config, spec)
    return sigmoid_experts_of_hf(config, spec, dense_layers_of_hf(config, spec), num_shared="num_shared_experts")


EXAONE_MOE = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_exaone,
    hf_values=lambda values: with_defaults(values, _EXAONE_DEFAULTS, nulls=("sliding_window",)),
    hf_layer=_HF_LAYER,
)


def _of_afmoe(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Apply AFMoE's keys. Layers without a window do not rotate."""
    config.only_all(hidden_act="silu", attention_bias=False, score_func="sigmoid", route_norm=True)
    usual = local_layers(spec, config.require("global_attn_every_n_layers", int))
    spec = without_global_rotations(with_windows(config, spec, config.require("sliding_window", int), usual))
    spec = spec.with_attention_fields(has_gate=True)
    if config.get("mup_enabled", bool):
        spec = replace(spec, embed_scale=spec.hidden_size**0.5)
    dense = range(config.require("num_dense_layers", int))
    return sigmoid_experts_of_hf(config, spec, dense, num_shared="num_shared_experts")


AFMOE = Architecture(
    describe=partial(llama.describe, norms="both", qk_norms="heads"),
    of_hf=_of_afmoe,
    hf_values=lambda values: with_defaults(values, _AFMOE_DEFAULTS, {"route_scale": "routed_scaling_factor"}),
    hf_layer={
        **_HF_LAYER,
        "self_attn.gate_proj.weight": "q_gate",
        "post_attention_layernorm.weight": "post_attn_norm",
        "pre_mlp_layernorm.weight": "mlp_norm",
        "post_mlp_layernorm.weight": "post_mlp_norm",
        "mlp.router.gate.weight": "router",
        "mlp.expert_bias": "selection_bias",
    },
)
