"""Models with one mixer or MLP per layer. Nemotron-H (NVIDIA; Nemotron Nano 2 and 3) mixes Mamba-2, attention without RoPE,
MLPs and experts; Mamba-2 and Mamba Codestral have Mamba-2 alone.

Sources: arXiv 2504.03624 and 2405.21060; modeling_nemotron_h.py and modeling_mamba2.py of transformers; conversion/nemotron.py
and nemotron-h.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from penstock.models import checks
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, HF_TOP, Architecture, Parts
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_activation, read_layer_types
from penstock.models.layers import GGUF_EXPERTS, experts_of_hf, read_gguf_experts, with_experts
from penstock.models.mamba import GGUF_MAMBA, HF_MIXER, linear_attention_of_gguf, negative_exp, read_limits
from penstock.models.program import Program
from penstock.types.model_spec import Activation, LayerSpec, LinearAttentionSpec, ModelSpec, PlainMlp

Kind = Literal["linear_attention", "full_attention", "mlp", "moe"]
_KINDS: Mapping[str, Kind] = {
    **{"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"},
    **{"mamba": "linear_attention", "attention": "full_attention", "mlp": "mlp", "moe": "moe"},
    **{"linear_attention": "linear_attention", "full_attention": "full_attention"},
}
"""Kinds of layers in `hybrid_override_pattern` and in `layers_block_type` -> those of release 5 of transformers."""
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
_OLD_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
    "n_routed_experts": "num_experts",
    "layer_types": "layers_block_type",
}


def describe(spec: ModelSpec) -> Program:
    """Return the program of one step."""
    build = Decoder(spec)
    x = build.embed()
    for layer, found in enumerate(spec.layers):
        normed = build.norm(x, f"layers.{layer}.attn_norm")
        if found.mixer is None:
            x, normed = build.gather_after_last(layer, x, normed)
            build.add_mlp(layer, x, normed)
        else:
            x, mixed = build.gather_after_last(layer, x, build.mix(layer, normed))
            build.add_output(layer, x, mixed)
    return build.finish(build.norm(x, "norm"))


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = {**_DEFAULTS, **{_OLD_KEYS.get(key, key): value for key, value in values.items() if value is not None}}
    kinds = found.get("layers_block_type", found.get("hybrid_override_pattern"))
    if isinstance(kinds, list | str):
        names = [_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
        found |= {"layer_types": names, "num_hidden_layers": len(names)}
    return {**found, "rms_norm_eps": found["layer_norm_epsilon"]}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(use_bias=False, mlp_bias=False, attention_bias=False, mamba_proj_bias=False, mamba_hidden_act="silu")
    config.only_all(sliding_window=None, moe_latent_size=None, attention_head_dim=spec.attentions[0].head_dim)
    kinds = read_layer_types(config, spec.num_layers)
    net = _read_net(config, "mamba_num_heads", "mamba_head_dim", "ssm_state_size")
    activation = read_activation(config, "mlp_hidden_act", "relu2")
    if "moe" in kinds:
        config.only_all(n_group=1, topk_group=1, n_shared_experts=1)
        spec = experts_of_hf(
            config,
            spec,
            width="moe_intermediate_size",
            dense=[layer for layer, kind in enumerate(kinds) if kind != "moe"],
            shared_size=config.require("moe_shared_expert_intermediate_size", int),
            is_renormalised=config.require("norm_topk_prob", bool),
            share_factor=config.positive("routed_scaling_factor"),
            **_experts(activation),
        )
    return _with_kinds(spec, kinds, net, activation, config.path)


def _read_net(config: JsonFile, *keys: str, has_bias: bool = False) -> LinearAttentionSpec:
    """Return Mamba-2. `keys` name its heads, columns per head and state size.

    In prompts, transformers clips Nemotron-H's steps to `time_step_min`; its authors and we do not.
    """
    num_heads, value_dim, key_dim, num_groups, kernel = (config.require(key, int) for key in (*keys, "n_groups", "conv_kernel"))
    least, most = read_limits(config)
    return LinearAttentionSpec(
        num_heads=num_heads,
        num_key_heads=num_groups,
        key_dim=key_dim,
        value_dim=value_dim,
        kernel=kernel,
        has_delta_rule=False,
        has_bias=has_bias,
        has_conv_bias=config.require("use_conv_bias", bool),
        min_step=least,
        max_step=most,
    )


def _experts(activation: Activation) -> dict[str, Any]:
    return {"activation": activation, "scoring": "sigmoid", "has_selection_bias": True, "has_gate": False}


def _with_kinds(
    spec: ModelSpec, kinds: Sequence[str], net: LinearAttentionSpec, activation: Activation, path: Path
) -> ModelSpec:
    if unknown := set(kinds) - set(_KINDS.values()):
        raise checks.unsupported(path, f"a layer is {sorted(unknown)[0]!r}", f"{', '.join(sorted(set(_KINDS.values())))} are")

    widths = [getattr(layer.mlp, "intermediate_size", 0) for layer in spec.layers]

    def changed(layer: int, found: LayerSpec) -> LayerSpec:
        match kinds[layer]:
            case "linear_attention":
                return replace(found, mixer=net, mlp=None)
            case "full_attention":
                attention = replace(found.attention, rotation=None, has_qkv_bias=False, has_o_bias=False)
                return replace(found, mixer=attention, mlp=None)
            case "mlp":
                return replace(found, mixer=None, mlp=PlainMlp(intermediate_size=widths[layer], activation=activation))
            case _:
                return replace(found, mixer=None)

    return spec.with_layers(changed)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the keys. Layers with neither KV heads nor an MLP have Mamba-2, as in llama.cpp."""
    key = file.architecture
    num_stored = file.require(f"{key}.block_count", int)
    counts = file.numbers_by_layer(f"{key}.attention.head_count_kv", num_stored)
    widths = file.numbers_by_layer(f"{key}.feed_forward_length", num_stored)
    has_experts = bool(file.get(f"{key}.expert_count", int))
    of_widths: Kind = "moe" if has_experts else "mlp"
    kinds = [
        of_widths if width else "full_attention" if count else "linear_attention"
        for count, width in zip(counts, widths, strict=True)
    ][: spec.num_layers]
    if has_experts:
        if (number := file.get(f"{key}.expert_group_count", int) or 1) != 1:
            raise checks.unsupported(file.path, f"{key}.expert_group_count is {number}", "one group is")
        mlp = read_gguf_experts(
            file,
            shared_size=file.require(f"{key}.expert_shared_feed_forward_length", int),
            is_renormalised=file.require(f"{key}.expert_weights_norm", bool),
            **_experts("relu2"),
        )
        spec = with_experts(spec, mlp, file.path)
    return _with_kinds(spec, kinds, linear_attention_of_gguf(file), "relu2", file.path)


_HF_LAYER: Mapping[str, str | Parts] = {
    "norm.weight": "attn_norm",
    **{name.replace("self_attn.", "mixer."): ours for name, ours in HF_LAYER.items() if name.startswith("self_attn.")},
    **{f"mixer.{name}": ours for name, ours in HF_MIXER.items()},
    **{f"mixer.{name}_proj.weight": name for name in ("up", "down")},
    "mixer.gate.weight": "router",
    "mixer.gate.e_score_correction_bias": "selection_bias",
    **{f"mixer.experts.*.{name}_proj.weight": f"expert_{name}" for name in ("up", "down")},
    **{f"mixer.experts.{name}_proj": Parts((f"expert_{name}",)) for name in ("up", "down")},
    **{f"mixer.shared_experts.{name}_proj.weight": f"shared_{name}" for name in ("up", "down")},
}
NEMOTRON_H = Architecture(
    describe=describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_name=lambda name: re.sub(r"^(model\.)?backbone\.", "model.", name),
    hf_top={
        **HF_TOP,
        "model.embeddings.weight": "embed",
        "model.embedding.weight": "embed",  # as earlier releases 5 of transformers save it
        "model.norm_f.weight": "norm",
    },
    hf_layer=_HF_LAYER,
    gguf_layer={**GGUF_LAYER, **GGUF_MAMBA},
    has_further_layers=True,
    has_partial_rope=True,
    is_interleaved_in_gguf=True,
    hf_changed={"mix_decay": negative_exp},
)
NEMOTRON_H_MOE = replace(NEMOTRON_H, gguf_layer={**NEMOTRON_H.gguf_layer, **GGUF_EXPERTS})
"""The name of GGUF files with experts. Directories have one class for both."""


# Mamba-2 itself.

_MAMBA2_DEFAULTS = {
    "num_heads": 128,
    "head_dim": 64,
    "vocab_size": 32768,
    "state_size": 128,
    "layer_norm_epsilon": 1e-5,
    "expand": 2,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "max_position_embeddings": 1 << 20,  # as in llama.cpp: text length is unlimited
}


def _mamba2_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with transformers' defaults, and placeholder sizes for the attention and MLP that no layer has."""
    found = {**_MAMBA2_DEFAULTS, **values}
    renamed = {"mamba_head_dim": found["head_dim"], "mixer_bias": found["use_bias"], "use_bias": None}
    sizes = {"num_attention_heads": 1, "head_dim": 2, "intermediate_size": 1}
    return {**found, **renamed, **sizes, "rms_norm_eps": found["layer_norm_epsilon"]}


def _of_mamba2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    net = _read_net(config, "num_heads", "mamba_head_dim", "state_size", has_bias=config.require("mixer_bias", bool))
    if net.value_width != config.require("expand", int) * spec.hidden_size:
        raise config.error(f"{net.num_heads} heads of {net.value_dim} columns are not expand times {spec.hidden_size}")
    return spec.with_layers(lambda _, layer: replace(layer, mixer=net, mlp=None))


MAMBA2 = replace(NEMOTRON_H, of_hf=_of_mamba2, hf_values=_mamba2_values)
