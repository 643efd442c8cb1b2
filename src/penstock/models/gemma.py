"""Gemma 2 and 3: norms before and after both halves of a layer, windows in most layers, embeddings times sqrt(hidden_size).

Gemma 2 caps scores and logits. Gemma 3 norms queries and keys per head instead, and its local layers turn at another speed.
Sources: Gemma 2, arXiv 2408.00118; Gemma 3, arXiv 2503.19786; modeling_gemma2.py and modeling_gemma3.py of transformers;
src/models/gemma2.cpp and gemma3.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from penstock.models import rope
from penstock.models.architectures import HF_LAYER, Architecture
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, with_windows
from penstock.models.program import Program
from penstock.types.model_spec import GatedMlp, ModelSpec, Rotation

if TYPE_CHECKING:
    from penstock.models.gguf_file import GgufFile

_LOCAL_BASE = 10000.0
_PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every so many layers one sees all positions."""
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""The scale of its scores follows from other sizes than that of all others."""


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        normed = build.norm(x, f"{at}.attn_norm")
        attended = build.attention(layer, normed, qk_norms="heads" if spec.architecture == "gemma3" else None)
        x, attended = build.gather_after_last(layer, x, attended)
        projected = build.linear(attended, f"{at}.o", "projected", spec.hidden_size)
        build.add(x, build.norm(projected, f"{at}.post_attn_norm", projected))
        normed = build.norm(x, f"{at}.mlp_norm")
        down = build.linear(build.activated(layer, normed), f"{at}.down", "projected", spec.hidden_size)
        build.add(x, build.norm(down, f"{at}.post_mlp_norm", down))
    return build.finish(build.norm(x, "norm"))


def _of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_activation", "gelu_pytorch_tanh")
    config.only("attention_bias", False)
    config.only("use_bidirectional_attention", False)
    scale, logit_softcap = config.positive("query_pre_attn_scalar") ** -0.5, config.get("final_logit_softcapping", float)
    period = config.get("sliding_window_pattern", int) or _PERIODS[spec.architecture]
    window = config.require("sliding_window", int)
    return with_windows(config, _with(spec, scale, logit_softcap), window, local_layers_of_period(spec, period))


def _of_gemma2_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    softcap = config.get("attn_logit_softcapping", float) or 0.0
    return _of_hf(config, spec).with_attention(lambda _, attention: replace(attention, softcap=softcap))


def _of_gemma3_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Files of release 5 of transformers have rotary parameters by the type of layer, which are read already."""
    config.only("attn_logit_softcapping", None)
    found = _of_hf(config, spec)
    local = (config.get("rope_parameters", dict) or {}).get("sliding_attention")
    if local is None:
        return _with_local_base(found, config.positive("rope_local_base_freq"))
    if config.values.get("rope_scaling") or not isinstance(local, dict) or local.get("rope_theta") is None:
        raise config.error("rope_parameters of sliding_attention lack rope_theta, or rope_scaling stands beside them")
    return found


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """The file has no key for the scale of the scores. Keys that it leaves out have the values that llama.cpp takes."""
    key, attention = spec.architecture, spec.layers[0].attention
    is_27b = spec.num_layers == _LAYERS_OF_27B[key]
    scale = (spec.hidden_size / attention.num_heads if is_27b else attention.head_dim) ** -0.5
    found = _with(spec, scale, file.get(f"{key}.final_logit_softcapping", float, 30.0 if key == "gemma2" else None))
    window = file.get(f"{key}.attention.sliding_window", int, 4096 if key == "gemma2" else None)
    if window:
        found = found.with_windows(window, local_layers_of_gguf(file, spec, _PERIODS[key]))
    if key == "gemma3":
        return _with_local_base(found, file.get("gemma3.rope.freq_base_swa", float) or _LOCAL_BASE)
    softcap = file.get("gemma2.attn_logit_softcapping", float, 50.0) or 0.0
    return found.with_attention(lambda _, attention: replace(attention, softcap=softcap))


def local_layers_of_gguf(file: GgufFile, spec: ModelSpec, period: int) -> list[bool]:
    """Whether each layer has a window. As in llama.cpp the file has a value per layer, or another period, or neither."""
    key = f"{file.require('general.architecture', str)}.attention.sliding_window_pattern"
    if isinstance(file.metadata.get(key), list):
        is_local = file.get_list(key, bool)
        if len(is_local) != spec.num_layers:
            raise file.error(f"{key} has {len(is_local)} values for {spec.num_layers} layers")
        return is_local
    return local_layers_of_period(spec, file.get(key, int) or period)


def local_layers_of_period(spec: ModelSpec, period: int) -> list[bool]:
    """Whether each layer has a window: all but the last of so many."""
    return [(layer + 1) % period != 0 for layer in range(spec.num_layers)]


def _with(spec: ModelSpec, scale: float, logit_softcap: float | None) -> ModelSpec:
    mlp = GatedMlp(intermediate_size=spec.layers[0].mlp.intermediate_size, activation="gelu_tanh")
    spec = replace(spec, embed_scale=spec.hidden_size**0.5, logit_softcap=logit_softcap or 0.0)
    return spec.with_layers(lambda _, layer: replace(layer, mlp=mlp, mixer=replace(layer.attention, scale=scale)))


def _with_local_base(spec: ModelSpec, base: float) -> ModelSpec:
    """The same with unscaled rotations of this base in layers that have a window."""
    rotation = Rotation(inv_freq=rope.inverse_frequencies(spec.layers[0].attention.head_dim, base))
    return spec.with_attention(lambda _, attention: replace(attention, rotation=rotation) if attention.window else attention)


_LAYER = {
    **HF_LAYER,
    "post_attention_layernorm.weight": "post_attn_norm",
    "pre_feedforward_layernorm.weight": "mlp_norm",
    "post_feedforward_layernorm.weight": "post_mlp_norm",
}
_SIZES_2B = {
    "vocab_size": 256_000,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
"""Defaults of transformers. Files of larger models say little more than what differs."""


def _gemma2_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_SIZES_2B, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **values}


def _gemma3_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    bases = {"rope_theta": 1e6, "rope_local_base_freq": _LOCAL_BASE}
    return {**_SIZES_2B, "vocab_size": 262_208, "max_position_embeddings": 131_072, **bases, **values}


GEMMA2 = Architecture(
    describe=describe,
    of_hf=_of_gemma2_hf,
    of_gguf=_of_gguf,
    hf_values=_gemma2_values,
    hf_layer=_LAYER,
    hf_norm_offset=1.0,
)
GEMMA3 = Architecture(
    describe=describe,
    of_hf=_of_gemma3_hf,
    of_gguf=_of_gguf,
    hf_values=_gemma3_values,
    hf_layer=_LAYER,
    has_local_base_in_gguf=True,
    hf_norm_offset=1.0,
)
