"""Hybrids of attention and Mamba-2 (arXiv 2405.21060): Granite 4 and Bamba (IBM), Falcon H1 (TII).

Sources: modeling_granitemoehybrid.py, modeling_bamba.py and modeling_falcon_h1.py of transformers; conversion/granite.py,
conversion/falcon_h1.py, granite-hybrid.cpp and falcon-h1.cpp of llama.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.models import checks, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, HF_TOP, Architecture, Parts, with_biases, with_defaults
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.layers import GGUF_EXPERTS, experts_of_hf, read_gguf_experts, with_experts
from penstock.models.moe import GRANITE_MOE_SHARED
from penstock.models.program import Program
from penstock.types.model_spec import GatedMlp, LayerFactors, LayerSpec, LinearAttentionSpec, ModelSpec

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

_LARGEST_STEP = 2.0**64
"""Larger limits bound nothing: states would not be finite."""


def _read_mamba(config: JsonFile, spec: ModelSpec, **others: Any) -> LinearAttentionSpec:
    num_heads, expand = config.require("mamba_n_heads", int), config.require("mamba_expand", int)
    width, words = config.get("mamba_d_ssm", int), "mamba_d_ssm"
    if width is None:
        width, words = expand * spec.hidden_size, f"mamba_expand {expand} times {spec.hidden_size}"
    is_auto = config.values["mamba_d_head"] == "auto"
    value_dim = width // max(1, num_heads) if is_auto else config.require("mamba_d_head", int)
    if num_heads * value_dim != width:
        raise config.error(f"{num_heads} heads of {value_dim} columns are not {words}")
    least, most = read_limits(config)
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
        max_step=most,
        **others,
    )


def linear_attention_of_gguf(file: GgufFile, *, has_delta_rule: bool = False, **others: Any) -> LinearAttentionSpec:
    key = file.architecture
    num_heads, inner = (file.require(f"{key}.ssm.{name}", int) for name in ("time_step_rank", "inner_size"))
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=file.require(f"{key}.ssm.group_count", int),
        key_dim=file.require(f"{key}.ssm.state_size", int),
        value_dim=inner // max(1, num_heads),
        kernel=file.require(f"{key}.ssm.conv_kernel", int),
        has_delta_rule=has_delta_rule,
        has_conv_bias=any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        **others,
    )


def read_limits(config: JsonFile) -> tuple[float, float]:
    limits = config.get("time_step_limit", list)
    if limits is None:
        return 0.0, math.inf
    found = [math.inf if limit == {"__float__": "Infinity"} else limit for limit in limits]  # as transformers 5 writes it
    is_right = len(found) == 2 and all(type(limit) in (int, float) for limit in found)
    if not is_right or not 0 <= found[0] <= min(found[1], _LARGEST_STEP):
        raise config.error(f"time_step_limit is {limits!r}, not [smallest step, largest step]")
    return float(found[0]), math.inf if found[1] > _LARGEST_STEP else float(found[1])


def negative_exp(_: ModelSpec, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return -np.exp(values)


def _with_mamba(spec: ModelSpec, net: LinearAttentionSpec, attends: Sequence[bool]) -> ModelSpec:
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
        spec = spec.with_attention_fields(rotation=None)
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
        return _with_mamba(spec, _read_mamba(config, spec), [False] * spec.num_layers)
    kinds = read_layer_types(config, spec.num_layers, "attention", "full_attention", "mamba", "linear_attention")
    attends = [kind in ("attention", "full_attention") for kind in kinds]
    return spec if all(attends) else _with_mamba(spec, _read_mamba(config, spec), attends)


def _of_granite_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.architecture
    spec = llama.with_granite_factors(file, spec)
    if file.get(f"{key}.expert_count", int):
        width = file.get(f"{key}.expert_shared_feed_forward_length", int) or 0
        spec = with_experts(spec, read_gguf_experts(file, shared_size=width), file.path)
    counts = file.numbers_by_layer(f"{key}.attention.head_count_kv", spec.num_layers)
    return _with_mamba(spec, linear_attention_of_gguf(file), [count > 0 for count in counts])


_IN, _IN_BIAS = (Parts(tuple(f"mix_{name}{end}" for name in ("gate", "in", "steps"))) for end in ("", "_bias"))
HF_MIXER: Mapping[str, str | Parts] = {
    "in_proj.weight": _IN,
    "in_proj.bias": _IN_BIAS,
    **with_biases({"conv1d": "mix_conv", "out_proj": "mix_out"}),
    "dt_bias": "mix_step_bias",
    "A_log": "mix_decay",
    "D": "mix_skip",
    "norm.weight": "mix_scale",
}
"""Names of the tensors of Mamba-2 after the mixer's -> our names."""
_HF_MAMBA = {f"mamba.{name}": ours for name, ours in HF_MIXER.items()}
GGUF_MAMBA: Mapping[str, str | Parts] = {
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
    GRANITE_MOE_SHARED,
    describe=partial(llama.describe, dense="shared_"),
    of_hf=_of_granite,
    of_gguf=_of_granite_gguf,
    hf_values=_granite_values,
    hf_layer={
        **GRANITE_MOE_SHARED.hf_layer,
        **_HF_MAMBA,
    },
    gguf_layer={**GGUF_LAYER, **GGUF_EXPERTS, **_SHARED_OF_DENSE, **GGUF_MAMBA},
    hf_changed={"mix_decay": negative_exp},
)


# Bamba: dense MLPs, and RoPE on half of each head.


def _of_bamba(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    listed = config.get("attn_layer_indices", list) or []
    return _with_mamba(spec, _read_mamba(config, spec), [layer in listed for layer in range(spec.num_layers)])


BAMBA = Architecture(
    describe=llama.describe,
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
"""GGUF files of Bamba call themselves `granitehybrid`, and are refused for their partial RoPE."""


# Falcon H1: each layer has Mamba-2 beside attention, and factors between all parts.


def _describe_beside(spec: ModelSpec) -> Program:
    build = Decoder(spec)
    x = build.embed()
    for layer, found in enumerate(spec.layers):
        at, factors = f"layers.{layer}", found.factors or LayerFactors()
        normed = build.norm(x, f"{at}.attn_norm")
        both = [build.attention(layer, normed)]
        if found.beside is not None:
            both.append(build.linear_attention(layer, normed))
        x, attended, *mixed = build.gather_after_last(layer, x, *both)
        build.add_linear(x, attended, f"{at}.o", factor=factors.attended)
        for each in mixed:
            build.add_linear(x, each, f"{at}.mix_out", factor=factors.mixed)
        normed = build.scale(build.norm(x, f"{at}.mlp_norm"), factors.mlp_in)
        build.add_mlp(layer, x, normed, factor=factors.mlp_out)
    return build.finish(build.norm(x, "norm"))


def _of_falcon(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Apply the multipliers. Without biases, those before a projection may move after it."""
    config.only_all(hidden_act="silu", attention_bias=False, mlp_bias=False, mamba_proj_bias=False, projectors_bias=False)
    has_norm = config.get("mamba_rms_norm", bool) or False
    net = _read_mamba(
        config,
        spec,
        has_norm=has_norm,
        has_norm_before_gate=has_norm and config.require("mamba_norm_before_gate", bool),
    )

    def factor(name: str) -> float:
        return config.positive(f"{name}_multiplier")

    gate, *conv, steps = (factor("ssm_in") * each for each in config.positives("ssm_multipliers", 5))
    mlp_in, mlp_down = config.positives("mlp_multipliers", 2)
    attention_in = factor("attention_in")
    factors = LayerFactors(
        gate=gate,
        conv=(conv[0], conv[1], conv[2]),
        steps=steps,
        mixed=factor("ssm_out"),
        attended=attention_in * factor("attention_out"),
        mlp_in=mlp_in,
        mlp_out=mlp_down / mlp_in,
    )
    scale = attention_in * attention_in * factor("key") * spec.attentions[0].head_dim ** -0.5
    spec = spec.with_attention_fields(scale=scale)
    spec = replace(spec, embed_scale=factor("embedding"), logit_scale=factor("lm_head"))
    return spec.with_layers(lambda _, layer: replace(layer, beside=net, factors=factors))


def _of_falcon_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the keys of Mamba-2. The converter has multiplied the matrices by all factors."""
    if any(name.endswith(".ssm_norm.weight") for name in file.tensors):
        raise checks.unsupported(file.path, "the output of its Mamba layers is normed", "Falcon H1 without such norms is")
    net = linear_attention_of_gguf(file, has_norm=False)
    return spec.with_layers(lambda _, layer: replace(layer, beside=net, factors=LayerFactors()))


def _multiply_conv(spec: ModelSpec, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Multiply the convolution's weights by the factors of its inputs."""
    net, factors = spec.linear_attentions[0], spec.layers[0].factors
    assert factors is not None
    by_column = np.repeat(np.array(factors.conv, np.float32), [net.value_width, net.key_width, net.key_width])
    return values * by_column[:, None]


_FALCON_FACTORS = ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
_FALCON_LISTS = {"ssm_multipliers": [1.0] * 5, "mlp_multipliers": [1.0] * 2}
_FALCON_DEFAULTS = {
    **_FALCON_LISTS,
    **_DEFAULTS,
    **{f"{name}_multiplier": 1.0 for name in _FALCON_FACTORS},
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
    "mamba_norm_before_gate": True,
}


def _falcon_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    told = {key: value for key, value in values.items() if value is not None or key not in _FALCON_LISTS}
    return {**_FALCON_DEFAULTS, **told}


FALCON_H1 = replace(
    BAMBA,
    describe=_describe_beside,
    of_hf=_of_falcon,
    of_gguf=_of_falcon_gguf,
    hf_values=_falcon_values,
    gguf_layer={**GGUF_LAYER, **GGUF_MAMBA, "ffn_norm": "mlp_norm"},  # the converter omits `.weight` here
    has_partial_rope=False,
    hf_changed={"mix_decay": negative_exp, "mix_conv": _multiply_conv},
)
