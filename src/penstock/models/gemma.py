"""Gemma, and architectures with norms after attention and after the MLP: GLM 4 of 2025, OLMo 2 and 3, and EXAONE 4.

Sources: arXiv 2403.08295, 2408.00118 and 2503.19786 (Gemma), 2501.00656 (OLMo 2), 2507.11407 (EXAONE 4); modeling_NAME.py of
transformers and src/models/NAME.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import checks, llama
from penstock.models.architectures import GATE_AND_UP, GGUF_LAYER, HF_LAYER, Architecture
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import (
    local_layers,
    local_layers_of_gguf,
    rope_base,
    with_gated_mlps,
    with_local_base,
    with_windows,
    without_global_rotations,
)
from penstock.types.model_spec import Activation, AttentionSpec, ModelSpec

_LOCAL_THETA = {"rope_local_base_freq": 10000.0}
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Layers of the largest models. They scale scores by (hidden_size / num_heads)**-0.5, others by head_dim**-0.5."""


# Gemma 1: Llama with norms stored minus 1 and scaled embeddings.


def _of_gemma1_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Apply Gemma's keys. `gelu` in a published file means the approximation by tanh."""
    config.only_all(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention=False)
    activation = read_activation(config, "hidden_act", "gelu")
    return _with_gemma1(spec, "gelu_tanh" if activation == "gelu" else activation)


def _with_gemma1(spec: ModelSpec, activation: Activation) -> ModelSpec:
    return with_gated_mlps(replace(spec, embed_scale=spec.hidden_size**0.5), activation)


GEMMA = Architecture(
    describe=llama.describe,
    of_hf=_of_gemma1_hf,
    of_gguf=lambda _, spec: _with_gemma1(spec, "gelu_tanh"),
    hf_values=lambda values: {"head_dim": 256, "tie_word_embeddings": True, **values},
    hf_norm_offset=1.0,
)


# Gemma 2 and 3: post-norms, too; windows in most layers. Gemma 2 soft-caps scores and logits. Gemma 3 norms queries and
# keys per head instead, and its local layers have another RoPE base.


def _of_gemma_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(hidden_activation="gelu_pytorch_tanh", attention_bias=False, use_bidirectional_attention=False)
    scale, logit_softcap = config.positive("query_pre_attn_scalar") ** -0.5, config.get("final_logit_softcapping", float)
    window, period = config.require("sliding_window", int), config.get("sliding_window_pattern", int)
    return with_windows(config, _with_gemma(spec, scale, logit_softcap), window, local_layers(spec, period))


def _of_gemma2_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _of_gemma_hf(config, spec).with_attention_fields(softcap=config.get("attn_logit_softcapping", float) or 0.0)


def _of_gemma3_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("attn_logit_softcapping", None)
    return _with_local_rotations(config, _of_gemma_hf(config, spec), "rope_local_base_freq")


def _with_local_rotations(config: JsonFile, spec: ModelSpec, base: str) -> ModelSpec:
    """Return the spec with unscaled rotations in windowed layers. `base` is the key of their base.

    If `rope_parameters` has an entry per layer type (transformers 5), `read_spec` has already applied it.
    """
    parameters = config.get("rope_parameters", dict)
    if not parameters:
        return with_local_base(spec, config.positive(base))
    local = parameters.get("sliding_attention")
    if config.values.get("rope_scaling") or not isinstance(local, dict) or local.get("rope_theta") is None:
        raise config.error("rope_parameters of sliding_attention lack rope_theta, or rope_scaling stands beside them")
    return spec


def _of_gemma_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply Gemma's keys. No key has the scale of attention scores. Missing keys have llama.cpp's values."""
    key, attention = file.architecture, spec.layers[0].attention
    is_27b = spec.num_layers == _LAYERS_OF_27B.get(key)
    scale = (spec.hidden_size / attention.num_heads if is_27b else attention.head_dim) ** -0.5
    found = _with_gemma(spec, scale, file.get(f"{key}.final_logit_softcapping", float, 30.0 if key == "gemma2" else None))
    window = file.get(f"{key}.attention.sliding_window", int, 4096 if key == "gemma2" else None)
    if window:
        found = found.with_windows(window, local_layers_of_gguf(file, spec))
    if key != "gemma2":
        return with_local_base(found, rope_base(file, f"{key}.rope.freq_base_swa", _LOCAL_THETA["rope_local_base_freq"]))
    return found.with_attention_fields(softcap=file.get("gemma2.attn_logit_softcapping", float, 50.0))


def _with_gemma(spec: ModelSpec, scale: float, logit_softcap: float | None) -> ModelSpec:
    spec = replace(_with_gemma1(spec, "gelu_tanh"), logit_softcap=logit_softcap or 0.0)
    return spec.with_attention_fields(scale=scale)


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
"""Defaults of transformers. Files of larger models list little but the differences."""


def _gemma2_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**_SIZES_2B, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **values}


def _gemma3_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    more = {"vocab_size": 262_208, "max_position_embeddings": 131_072, "rope_theta": 1e6}
    return {**_SIZES_2B, **more, **_LOCAL_THETA, **values}


GEMMA2 = Architecture(
    describe=partial(llama.describe, norms="both"),
    of_hf=_of_gemma2_hf,
    of_gguf=_of_gemma_gguf,
    hf_values=_gemma2_values,
    hf_layer={
        **HF_LAYER,
        "post_attention_layernorm.weight": "post_attn_norm",
        "pre_feedforward_layernorm.weight": "mlp_norm",
        "post_feedforward_layernorm.weight": "post_mlp_norm",
    },
    hf_norm_offset=1.0,
)
GEMMA3 = replace(
    GEMMA2,
    describe=partial(llama.describe, norms="both", qk_norms="heads"),
    of_hf=_of_gemma3_hf,
    hf_values=_gemma3_values,
    has_local_base_in_gguf=True,
)


# VaultGemma (arXiv 2510.15001): Gemma 2 without post-norms.

VAULTGEMMA = replace(GEMMA2, describe=llama.describe, hf_layer={**HF_LAYER, "pre_feedforward_layernorm.weight": "mlp_norm"})


# EmbeddingGemma (arXiv 2509.20354): Gemma 3 with bidirectional attention, half a window to each side.


def _of_embedding_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if not config.require("use_bidirectional_attention", bool):
        raise checks.unsupported(config.path, "use_bidirectional_attention is False", "only True is, in a Gemma3TextModel")
    rest = {key: value for key, value in config.values.items() if key != "use_bidirectional_attention"}
    return _with_halves(_of_gemma3_hf(JsonFile(config.path, rest), spec))


def _with_halves(spec: ModelSpec) -> ModelSpec:
    def changed(_: int, attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, mask="all", window=attention.window // 2 + 1 if attention.window else 0)

    return spec.with_attention(changed)


EMBEDDING_GEMMA = replace(
    GEMMA3,
    is_encoder=True,
    of_hf=_of_embedding_hf,
    of_gguf=lambda file, spec: _with_halves(_of_gemma_gguf(file, spec)),
    hf_name=lambda name: f"model.{name.removeprefix('model.')}",
)


# GLM 4 (Z.ai): norms as in Gemma; partial RoPE on neighbouring pairs


def _of_glm4_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Refuse GLM 4.1V and GLM-OCR, which have the same name."""
    if any(file.get_list("glm4.rope.dimension_sections", int)):
        raise checks.unsupported(file.path, "glm4.rope.dimension_sections is set", "text-only models are")
    if num_more := file.get("glm4.nextn_predict_layers", int):
        raise checks.unsupported(file.path, f"glm4.nextn_predict_layers is {num_more}", "only 0 is")
    return spec


GLM4 = replace(
    llama.GLM,
    describe=partial(llama.describe, norms="both"),
    of_gguf=_of_glm4_gguf,
    hf_layer={
        **llama.GLM.hf_layer,
        "post_self_attn_layernorm.weight": "post_attn_norm",
        "post_attention_layernorm.weight": "mlp_norm",
        "post_mlp_layernorm.weight": "post_mlp_norm",
    },
    gguf_layer={**GGUF_LAYER, "ffn_up.weight": GATE_AND_UP},
    is_interleaved_in_gguf=True,
)


# OLMo 2 norms queries and keys over all heads together and has only post-norms. OLMo 3 adds windows in three of four layers;
# YaRN scales only the others' rotation. EXAONE 4 (LG) norms queries and keys per head;
# its larger models have windows, and rotate only in layers with a window.


def _of_olmo2_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the windows of OLMo 3: its files name the same architecture."""
    window = file.get("olmo2.attention.sliding_window", int)
    if not window:
        return spec
    base = rope_base(file, "olmo2.rope.freq_base", 10000.0)
    return with_local_base(spec.with_windows(window, local_layers_of_gguf(file, spec)), base)


def _of_olmo3_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("attention_bias", False)
    window = config.require("sliding_window", int)
    spec = with_windows(config, llama.of_hf(config, spec), window, local_layers(spec))
    return _with_local_rotations(config, spec, "rope_theta")


def of_exaone4_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Apply EXAONE's keys. A `sliding_window` of null means none; a missing one 4096, as in transformers."""
    config.only("hidden_act", "silu")
    window = config.get("sliding_window", int) if "sliding_window" in config.values else 4096
    if window is None:
        return spec
    return without_global_rotations(with_windows(config, spec, window, _local_exaone4_layers(config, spec)))


def _local_exaone4_layers(config: JsonFile, spec: ModelSpec) -> list[bool]:
    """Return which layers have a window. The pattern is a period, or a string such as LLLG, where L is a window."""
    if not isinstance(config.values.get("sliding_window_pattern"), str):
        return local_layers(spec, config.get("sliding_window_pattern", int))
    letters = config.require("sliding_window_pattern", str)
    if not letters or set(letters) - set("LG"):
        raise config.error(f"sliding_window_pattern is {letters!r}, not a string of L and G")
    return [letters[layer % len(letters)] == "L" for layer in range(spec.num_layers)]


def _of_exaone4_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.get("exaone4.attention.sliding_window", int)
    if not window:
        return spec
    return without_global_rotations(spec.with_windows(window, local_layers_of_gguf(file, spec)))


OLMO2 = Architecture(
    describe=partial(llama.describe, norms="behind", qk_norms="rows"),
    of_hf=llama.of_hf,
    of_gguf=_of_olmo2_gguf,
    hf_layer={
        **HF_LAYER,
        "post_attention_layernorm.weight": "post_attn_norm",
        "post_feedforward_layernorm.weight": "post_mlp_norm",
    },
)
OLMO3 = replace(OLMO2, of_hf=_of_olmo3_hf, hf_values=lambda values: {"rope_theta": 5e5, "sliding_window": 4096, **values})
EXAONE4 = replace(
    OLMO2,
    describe=partial(llama.describe, norms="behind", qk_norms="heads"),
    of_hf=of_exaone4_hf,
    of_gguf=_of_exaone4_gguf,
)
