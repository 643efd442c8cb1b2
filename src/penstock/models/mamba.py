"""Hybrids of attention and Mamba-2 (arXiv 2405.21060): Granite 4 and Bamba (IBM).

Sources: modeling_granitemoehybrid.py and modeling_bamba.py of transformers; conversion/granite.py and granite-hybrid.cpp of
llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.models import checks, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, HF_TOP, Architecture, Parts, with_biases, with_defaults
from penstock.models.decoder import Decoder
from penstock.models.delta_net import negative_exp
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.layers import GGUF_EXPERTS, experts_of_hf, read_gguf_experts, with_experts
from penstock.models.moe import GRANITE_MOE
from penstock.models.program import Program
from penstock.types.model_spec import GatedMlp, LayerSpec, LinearAttentionSpec, ModelSpec

_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}


def describe(spec: ModelSpec, *, dense: str = "") -> Program:
    """Return the program of one step. `dense` begins the names of the matrices of an MLP without experts."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        mixed = build.mix(layer, build.norm(x, f"{at}.attn_norm"))
        x, mixed = build.gather_after_last(layer, x, mixed)
        build.add_output(layer, x, mixed)
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"), dense=dense)
    return build.finish(build.norm(x, "norm"))


def _read_mamba(config: JsonFile, spec: ModelSpec) -> LinearAttentionSpec:
    num_heads, expand = config.require("mamba_n_heads", int), config.require("mamba_expand", int)
    if config.values["mamba_d_head"] == "auto":
        value_dim = expand * spec.hidden_size // max(1, num_heads)
    else:
        value_dim = config.require("mamba_d_head", int)
    if num_heads * value_dim != expand * spec.hidden_size:
        raise config.error(f"{num_heads} heads of {value_dim} columns are not mamba_expand {expand} times {spec.hidden_size}")
    least, most = _read_limits(config)
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=config.require("mamba_n_groups", int),
        key_dim=config.require("mamba_d_state", int),
        value_dim=value_dim,
        kernel=config.require("mamba_d_conv", int),
        has_delta_rule=False,
        has_bias=config.require("mamba_proj_bias", bool),
        has_conv_bias=config.require("mamba_conv_bias", bool),
        min_step=least,
        max_step=None if math.isinf(most) else most,
    )


def _read_limits(config: JsonFile) -> tuple[float, float]:
    limits = config.get("time_step_limit", list)
    if limits is None:
        return 0.0, math.inf
    if len(limits) != 2 or not all(type(limit) in (int, float) for limit in limits) or not 0 <= limits[0] <= limits[1]:
        raise config.error(f"time_step_limit is {limits!r}, not a least and a largest step")
    return float(limits[0]), float(limits[1])


def _with_mamba(path: Path, spec: ModelSpec, net: LinearAttentionSpec, attends: Sequence[bool]) -> ModelSpec:
    if net.num_key_heads != 1:
        cause = f"its Mamba layers have {net.num_key_heads} groups"
        raise checks.unsupported(path, cause, "norms of one group are computed")

    def changed(layer: int, found: LayerSpec) -> LayerSpec:
        return found if attends[layer] else replace(found, mixer=net)

    return spec.with_layers(changed)


# Granite 4 (IBM): experts and a shared MLP, or the shared MLP alone.


def _granite_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    defaults = {**_DEFAULTS, "shared_intermediate_size": 1024, "num_local_experts": 8, "num_experts_per_tok": 2}
    return llama.granite_values(with_defaults(values, defaults, {"layers_block_type": "layer_types"}))


def _of_granite(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    spec = llama.of_granite_hf(config, spec)
    if (kind := config.get("position_embedding_type", str)) in (None, "nope"):
        spec = spec.with_attention(lambda _, attention: replace(attention, rotation=None))
    elif kind != "rope":
        raise checks.unsupported(config.path, f"position_embedding_type is {kind!r}", "'rope' and 'nope' are")
    width = config.require("shared_intermediate_size", int)
    if config.require("num_local_experts", int):
        spec = experts_of_hf(config, spec, width="intermediate_size", shared_size=width)
    else:
        if not 1 <= width <= checks.LIMITS["intermediate_size"]:
            raise config.error(f"shared_intermediate_size is {width}")
        spec = spec.with_layers(lambda _, layer: replace(layer, mlp=GatedMlp(intermediate_size=width)))
    if config.values.get("layer_types") is None:
        return _with_mamba(config.path, spec, _read_mamba(config, spec), [False] * spec.num_layers)
    kinds = read_layer_types(config, spec.num_layers)
    if unknown := set(kinds) - {"attention", "full_attention", "mamba", "linear_attention"}:
        raise config.error(f"layer_types has {', '.join(sorted(unknown))}")
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    return spec if all(attends) else _with_mamba(config.path, spec, _read_mamba(config, spec), attends)


def _of_granite_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.architecture
    spec = llama.with_granite_factors(file, spec)
    if file.get(f"{key}.expert_count", int):
        mlp = read_gguf_experts(file)
        width = file.get(f"{key}.expert_shared_feed_forward_length", int) or 0
        spec = with_experts(spec, replace(mlp, shared_size=width), file.path)
    counts = file.get_list(f"{key}.attention.head_count_kv", int)
    if len(counts) != spec.num_layers:
        raise file.error(f"{key}.attention.head_count_kv has {len(counts)} values for {spec.num_layers} layers")
    num_heads, inner = (file.require(f"{key}.ssm.{name}", int) for name in ("time_step_rank", "inner_size"))
    net = LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=file.require(f"{key}.ssm.group_count", int),
        key_dim=file.require(f"{key}.ssm.state_size", int),
        value_dim=inner // max(1, num_heads),
        kernel=file.require(f"{key}.ssm.conv_kernel", int),
        has_delta_rule=False,
        has_conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
    )
    return _with_mamba(file.path, spec, net, [count > 0 for count in counts])


_IN, _IN_BIAS = (Parts(tuple(f"mix_{name}{end}" for name in ("gate", "in", "steps"))) for end in ("", "_bias"))
_HF_MAMBA: Mapping[str, str | Parts] = {
    "mamba.in_proj.weight": _IN,
    "mamba.in_proj.bias": _IN_BIAS,
    **with_biases({"mamba.conv1d": "mix_conv", "mamba.out_proj": "mix_out"}),
    "mamba.dt_bias": "mix_step_bias",
    "mamba.A_log": "mix_decay",
    "mamba.D": "mix_skip",
    "mamba.norm.weight": "mix_scale",
}
_GGUF_MAMBA: Mapping[str, str | Parts] = {
    "ssm_in.weight": _IN,
    **with_biases({"ssm_conv1d": "mix_conv"}),
    "ssm_dt.bias": "mix_step_bias",
    "ssm_a": "mix_decay",
    "ssm_d": "mix_skip",
    "ssm_norm.weight": "mix_scale",
    "ssm_out.weight": "mix_out",
}
_SHARED_OF_DENSE = {f"ffn_{name}.weight": f"shared_{name}" for name in ("gate", "up", "down")}
GRANITE_HYBRID = replace(
    GRANITE_MOE,
    describe=partial(describe, dense="shared_"),
    of_hf=_of_granite,
    of_gguf=_of_granite_gguf,
    hf_values=_granite_values,
    hf_layer={
        **GRANITE_MOE.hf_layer,
        **_HF_MAMBA,
        "shared_mlp.input_linear.weight": Parts(("shared_gate", "shared_up")),
        "shared_mlp.output_linear.weight": "shared_down",
    },
    gguf_layer={**GGUF_LAYER, **GGUF_EXPERTS, **_SHARED_OF_DENSE, **_GGUF_MAMBA},
    hf_changed={"mix_decay": negative_exp},
)


# Bamba: MLPs without experts, and heads that rotate in half.


def _of_bamba(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    listed = config.get("attn_layer_indices", list) or []
    return _with_mamba(config.path, spec, _read_mamba(config, spec), [layer in listed for layer in range(spec.num_layers)])


BAMBA = Architecture(
    describe=describe,
    of_hf=_of_bamba,
    hf_values=lambda values: {**with_defaults(values, {**_DEFAULTS, "rms_norm_eps": 1e-5}), "partial_rotary_factor": 0.5},
    hf_top={**HF_TOP, "model.final_layernorm.weight": "norm"},
    hf_layer={
        **HF_LAYER,
        **_HF_MAMBA,
        "pre_ff_layernorm.weight": "mlp_norm",
        **with_biases({f"feed_forward.{name}_proj": name for name in ("gate", "up", "down")}),
    },
    has_partial_rope=True,
    hf_changed={"mix_decay": negative_exp},
)
"""GGUF files of Bamba call themselves `granitehybrid`, and are refused: their heads rotate in part."""
