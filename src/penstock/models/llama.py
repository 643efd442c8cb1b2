"""Llama, and the architectures that differ from it in settings and in the names of their tensors.

Sources: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245; modeling_NAME.py of transformers and src/models/NAME.cpp
of llama.cpp for each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock.models.architectures import (
    GATE_AND_UP,
    GGUF_LAYER,
    GGUF_TOP,
    HF_LAYER,
    OLD_KEYS,
    QKV,
    QKV_BIAS,
    Architecture,
    Head,
    HeadLayer,
    Parts,
    with_biases,
    with_defaults,
)
from penstock.models.decoder import Decoder, QkNorms
from penstock.models.gguf_file import GgufFile, matrix_shape
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import GGUF_EXPERTS, experts_of_gguf, local_layers, with_gpt_layers, with_local_layers, with_windows
from penstock.models.program import Program
from penstock.models.rope import inverse_frequencies
from penstock.types.model_spec import Activation, AttentionSpec, LayerSpec, ModelSpec, PlainMlp, Rotation


def describe(
    spec: ModelSpec,
    *,
    qk_norms: QkNorms = None,
    norms: Literal["before", "behind", "both"] = "before",
    has_positions: bool = False,
    has_embed_norm: bool = False,
    has_first_norm: bool = True,
    dense: str = "",
) -> Program:
    """Return the program of one step of a Llama-like model. Attention and MLP both add to the residual stream.

    `norms`: pre-norms (`before`), post-norms (`behind`) or both. `has_positions`: positions are learned embeddings.
    `has_embed_norm`: the embeddings are normed, too. Without `has_first_norm`, layer 0 attends to them as they are.
    `dense`: name prefix of the matrices of an MLP without experts.
    """
    build = Decoder(spec)
    x = build.add_types(build.embed())
    x = build.add_positions(x) if has_positions else x
    x = build.norm(x, "embed_norm", x) if has_embed_norm else x
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        has_norm = norms != "behind" and (layer > 0 or has_first_norm)
        normed = build.norm(x, f"{at}.attn_norm") if has_norm else x
        mixed = build.mix(layer, normed, qk_norms=qk_norms)
        x, mixed = build.gather_after_last(layer, x, mixed)
        if norms == "before":
            build.add_output(layer, x, mixed)
            build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"), dense=dense)
        else:
            branch = build.linear(mixed, f"{at}.o", "projected", spec.hidden_size)
            build.add(x, build.norm(branch, f"{at}.post_attn_norm", branch))
            normed = x if norms == "behind" else build.norm(x, f"{at}.mlp_norm")
            branch = build.mlp(layer, normed)
            build.add(x, build.norm(branch, f"{at}.post_mlp_norm", branch))
    return build.finish(build.norm(x, "norm"))


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "silu")
    return spec


def _hf_head(hf_class: str, _: JsonFile) -> Head | None:
    return _last_token("score") if hf_class.endswith("ForSequenceClassification") else None


def _last_token(name: str) -> Head:
    return Head("last", (HeadLayer(name, is_last=True, has_bias=False),))


def of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    key = file.architecture
    if file.get(f"{key}.expert_count", int):  # GGUF files of Mixtral call themselves llama
        spec = experts_of_gguf(file, spec)
    return spec.with_windows(file.get(f"{key}.attention.sliding_window", int) or 0, [True] * spec.num_layers)


LLAMA = Architecture(
    describe=describe,
    of_hf=of_hf,
    of_gguf=of_gguf,
    hf_head=_hf_head,
    gguf_layer={**GGUF_LAYER, **GGUF_EXPERTS},
    is_interleaved_in_gguf=True,
)


# Mistral (arXiv 2310.06825) and Ministral. The queries of Ministral 3 grow with their position: models/rope.py.


def _is_ministral3(values: Mapping[str, Any]) -> bool:
    return values.get("model_type") == "ministral3" or values.get("architectures") == ["Ministral3ForCausalLM"]


def _mistral_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the first Mistral 7B's window if the key is missing. Null means no window."""
    return values if _is_ministral3(values) else {"sliding_window": 4096, **values}


def _of_mistral(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if _is_ministral3(config.values):
        config.require("rope_parameters", dict)  # transformers' defaults fit only one model size
    return with_windows(config, of_hf(config, spec), config.get("sliding_window", int), [True] * spec.num_layers)


MISTRAL = Architecture(
    describe=describe,
    of_hf=_of_mistral,
    of_gguf=of_gguf,
    hf_values=_mistral_values,
    hf_head=_hf_head,
    is_interleaved_in_gguf=True,
)


# CWM (Meta; arXiv 2510.02387): Llama 3 with windows in three of four layers.

_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_CWM_DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192}


def values_with_rope(values: Mapping[str, Any], *, defaults: Mapping[str, Any], rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with `defaults`, and with the rotary parameters `rope` if it has none."""
    has_rope = values.get("rope_parameters") or values.get("rope_scaling")
    return {**defaults, **values, **({} if has_rope else {"rope_parameters": rope})}


def _of_cwm(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return with_windows(config, of_hf(config, spec), config.get("sliding_window", int), local_layers(spec, 4, first=0))


CWM = Architecture(
    describe=describe, of_hf=_of_cwm, hf_values=partial(values_with_rope, defaults=_CWM_DEFAULTS, rope=_CWM_ROPE)
)


# Qwen 2 and 2.5, which have biases on q, k and v; and Qwen 3 (arXiv 2505.09388), dense, with norms of q and k per head.


def _of_qwen(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Add windows if `use_sliding_window` is on: in the layers that `layer_types` names, or else in the last ones."""
    config.only("hidden_act", "silu")
    if not config.get("use_sliding_window", bool):
        return spec
    window, first = config.require("sliding_window", int), config.get("max_window_layers", int)
    return with_windows(config, spec, window, [layer >= (28 if first is None else first) for layer in range(spec.num_layers)])


def _qwen3_gguf_head(file: GgufFile) -> Head | None:
    """Return the head of a reranker, or None. llama.cpp's converter builds it from the output's rows for `yes` and `no`."""
    weight = file.tensors.get("cls.output.weight")
    if weight is None:
        return None
    labels = file.get_list(f"{file.architecture}.classifier.output_labels", str)
    return replace(_last_token("cls.output"), is_difference=labels == ["yes", "no"] and matrix_shape(weight)[0] == 2)


QWEN2 = Architecture(describe=describe, of_hf=_of_qwen, of_gguf=of_gguf, hf_head=_hf_head)
QWEN2_VL = replace(
    QWEN2, hf_values=lambda values: {"rope_theta": 1e6, "sliding_window": 4096, "max_window_layers": 80, **values}
)
"""The text part of Qwen 2 VL and 2.5 VL. The three positions of a token are equal in texts."""
QWEN3 = Architecture(
    describe=partial(describe, qk_norms="heads"),
    of_hf=_of_qwen,
    hf_values=lambda values: {"head_dim": 128, **values},
    hf_head=_hf_head,
    gguf_head=_qwen3_gguf_head,
)


# Arcee (AFM 4.5B): an ungated MLP with squared ReLU (arXiv 2109.08668).


ARCEE = Architecture(
    describe=describe,
    of_hf=lambda config, spec: spec.with_plain_mlps(read_activation(config, "hidden_act", "relu2")),
    of_gguf=lambda _, spec: spec.with_plain_mlps("relu2"),
    is_interleaved_in_gguf=True,
)


# Apertus (Swiss AI): per-head norms of q and k, and an ungated MLP with xIELU (arXiv 2411.13010), an activation with three
# learned numbers.

_APERTUS_ROPE = {**_CWM_ROPE, "rope_theta": 12e6, "factor": 8.0}


def _of_apertus(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("hidden_act", "xielu")

    def with_xielu(_: int, layer: LayerSpec) -> LayerSpec:
        assert isinstance(layer.mlp, PlainMlp)
        return replace(layer, mlp=replace(layer.mlp, has_xielu=True))

    return spec.with_plain_mlps("elu").with_layers(with_xielu)


def _softplus(_: ModelSpec, values: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.logaddexp(values, np.float32(0))


APERTUS = Architecture(
    describe=partial(describe, qk_norms="heads"),
    of_hf=_of_apertus,
    hf_values=partial(values_with_rope, defaults={"rope_theta": 12e6, "rms_norm_eps": 1e-5}, rope=_APERTUS_ROPE),
    # `eps` caps negative inputs at -1e-6; ignoring it changes activations by as much.
    hf_name=lambda name: None if name.endswith(".act_fn.eps") else name,
    hf_layer={
        **HF_LAYER,
        "attention_layernorm.weight": "attn_norm",
        "feedforward_layernorm.weight": "mlp_norm",
        "mlp.act_fn.alpha_p": "act_p",
        "mlp.act_fn.alpha_n": "act_n",
        "mlp.act_fn.beta": "act_beta",
    },
    hf_changed={"act_p": _softplus, "act_n": _softplus},
)


# Seed-OSS (ByteDance): biases of q, k and v, and a separate setting for the output projection's.


SEED_OSS = Architecture(
    describe=describe,
    of_hf=of_hf,
    hf_values=lambda values: {"attention_bias": True, "head_dim": 128, **values},
    gguf_layer={**GGUF_LAYER, "post_attention_norm.weight": "mlp_norm"},
)


# SmolLM3: every fourth layer has no rotation (NoPE, arXiv 2501.18795).


def _of_smollm3(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("use_sliding_window", False)
    spec = of_hf(config, spec)
    if (listed := config.get("no_rope_layers", list)) is None:
        return _with_rotations(spec, local_layers(spec, config.get("no_rope_layer_interval", int)))
    if len(listed) != spec.num_layers or not all(value in (0, 1) for value in listed):
        raise config.error(f"no_rope_layers needs 0 or 1 for each of {spec.num_layers} layers")
    return _with_rotations(spec, listed)


def _with_rotations(spec: ModelSpec, has_rotation: Sequence[int]) -> ModelSpec:
    return spec.with_attention(lambda layer, attention: attention if has_rotation[layer] else replace(attention, rotation=None))


SMOLLM3 = Architecture(
    describe=describe,
    of_hf=_of_smollm3,
    of_gguf=lambda file, spec: _with_rotations(of_gguf(file, spec), local_layers(spec)),
    hf_values=lambda values: {"rope_theta": 2e6, "tie_word_embeddings": True, **values},
    is_interleaved_in_gguf=True,
)


# Granite 3 (IBM): scale factors for embeddings, attention scores, residual branches and logits.

_FACTORS = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")


def granite_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**dict.fromkeys(_FACTORS, 1.0), **values}


def of_granite_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    embed, scores, residual, logits = (config.positive(key) for key in _FACTORS)
    return _with_factors(of_hf(config, spec), embed, scores, residual, logits)


def of_granite_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return with_granite_factors(file, of_gguf(file, spec))


def with_granite_factors(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply Granite's scale factors. A missing one is 1, or Llama's for the attention scores."""
    key = file.architecture
    if file.get(f"{key}.rope.scaling.finetuned", bool) is False:
        spec = spec.with_attention_fields(rotation=None)
    names = ("embedding_scale", "residual_scale", "logit_scale")
    embed, residual, logits = (file.get(f"{key}.{name}", float) or 1.0 for name in names)
    scores = file.get(f"{key}.attention.scale", float) or None
    return _with_factors(spec, embed, scores, residual, logits)


def _with_factors(spec: ModelSpec, embed: float, scores: float | None, residual: float, logits: float) -> ModelSpec:
    spec = replace(spec, embed_scale=embed, residual_scale=residual, logit_scale=1.0 / logits)
    return spec.with_attention_fields(scale=scores)


GRANITE = Architecture(
    describe=describe,
    of_hf=of_granite_hf,
    of_gguf=of_granite_gguf,
    hf_values=granite_values,
    is_interleaved_in_gguf=True,
)


# HyperCLOVA X SEED Think (NAVER): Granite with post-norms, too. Its logit factor multiplies; Granite's divides.


def _of_hyperclovax(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("use_post_norm", True)
    head_scale = spec.layers[0].attention.head_dim ** -0.5
    given = {"attention_multiplier": head_scale, **{key: value for key, value in config.values.items() if value is not None}}
    embed, scores, residual, logits = (JsonFile(config.path, given).positive(key) for key in _FACTORS)
    return _with_factors(of_hf(config, spec), embed, scores, residual, 1.0 / logits)


HYPERCLOVAX = Architecture(
    describe=partial(describe, norms="both"),
    of_hf=_of_hyperclovax,
    hf_values=lambda values: {**{key: 1.0 for key in _FACTORS if key != "attention_multiplier"}, **values},
    hf_layer={**HF_LAYER, "post_norm1.weight": "post_attn_norm", "post_norm2.weight": "post_mlp_norm"},
)


# Granite with windows (IBM's Swash models): sinks, windows in three of four layers, and a RoPE base per layer.


def granite_swa_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return granite_values({"sliding_window": 128, **values})


def with_granite_windows(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Return the spec with sinks, windows, and rotations by `layer_rope_theta` (0: no rotation)."""
    bases = config.get("layer_rope_theta", list)
    if bases is not None:
        if len(bases) != spec.num_layers or not all(
            type(base) in (int, float) and (base == 0 or 1 < base < 1e12) for base in bases
        ):
            raise config.error(f"layer_rope_theta needs 0 or a base for each of {spec.num_layers} layers")
        config.only("rope_scaling", None)
        JsonFile(config.path, config.get("rope_parameters", dict) or {}).only("rope_type", "default")

    def changed(layer: int, attention: AttentionSpec) -> AttentionSpec:
        if bases is None:
            return replace(attention, has_sinks=True)
        base = float(bases[layer])
        turn = Rotation(inv_freq=inverse_frequencies(attention.head_dim, base)) if base else None
        return replace(attention, has_sinks=True, rotation=turn)

    spec = spec.with_attention(changed)
    return with_windows(config, spec, config.get("sliding_window", int), local_layers(spec, 4, first=0))


GRANITE_SWA = Architecture(
    describe=describe,
    of_hf=lambda config, spec: with_granite_windows(config, of_granite_hf(config, spec)),
    hf_values=lambda values: granite_swa_values({"tie_word_embeddings": True, **values}),
    hf_layer={**HF_LAYER, "self_attn.sinks": "sinks"},
)


# Jais 2 (Inception; not the first, which has ALiBi): layer norms, biases, and an MLP without a gate.

JAIS2 = Architecture(
    describe=describe,
    of_hf=lambda config, spec: with_gpt_layers(spec, read_activation(config, "hidden_act", "relu2")),
    hf_values=lambda values: {
        "attention_bias": True,
        "mlp_bias": True,
        **values,
        "rms_norm_eps": values.get("layer_norm_eps", 1e-5),
    },
)


# Hunyuan, dense (Tencent): norms of q and k after RoPE, whose base has a fixed factor.


def hunyuan_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with the kind `ntk_alpha` for a `dynamic` rotation with `alpha`. transformers calls both `dynamic`."""
    return _with_kind(values, "dynamic", "ntk_alpha", needed="alpha")


def _with_kind(values: Mapping[str, Any], old: str, new: str, *, needed: str = "") -> Mapping[str, Any]:
    """Return config.json with the kind `new` for a rotation called `old`, if it has the key `needed`."""
    for key in ("rope_scaling", "rope_parameters"):
        scaling = values.get(key)
        if not isinstance(scaling, dict) or (needed and not scaling.get(needed)):
            continue
        if (scaling.get("rope_type") or scaling.get("type")) == old:
            values = {**values, key: {**scaling, "rope_type": new}}
    return values


def _of_hunyuan(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(use_qk_norm=True, use_cla=False)
    return of_hf(config, spec)


HUNYUAN = Architecture(
    describe=partial(describe, qk_norms="rotated"),
    of_hf=_of_hunyuan,
    hf_values=hunyuan_values,
    hf_layer={**HF_LAYER, "self_attn.query_layernorm.weight": "q_norm", "self_attn.key_layernorm.weight": "k_norm"},
)


# Phi 3 and 4 (Microsoft; arXiv 2404.14219 and 2412.08905): fused matrices, and sometimes partial RoPE.


def _phi3_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json with longrope for a rotation called `yarn`, as in old files."""
    return {"rms_norm_eps": 1e-5, **_with_kind(values, "yarn", "longrope")}


def _of_phi3(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    window = config.get("sliding_window", int)
    return with_local_layers(of_hf(config, spec), window, [True] * spec.num_layers, config.path)


PHI3 = Architecture(
    describe=describe,
    of_hf=_of_phi3,
    of_gguf=of_gguf,
    hf_values=_phi3_values,
    hf_layer={**HF_LAYER, "self_attn.qkv_proj.weight": QKV, "mlp.gate_up_proj.weight": GATE_AND_UP},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": QKV, "ffn_up.weight": GATE_AND_UP},
    has_partial_rope=True,
)


# GLM 4 of 2024 (Z.ai; arXiv 2406.12793): partial RoPE on neighbouring pairs. GLM 4 of 2025 is in models/gemma.py.


GLM = Architecture(
    describe=describe,
    of_hf=of_hf,
    hf_values=lambda values: {"head_dim": 128, "partial_rotary_factor": 0.5, **values},
    hf_layer={**HF_LAYER, "mlp.gate_up_proj.weight": GATE_AND_UP},
    is_interleaved_in_hf=True,
    has_partial_rope=True,
)
"""GGUF files are not supported: they have q, k and v in one tensor, in which neighbouring rows rotate as pairs."""


# ERNIE 4.5, dense (Baidu): RoPE on neighbouring pairs, and one setting for all biases.


ERNIE4_5 = Architecture(
    describe=describe,
    of_hf=of_hf,
    hf_values=lambda values: {"head_dim": 128, "rope_theta": 5e5, "tie_word_embeddings": True, **values},
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
)


# Helium (Kyutai): RoPE on neighbouring pairs.


HELIUM = Architecture(
    describe=describe,
    of_hf=of_hf,
    hf_values=lambda values: {"head_dim": 128, "rms_norm_eps": 1e-8, "rope_theta": 1e5, **values},
    is_interleaved_in_hf=True,
)
"""llama.cpp has no Helium."""


# Nemotron 4 and Minitron (NVIDIA; arXiv 2402.16819): layer norms, partial RoPE, and an ungated MLP.


def _of_nemotron(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return with_gpt_layers(spec, read_activation(config, "hidden_act", "relu2"))


def _nemotron_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"partial_rotary_factor": 0.5, **values, "rms_norm_eps": values.get("norm_eps", 1e-5)}


NEMOTRON = Architecture(
    describe=describe,
    of_hf=_of_nemotron,
    of_gguf=lambda _, spec: with_gpt_layers(spec, "relu2"),
    hf_values=_nemotron_values,
    has_partial_rope=True,
    hf_norm_offset=1.0,
)


# StarCoder 2 (BigCode; arXiv 2402.19173): layer norms, biases everywhere, and an MLP without a gate.


def _with_starcoder2(spec: ModelSpec, activation: Activation, window: int | None, path: Path) -> ModelSpec:
    return with_local_layers(with_gpt_layers(spec, activation), window, [True] * spec.num_layers, path)


def _of_starcoder2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    activation = read_activation(config, "hidden_act", "gelu_pytorch_tanh")
    return _with_starcoder2(spec, activation, config.get("sliding_window", int), config.path)


def _of_starcoder2_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.get("starcoder2.attention.sliding_window", int, 4096)  # as in all published models; their files lack it
    return _with_starcoder2(spec, "gelu_tanh", window or None, file.path)


def _starcoder2_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"tie_word_embeddings": True, **values, "rms_norm_eps": values.get("norm_epsilon", 1e-5)}


STARCODER2 = Architecture(
    describe=describe,
    of_hf=_of_starcoder2,
    of_gguf=_of_starcoder2_gguf,
    hf_values=_starcoder2_values,
    hf_layer={**HF_LAYER, **with_biases({"mlp.c_fc": "up", "mlp.c_proj": "down"})},
)


# GPT-2 (OpenAI; Language Models are Unsupervised Multitask Learners, 2019): learned positions, and StarCoder 2's layers.

_GPT2_DEFAULTS = {
    "vocab_size": 50257,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def _gpt2_values(
    values: Mapping[str, Any], defaults: Mapping[str, Any] = _GPT2_DEFAULTS, keys: Mapping[str, str] = OLD_KEYS
) -> Mapping[str, Any]:
    found = with_defaults(values, defaults, {**keys, "layer_norm_epsilon": "rms_norm_eps"})
    if type(found["hidden_size"]) is int:
        found.setdefault("intermediate_size", 4 * found["hidden_size"])
    return found


def _of_gpt2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return _with_gpt2(spec, read_activation(config, "activation_function", "gelu_new"))


def _with_gpt2(spec: ModelSpec, activation: Activation) -> ModelSpec:
    return with_gpt_layers(spec, activation).with_attention_fields(rotation=None)


def _gpt2_name(name: str) -> str | None:
    """Return a tensor's name without `transformer.`, which old files lack, or None for causal masks (not weights)."""
    bare = name.removeprefix("transformer.")
    return None if bare.endswith((".attn.bias", ".attention.bias", ".masked_bias")) else bare


GPT2 = Architecture(
    describe=partial(describe, has_positions=True),
    of_hf=_of_gpt2,
    of_gguf=lambda _, spec: _with_gpt2(spec, "gelu_tanh"),
    hf_values=_gpt2_values,
    hf_name=_gpt2_name,
    hf_top={"wte.weight": "embed", "wpe.weight": "positions", **with_biases({"ln_f": "norm"}), "lm_head.weight": "output"},
    hf_layers="h.",
    hf_layer={
        **with_biases({"ln_1": "attn_norm", "ln_2": "mlp_norm"}),
        "attn.c_attn.weight": replace(QKV, is_transposed=True),
        "attn.c_attn.bias": QKV_BIAS,
        "attn.c_proj.weight": Parts(("o",), is_transposed=True),
        "attn.c_proj.bias": "o_bias",
        "mlp.c_fc.weight": Parts(("up",), is_transposed=True),
        "mlp.c_fc.bias": "up_bias",
        "mlp.c_proj.weight": Parts(("down",), is_transposed=True),
        "mlp.c_proj.bias": "down_bias",
    },
    gguf_top={**GGUF_TOP, "position_embd.weight": "positions"},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": QKV, "attn_qkv.bias": QKV_BIAS},
)


# GPT-Neo (EleutherAI, 2021): GPT-2 with windows in some layers, and scores without a scale.

_GPT_NEO_DEFAULTS = {
    **_GPT2_DEFAULTS,
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "attention_types": [[["global", "local"], 12]],
    "window_size": 256,
}
_GPT_NEO_KEYS = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}


def _of_gpt_neo(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Apply `attention_types`: lists of kinds, each with its number of repetitions."""
    kinds: list[object] = []
    for item in config.require("attention_types", list):
        match item:
            case [list(names), int(times)] if 0 <= times * len(names) <= spec.num_layers:
                kinds += names * times
            case _:
                raise config.error(f"attention_types has {item!r}, not a list of kinds and a number")
    if len(kinds) != spec.num_layers or not all(kind in ("global", "local") for kind in kinds):
        raise config.error(f"attention_types needs global or local for each of {spec.num_layers} layers")
    spec = _with_gpt2(spec, read_activation(config, "activation_function", "gelu_new"))
    spec = spec.with_attention_fields(scale=1.0)
    return with_local_layers(spec, config.require("window_size", int), [kind == "local" for kind in kinds], config.path)


GPT_NEO = replace(
    GPT2,
    of_hf=_of_gpt_neo,
    hf_values=partial(_gpt2_values, defaults=_GPT_NEO_DEFAULTS, keys=_GPT_NEO_KEYS),
    hf_layer=with_biases(
        {
            "ln_1": "attn_norm",
            "ln_2": "mlp_norm",
            **{f"attn.attention.{name}_proj": name for name in "qkv"},
            "attn.attention.out_proj": "o",
            "mlp.c_fc": "up",
            "mlp.c_proj": "down",
        }
    ),
)


# StarCoder 1 and SantaCoder (GPT-BigCode; arXiv 2305.06161): GPT-2 with multi-query attention, and outputs as rows.


def _of_gpt_bigcode(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("multi_query", True)
    return _of_gpt2(config, spec)


GPT_BIGCODE = replace(
    GPT2,
    of_hf=_of_gpt_bigcode,
    hf_values=lambda values: {**_gpt2_values(values), "num_key_value_heads": 1},
    hf_layer={
        **with_biases({"ln_1": "attn_norm", "ln_2": "mlp_norm", "attn.c_proj": "o", "mlp.c_fc": "up", "mlp.c_proj": "down"}),
        "attn.c_attn.weight": QKV,
        "attn.c_attn.bias": QKV_BIAS,
    },
)


# OPT (Meta; arXiv 2205.01068) and Galactica (2211.09085): GPT-2 with other names; the first two positions are not used.

_OPT_ONLY = {"do_layer_norm_before": True, "layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False}


def _opt_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_defaults(values, {"enable_bias": True, "tie_word_embeddings": True}, {"ffn_dim": "intermediate_size"})
    return {**found, "rms_norm_eps": 1e-5}


def _of_opt(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(**_OPT_ONLY, word_embed_proj_dim=spec.hidden_size)
    return replace(_with_gpt2(spec, read_activation(config, "activation_function", "relu")), first_position=2)


OPT = Architecture(
    describe=partial(describe, has_positions=True),
    of_hf=_of_opt,
    hf_values=_opt_values,
    hf_top={
        "model.decoder.embed_tokens.weight": "embed",
        "model.decoder.embed_positions.weight": "positions",
        **with_biases({"model.decoder.final_layer_norm": "norm"}),
        "lm_head.weight": "output",
    },
    hf_layers="model.decoder.layers.",
    hf_layer={
        **HF_LAYER,
        **with_biases(
            {
                "self_attn_layer_norm": "attn_norm",
                "self_attn.out_proj": "o",
                "final_layer_norm": "mlp_norm",
                "fc1": "up",
                "fc2": "down",
            }
        ),
    },
)
"""llama.cpp has no OPT. The 350M is refused: it has narrower embeddings and post-norms."""
