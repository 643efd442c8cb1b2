"""Qwen 3 Next, Qwen 3.5 and 3.6: most layers have a gated delta net; the others attend, and a gate scales their output.

Sources: arXiv 2412.06464; modeling_qwen3_next.py, modeling_qwen3_5.py and modeling_qwen3_5_moe.py of transformers;
conversion/qwen.py, qwen3next.cpp, qwen35.cpp and qwen35moe.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts, Run, with_defaults
from penstock.models.checks import LIMITS
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.layers import GGUF_EXPERTS, local_layers, read_gguf_experts, with_experts
from penstock.models.mamba import linear_attention_of_gguf, negative_exp
from penstock.models.moe import GATE_UP_DOWN, SHARED, of_qwen
from penstock.models.program import Program
from penstock.types.model_spec import LayerSpec, LinearAttentionSpec, ModelSpec

_SIZES = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_DEFAULTS = {**_SIZES, "head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
_MOE_DEFAULTS = {
    **_DEFAULTS,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}


def _moe_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with transformers' defaults. Qwen 3.5 has no dense layers, so its files lack `intermediate_size`."""
    found = with_defaults(values, {**_MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8})
    return {"intermediate_size": found["moe_intermediate_size"], **found}


def _linear_layers(config: JsonFile, spec: ModelSpec) -> list[bool]:
    kinds = read_layer_types(config, spec.num_layers, "full_attention", "linear_attention")
    return [kind == "linear_attention" for kind in kinds]


def _net_of_hf(config: JsonFile) -> LinearAttentionSpec:
    kernel, key_dim, value_dim, num_key_heads, num_heads = (config.require(key, int) for key in _SIZES)
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        has_delta_rule=True,
    )


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_act="silu", use_sliding_window=False, attn_output_gate=True)
    if config.values.get("layer_types") is not None:
        is_linear = _linear_layers(config, spec)
    else:
        is_linear = local_layers(spec, max(1, config.require("full_attention_interval", int)))
    return _with_nets(spec, _net_of_hf(config), is_linear)


def _of_moe_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    width = config.require("shared_expert_intermediate_size", int)
    return of_qwen(config, _of_hf(config, spec), shared_size=width, has_shared_gate=True)


def _of_moe3_5_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
    return _of_moe_hf(config, spec)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.architecture
    is_linear: Sequence[bool] = file.get_list(f"{key}.attention.recurrent_layers", bool)[: spec.num_layers]
    if not is_linear:
        is_linear = local_layers(spec, max(1, file.get(f"{key}.full_attention_interval", int, 4) or 1))
    if len(is_linear) != spec.num_layers:
        raise file.error(f"{key}.attention.recurrent_layers has {len(is_linear)} values for {spec.num_layers} layers")
    net = linear_attention_of_gguf(file, has_delta_rule=True)
    is_tiled = key != "qwen3next" and net.num_heads != net.num_key_heads  # the converter permutes the value heads of Qwen 3.5
    return _with_nets(spec, replace(net, has_tiled_heads=is_tiled), is_linear)


def _of_moe_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the experts' keys. The chosen experts' shares are always divided by their sum, as in llama.cpp."""
    key = file.architecture
    width = file.get(f"{key}.expert_shared_feed_forward_length", int) or file.require(f"{key}.feed_forward_length", int)
    mlp = read_gguf_experts(file, has_shared_gate=True, shared_size=width)
    return with_experts(_of_gguf(file, spec), mlp, file.path)


def _with_nets(spec: ModelSpec, net: LinearAttentionSpec, is_linear: Sequence[bool]) -> ModelSpec:
    def changed(layer: int, found: LayerSpec) -> LayerSpec:
        return replace(found, mixer=net if is_linear[layer] else replace(found.attention, has_gate=True))

    return spec.with_layers(changed)


# Tensors of several weights whose rows come by head.


def _query_and_gate(spec: ModelSpec) -> Sequence[Sequence[Run]]:
    for attention in spec.attentions[:1]:
        return _by_head(attention.num_heads, attention.head_dim, attention.head_dim)
    return [[], []]


def _joint_and_gate(spec: ModelSpec) -> Sequence[Sequence[Run]]:
    for net in spec.linear_attentions[:1]:
        width = net.value_width // net.num_key_heads
        q, k, v, gate = _by_head(net.num_key_heads, net.key_dim, net.key_dim, width, width)
        return [[*q, *k, *v], gate]
    return [[], []]


def _rates_and_steps(spec: ModelSpec) -> Sequence[Sequence[Run]]:
    for net in spec.linear_attentions[:1]:
        return _by_head(net.num_key_heads, *[net.num_heads // net.num_key_heads] * 2)
    return [[], []]


def _by_head(num_heads: int, *widths: int) -> list[list[Run]]:
    """Return the runs of parts of these widths, which come one after the other for each head."""
    starts = [sum(widths[:part]) for part in range(len(widths))]
    return [
        [(head * sum(widths) + start, width, 1) for head in range(num_heads)]
        for start, width in zip(starts, widths, strict=True)
    ]


def _text_name(name: str) -> str | None:
    """Return None for a vision tensor, else the name without `language_model.`, which some text models have."""
    if re.match(r"(model\.)?visual\.", name):
        return None
    return re.sub(r"^model\.language_model\.", "model.", name)


_Q, _Q_BIAS = (Parts((f"q{end}", f"q_gate{end}"), runs=_query_and_gate) for end in ("", "_bias"))
_JOINT = Parts(("mix_in", "mix_gate"), runs=_joint_and_gate)
_RATES = Parts(("mix_rates", "mix_steps"), runs=_rates_and_steps)
_HF_LAYER: Mapping[str, str | Parts] = {
    **HF_LAYER,
    "self_attn.q_proj.weight": _Q,
    "self_attn.q_proj.bias": _Q_BIAS,
    "linear_attn.in_proj_qkvz.weight": _JOINT,
    "linear_attn.in_proj_ba.weight": _RATES,
    "linear_attn.in_proj_qkv.weight": "mix_in",
    "linear_attn.in_proj_z.weight": "mix_gate",
    "linear_attn.in_proj_b.weight": "mix_rates",
    "linear_attn.in_proj_a.weight": "mix_steps",
    "linear_attn.conv1d.weight": "mix_conv",
    "linear_attn.dt_bias": "mix_step_bias",
    "linear_attn.A_log": "mix_decay",
    "linear_attn.norm.weight": "mix_scale",
    "linear_attn.out_proj.weight": "mix_out",
}
_GGUF_LAYER: Mapping[str, str | Parts] = {
    **GGUF_LAYER,
    "post_attention_norm.weight": "mlp_norm",
    "attn_q.weight": _Q,
    "ssm_in.weight": _JOINT,
    "ssm_ba.weight": _RATES,
    "attn_qkv.weight": "mix_in",
    "attn_gate.weight": "mix_gate",
    "ssm_beta.weight": "mix_rates",
    "ssm_alpha.weight": "mix_steps",
    "ssm_conv1d.weight": "mix_conv",
    "ssm_dt.bias": "mix_step_bias",
    "ssm_a": "mix_decay",
    "ssm_norm.weight": "mix_scale",
    "ssm_out.weight": "mix_out",
}
QWEN3_5 = Architecture(
    describe=partial(llama.describe, qk_norms="heads"),
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=lambda values: with_defaults(values, _DEFAULTS),
    hf_name=_text_name,
    hf_layer=_HF_LAYER,
    gguf_layer=_GGUF_LAYER,
    has_further_layers=True,
    has_partial_rope=True,
    hf_norm_offset=1.0,
    hf_changed={"mix_decay": negative_exp},
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    of_hf=_of_moe3_5_hf,
    of_gguf=_of_moe_gguf,
    hf_values=_moe_values,
    hf_layer={**_HF_LAYER, **GATE_UP_DOWN, **SHARED, "mlp.shared_expert_gate.weight": "shared_router"},
    gguf_layer={**_GGUF_LAYER, **GGUF_EXPERTS},
)
QWEN3_NEXT = replace(QWEN3_5_MOE, of_hf=_of_moe_hf, hf_values=lambda values: with_defaults(values, _MOE_DEFAULTS))


# Olmo Hybrid (Ai2): delta-net layers have Llama's structure, attention layers OLMo 3's, mostly without RoPE.


def _describe_olmo(spec: ModelSpec) -> Program:
    build = Decoder(spec)
    x = build.embed()
    for layer, found in enumerate(spec.layers):
        at = f"layers.{layer}"
        if isinstance(found.mixer, LinearAttentionSpec):
            x, mixed = build.gather_after_last(layer, x, build.mix(layer, build.norm(x, f"{at}.attn_norm")))
            build.add_output(layer, x, mixed)
            build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
            continue
        x, mixed = build.gather_after_last(layer, x, build.attention(layer, x, qk_norms="rows"))
        branch = build.linear(mixed, f"{at}.o", "projected", spec.hidden_size)
        build.add(x, build.norm(branch, f"{at}.mlp_norm", branch))
        branch = build.mlp(layer, x)
        build.add(x, build.norm(branch, f"{at}.post_mlp_norm", branch))
    return build.finish(build.norm(x, "norm"))


def _olmo_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with transformers' defaults, if its sizes are possible."""
    found = {"linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "rms_norm_eps": 1e-6, **values}
    told = {key: value for key, value in found.items() if type(value) is int and 0 < value <= LIMITS["hidden_size"]}
    if not {"num_attention_heads", "hidden_size", "num_hidden_layers"} <= told.keys():
        return found
    num_heads, number = told["num_attention_heads"], told["num_hidden_layers"]
    usual = int(0.75 * told["hidden_size"] / told.get("linear_num_key_heads", num_heads))
    key_dim = told.get("linear_key_head_dim", usual)
    sizes = {
        "linear_num_key_heads": num_heads,
        "linear_num_value_heads": num_heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
        "layer_types": ["linear_attention" if layer % 4 < 3 else "full_attention" for layer in range(number - 1)]
        + ["linear_attention" if number > 3 and number % 4 else "full_attention"],
    }
    return found | {key: value for key, value in sizes.items() if found.get(key) is None}


def _of_olmo(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    told = {**config.values, **(config.get("rope_parameters", dict) or {})}
    if told.get("rope_theta", 1.0) is None:  # as published; a missing one is 10,000
        spec = spec.with_attention_fields(rotation=None)
    is_linear = _linear_layers(config, spec)
    net = replace(_net_of_hf(config), norm_eps=1e-5, has_rates_to_two=config.require("linear_allow_neg_eigval", bool))
    return spec.with_layers(lambda i, layer: replace(layer, mixer=net) if is_linear[i] else layer)


OLMO_HYBRID = Architecture(
    describe=_describe_olmo,
    of_hf=_of_olmo,
    hf_values=_olmo_values,
    hf_layer={
        **HF_LAYER,
        "post_feedforward_layernorm.weight": "post_mlp_norm",
        "attention_layer_norm.weight": "attn_norm",  # transformers saves these two under their old names
        "feedforward_layer_norm.weight": "mlp_norm",
        **{f"linear_attn.{name}_proj.weight": Parts(("mix_in",), place=place) for place, name in enumerate("qkv")},
        "linear_attn.b_proj.weight": "mix_rates",
        "linear_attn.a_proj.weight": "mix_steps",
        "linear_attn.g_proj.weight": "mix_gate",
        "linear_attn.conv1d.weight": "mix_conv",
        **{f"linear_attn.{name}_conv1d.weight": Parts(("mix_conv",), place=place) for place, name in enumerate("qkv")},
        "linear_attn.dt_bias": "mix_step_bias",
        "linear_attn.A_log": "mix_decay",
        "linear_attn.o_norm.weight": "mix_scale",
        "linear_attn.o_proj.weight": "mix_out",
    },
    hf_changed={"mix_decay": negative_exp},
)
