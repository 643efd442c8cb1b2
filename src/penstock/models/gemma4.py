"""Gemma 4 of Google: the text part. Sources: transformers' modeling_gemma4.py and llama.cpp's src/models/gemma4.cpp.

Layers without a window have wider heads than those with one, and may use keys as values. The last layers may read
the keys and values of earlier ones. Small models add a part of a second embedding to each layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.models import checks
from penstock.models.architectures import GGUF_LAYER, GGUF_TOP, HF_TOP, Architecture, Parts, with_defaults
from penstock.models.decoder import Decoder
from penstock.models.gemma import GEMMA2
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.layers import (
    GGUF_EXPERTS,
    check_window,
    local_layers_of_gguf,
    read_gguf_experts,
    rope_base,
    with_experts,
    with_local_base,
)
from penstock.models.moe import EXPERTS
from penstock.models.program import Program
from penstock.types.errors import damaged
from penstock.types.model_spec import Activation, AttentionSpec, ExpertsMlp, GatedMlp, ModelSpec

_ACTIVATION: Activation = "gelu_tanh"
_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 512,
    "vocab_size_per_layer_input": 262_144,
    "hidden_size_per_layer_input": 256,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
_UNIFIED_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 262_144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
_FULL, _LOCAL = "full_attention", "sliding_attention"


def describe(spec: ModelSpec) -> Program:
    build = Decoder(spec)
    x = build.embed()
    size = spec.layer_input_size
    inputs = [_layer_inputs(build, spec, x)] if size else []
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        mixed = build.attention(layer, build.norm(x, f"{at}.attn_norm"), qk_norms="heads", has_v_norm=True)
        x, mixed, *inputs = build.gather_after_last(layer, x, mixed, *inputs)
        branch = build.linear(mixed, f"{at}.o", "projected", spec.hidden_size)
        build.add(x, build.norm(branch, f"{at}.post_attn_norm", branch))
        build.add(x, build.norm(_mlp(build, spec, layer, x), f"{at}.post_mlp_norm", "projected"))
        for found in inputs:
            own = build.columns(found, layer * size, "layer_input", size)
            gate = build.linear(x, f"{at}.input_gate", "input_gate", size)
            product = build.gated(gate, own, _ACTIVATION)
            branch = build.linear(product, f"{at}.input_projection", "projected", spec.hidden_size)
            build.add(x, build.norm(branch, f"{at}.post_input_norm", branch))
        build.scale(x, weight=f"{at}.scale")
    return build.finish(build.norm(x, "norm"))


def _layer_inputs(build: Decoder, spec: ModelSpec, x: str) -> str:
    """Return all layers' inputs for each token: (its second embedding + the normed projection of x) / sqrt(2).

    The projection is divided by sqrt(hidden_size) before its norm, which has the effect of a larger epsilon.
    """
    size, width = spec.layer_input_size, spec.layer_input_size * spec.num_layers
    inputs = build.look_up("layer_embed", "layer_inputs", width, (size / 2) ** 0.5)
    projected = build.linear(x, "layer_projection", "layer_projected", width)
    build.norm_groups(projected, "layer_projection_norm", size, eps=spec.norm_eps * spec.hidden_size)
    return build.add(inputs, projected, 0.5**0.5)


def _mlp(build: Decoder, spec: ModelSpec, layer: int, x: str) -> str:
    """Return the MLP's output before its norm. With experts, add the mixture's output; both are normed first."""
    at = f"layers.{layer}"
    active = build.activated(layer, build.norm(x, f"{at}.mlp_norm"))
    out = build.linear(active, f"{at}.down", "projected", spec.hidden_size)
    if not isinstance(spec.layers[layer].mlp, ExpertsMlp):
        return out
    out = build.norm(out, f"{at}.post_dense_norm", out)
    routed = build.scale(build.norm(x, f"{at}.router_norm", "routed"), spec.hidden_size**-0.5)
    mixture = build.experts(layer, build.norm(x, f"{at}.mixture_norm"), routed)
    return build.add(out, build.norm(mixture, f"{at}.post_mixture_norm", mixture))


def _values(values: Mapping[str, Any], defaults: Mapping[str, Any] = _DEFAULTS) -> Mapping[str, Any]:
    """Fill in transformers' defaults. The last layer has no window, whatever `layer_types` says."""
    found = with_defaults(values, defaults)
    num_layers, kinds = found["num_hidden_layers"], found.get("layer_types")
    if kinds is None and type(num_layers) is int and num_layers <= checks.LIMITS["num_layers"]:
        kinds = [_LOCAL if (number + 1) % 6 else _FULL for number in range(num_layers)]
    return _with_older_keys({**found, "layer_types": [*kinds[:-1], _FULL]}) if isinstance(kinds, list) and kinds else found


def _with_older_keys(values: dict[str, Any]) -> Mapping[str, Any]:
    """Return the values with `per_layer_config`, which transformers 5.24 saves, turned into the keys of earlier releases.

    As in transformers, it wins over those keys. If they can't express it, it stays, and `read_spec` refuses it.
    """
    own, kinds = values.get("per_layer_config"), values["layer_types"]
    if not isinstance(own, dict) or not all(isinstance(layer, dict) for layer in own.values()):
        return values
    usual = {key: values[key] for key in ("head_dim", "num_key_value_heads")}
    by_layer = {number.lstrip("0") or "0": layer for number, layer in own.items()}
    sizes = [{**usual, **by_layer.pop(str(number), {})} for number in range(len(kinds))]
    full = sizes[-1]
    if by_layer or full.keys() != usual.keys() or sizes != [full if kind == _FULL else usual for kind in kinds]:
        return values
    older = {"global_head_dim": full["head_dim"], "num_global_key_value_heads": full["num_key_value_heads"]}
    return {**values, **older, "per_layer_config": None}


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_activation="gelu_pytorch_tanh", attention_bias=False, rope_scaling=None)
    config.only("use_bidirectional_attention", "vision")  # causal among the tokens of a text
    kinds = read_layer_types(config, spec.num_layers, _FULL, _LOCAL)
    for kind in sorted(set(kinds)):
        turn = config.require("rope_parameters", dict).get(kind)
        if not isinstance(turn, dict):
            raise config.error(f"rope_parameters has nothing for layers of the type {kind}")
        if turn.get("rope_type") != "proportional":  # transformers then rotates whole heads
            JsonFile(config.path, {**config.values, **turn}).only("partial_rotary_factor", 1.0)
    is_local = [kind == _LOCAL for kind in kinds]
    head_dims = {False: config.require("global_head_dim", int), True: config.require("head_dim", int)}
    num_kv_heads, reuses_keys = config.require("num_key_value_heads", int), config.get("attention_k_eq_v", bool) or False
    global_kv_heads = config.get("num_global_key_value_heads", int)
    if global_kv_heads is None:
        global_kv_heads = num_kv_heads
    if global_kv_heads != num_kv_heads and not reuses_keys:
        setting = f"num_global_key_value_heads is {global_kv_heads} without attention_k_eq_v"
        raise checks.unsupported(config.path, setting, f"{num_kv_heads}, as in all other layers, is")
    num_shared, width = config.get("num_kv_shared_layers", int) or 0, config.require("intermediate_size", int)
    factor = 2 if config.get("use_double_wide_mlp", bool) else 1
    window = config.require("sliding_window", int) if any(is_local) else 0
    check_window(window, is_local, config.path)
    layers = [
        _Layer(
            head_dim=head_dims[local],
            num_kv_heads=num_kv_heads if local else global_kv_heads,
            is_local=local,
            reuses_keys=reuses_keys and not local,
            width=width * (factor if number >= spec.num_layers - num_shared else 1),
        )
        for number, local in enumerate(is_local)
    ]
    size = config.get("hidden_size_per_layer_input", int) or 0
    if size:
        config.only("vocab_size_per_layer_input", spec.vocab_size)
    spec = replace(spec, layer_input_size=size, logit_softcap=config.get("final_logit_softcapping", float) or 0.0)
    spec = _with_layers(spec, layers, window, num_shared, config.path)
    if not config.get("enable_moe_block", bool):
        return spec
    mlp = ExpertsMlp(
        num_experts=config.require("num_experts", int),
        num_experts_per_token=config.require("top_k_experts", int),
        intermediate_size=config.require("moe_intermediate_size", int),
    )
    return _with_mixture(spec, mlp, width, config.path)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply Gemma's keys. The spec's rotation is for layers without a window."""
    key, number = file.architecture, spec.num_layers
    head_dim = spec.layers[0].attention.head_dim
    local_dim = file.get(f"{key}.attention.key_length_swa", int) or head_dim
    for name, expected in (("attention.value_length_swa", local_dim), ("rope.dimension_count_swa", local_dim)):
        if (found := file.get(f"{key}.{name}", int, expected)) != expected:
            raise checks.unsupported(file.path, f"{key}.{name} is {found}", f"{expected}, as key_length_swa says, is")
    kv_heads = file.numbers_by_layer(f"{key}.attention.head_count_kv", number)
    widths = file.numbers_by_layer(f"{key}.feed_forward_length", number)
    window, is_local = file.require(f"{key}.attention.sliding_window", int), local_layers_of_gguf(file, spec)
    check_window(window, is_local, file.path)
    layers = [
        _Layer(
            head_dim=local_dim if local else head_dim,
            num_kv_heads=kv_heads[layer],
            is_local=local,
            reuses_keys=f"blk.{layer}.attn_v.weight" not in file.tensors,
            width=widths[layer],
        )
        for layer, local in enumerate(is_local)
    ]
    spec = replace(
        spec,
        layer_input_size=file.get(f"{key}.embedding_length_per_layer_input", int) or 0,
        logit_softcap=file.get(f"{key}.final_logit_softcapping", float) or 0.0,
    )
    spec = _with_layers(spec, layers, window, file.get(f"{key}.attention.shared_kv_layers", int) or 0, file.path)
    spec = with_local_base(spec, rope_base(file, f"{key}.rope.freq_base_swa", 10_000.0))
    if not file.get(f"{key}.expert_count", int):
        return spec
    if len(set(widths)) > 1:
        raise checks.unsupported(file.path, f"{key}.feed_forward_length has several values", "a single one is")
    return _with_mixture(spec, read_gguf_experts(file), widths[0], file.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """The settings that may differ from layer to layer."""

    head_dim: int
    num_kv_heads: int
    is_local: bool
    reuses_keys: bool  # as values
    width: int  # of the MLP


def _with_layers(spec: ModelSpec, layers: Sequence[_Layer], window: int, num_shared: int, path: Path) -> ModelSpec:
    """Return the spec with these layers. The last `num_shared` read the KV of the last earlier layer of their kind."""
    if not 0 <= num_shared < spec.num_layers:
        raise damaged(path, f"{num_shared} of {spec.num_layers} layers read the keys and values of others")
    if not 0 <= spec.layer_input_size * spec.num_layers <= checks.LIMITS["intermediate_size"]:
        raise damaged(path, f"each layer gets {spec.layer_input_size} columns of a second embedding")
    num_heads, first_shared = spec.layers[0].attention.num_heads, spec.num_layers - num_shared
    for layer in set(layers):
        sizes = {"num_heads": num_heads, "num_kv_heads": layer.num_kv_heads, "head_dim": layer.head_dim}
        checks.check_sizes({**sizes, "intermediate_size": layer.width}, path)

    def source(number: int) -> int | None:
        found = [other for other in range(first_shared) if layers[other].is_local == layers[number].is_local]
        if number < first_shared:
            return None
        if not found or (layers[found[-1]].head_dim, layers[found[-1]].num_kv_heads) != (
            layers[number].head_dim,
            layers[number].num_kv_heads,
        ):
            raise damaged(path, f"no layer stores the keys and values that layer {number} reads")
        return found[-1]

    def own(number: int, attention: AttentionSpec) -> AttentionSpec:
        layer, kv_layer = layers[number], source(number)
        return replace(
            attention,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            scale=1.0,
            window=window if layer.is_local else 0,
            kv_layer=kv_layer,
            has_keys_as_values=layer.reuses_keys and kv_layer is None,
        )

    spec = replace(spec, embed_scale=spec.hidden_size**0.5).with_attention(own)
    mlps = [GatedMlp(intermediate_size=layer.width, activation=_ACTIVATION) for layer in layers]
    return spec.with_layers(lambda number, layer: replace(layer, mlp=mlps[number]))


def _with_mixture(spec: ModelSpec, mlp: ExpertsMlp, width: int, path: Path) -> ModelSpec:
    """Return the spec with experts beside the MLP of each layer, which has `width` columns."""
    return with_experts(spec, replace(mlp, activation=_ACTIVATION, has_share_scale=True, shared_size=width), path)


_HF_LAYER: Mapping[str, str | Parts] = {
    **GEMMA2.hf_layer,
    "layer_scalar": "scale",
    "per_layer_input_gate.weight": "input_gate",
    "per_layer_projection.weight": "input_projection",
    "post_per_layer_input_norm.weight": "post_input_norm",
    "router.proj.weight": "router",
    "router.scale": "router_norm",
    "router.per_expert_scale": "share_scale",
    **EXPERTS,
    "post_feedforward_layernorm_1.weight": "post_dense_norm",
    "pre_feedforward_layernorm_2.weight": "mixture_norm",
    "post_feedforward_layernorm_2.weight": "post_mixture_norm",
}
_GGUF_LAYER: Mapping[str, str | Parts] = {
    **GGUF_LAYER,
    **GGUF_EXPERTS,
    "layer_output_scale.weight": "scale",
    "inp_gate.weight": "input_gate",
    "proj.weight": "input_projection",
    "post_norm.weight": "post_input_norm",
    "ffn_gate_inp.scale": "router_norm",
    "ffn_down_exps.scale": "share_scale",
    "post_ffw_norm_1.weight": "post_dense_norm",
    "pre_ffw_norm_2.weight": "mixture_norm",
    "post_ffw_norm_2.weight": "post_mixture_norm",
}
GEMMA4 = Architecture(
    describe=describe,
    of_hf=_of_hf,
    of_gguf=_of_gguf,
    hf_values=_values,
    hf_head_dims=lambda config: {_FULL: config.require("global_head_dim", int)},
    hf_layer=_HF_LAYER,
    hf_top={
        **HF_TOP,
        "model.embed_tokens_per_layer.weight": "layer_embed",
        "model.per_layer_model_projection.weight": "layer_projection",
        "model.per_layer_projection_norm.weight": "layer_projection_norm",
    },
    gguf_layer=_GGUF_LAYER,
    gguf_top={
        **GGUF_TOP,
        "per_layer_token_embd.weight": "layer_embed",
        "per_layer_model_proj.weight": "layer_projection",
        "per_layer_proj_norm.weight": "layer_projection_norm",
    },
    has_partial_rope=True,
    has_local_base_in_gguf=True,
)
GEMMA4_UNIFIED = replace(GEMMA4, hf_values=partial(_values, defaults=_UNIFIED_DEFAULTS))
"""The 12B: it has neither experts nor a second embedding."""
