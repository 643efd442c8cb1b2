"""Architectures whose attention and MLP run side by side on the same residual stream: Falcon, Cohere, GPT-NeoX, Phi and others.

Sources: arXiv 2311.16867 (Falcon), 2504.00698 (Cohere), 2204.06745 (GPT-NeoX) and 2402.17834 (StableLM 2); modeling_NAME.py of
transformers; falcon.cpp, command-r.cpp, cohere2.cpp, gptneox.cpp and stablelm.cpp of llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from penstock.models import checks, llama
from penstock.models.architectures import (
    GGUF_LAYER,
    GGUF_TOP,
    HF_LAYER,
    HF_TOP,
    OLD_KEYS,
    QKV,
    QKV_BIAS,
    Architecture,
    Parts,
    Run,
    with_biases,
    with_defaults,
)
from penstock.models.decoder import Decoder
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile, read_activation
from penstock.models.layers import (
    local_layers,
    local_layers_of_gguf,
    with_gpt_layers,
    with_local_layers,
    with_windows,
    without_global_rotations,
)
from penstock.models.program import Program
from penstock.types.model_spec import Activation, ModelSpec


def describe(spec: ModelSpec, *, only_norm: str = "mlp_norm") -> Program:
    """Return the program of one step. `only_norm` names a layer's norm if attention and MLP share one."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        has_attn_norm = spec.layers[layer].has_attn_norm
        normed = build.norm(x, f"{at}.{'mlp_norm' if has_attn_norm else only_norm}")
        of_attention = build.norm(x, f"{at}.attn_norm", "attn_normed") if has_attn_norm else normed
        attended = build.attention(layer, of_attention)
        x, attended, normed = build.gather_after_last(layer, x, attended, normed)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, normed)
    return build.finish(build.norm(x, "norm"))


def describe_either(spec: ModelSpec) -> Program:
    """Return the program of a model whose attention and MLP run in parallel or one after the other, as the spec says."""
    return describe(spec, only_norm="attn_norm") if spec.has_parallel_halves else llama.describe(spec)


def _with_attn_norm(spec: ModelSpec, has_attn_norm: bool) -> ModelSpec:
    return spec.with_layers(lambda _, layer: replace(layer, has_attn_norm=has_attn_norm))


# Falcon (TII): small models have one norm for attention and MLP, larger ones two. Falcon 3 is a Llama.

_DEFAULTS = {
    "vocab_size": 65024,
    "hidden_size": 4544,
    "num_hidden_layers": 32,
    "num_attention_heads": 71,
    "max_position_embeddings": 2048,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": True,
}


def _falcon_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Accept the names of files from before transformers had Falcon. Those of the 40B lack `new_decoder_architecture`."""
    found = with_defaults(values, _DEFAULTS, {**OLD_KEYS, "n_head_kv": "num_kv_heads"})
    is_new = found.setdefault("new_decoder_architecture", "n_head_kv" in values)
    found["num_key_value_heads"] = found.get("num_kv_heads", found["num_attention_heads"]) if is_new else 1
    if type(found["hidden_size"]) is int:
        found["intermediate_size"] = found.get("ffn_hidden_size", 4 * found["hidden_size"])
    return {**found, "rms_norm_eps": found["layer_norm_epsilon"]}


def _of_falcon(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.get("alibi", bool):
        raise checks.unsupported(config.path, "alibi is True: positions as in falcon-rw", "rotary positions are")
    config.only_all(parallel_attn=True, apply_residual_connection_post_layernorm=False)
    has_attn_norm = config.require("new_decoder_architecture", bool)
    if has_attn_norm:
        has_attn_norm = config.get("num_ln_in_parallel_attn", int) in (None, 2)
    else:
        config.only("multi_query", True)
    return _with_falcon(spec, read_activation(config, "activation", "gelu"), has_attn_norm)


def _of_falcon_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply Falcon's settings. Falcon 2 is refused without its rotation's base, which the converter may omit."""
    has_attn_norm = "blk.0.attn_norm_2.weight" in file.tensors
    is_falcon2 = spec.layers[0].attention.num_kv_heads > 1 and not has_attn_norm
    if is_falcon2 and file.get("falcon.rope.freq_base", float) is None:
        raise file.error("falcon.rope.freq_base is missing, and that of Falcon 2 is not the usual 10000")
    return _with_falcon(spec, "gelu", has_attn_norm)


def _with_falcon(spec: ModelSpec, activation: Activation, has_attn_norm: bool) -> ModelSpec:
    return _with_attn_norm(with_gpt_layers(spec, activation), has_attn_norm)


_QKV_BY_HEAD = replace(QKV, is_by_kv_head=True)
_QKV_BIAS_BY_HEAD = replace(QKV_BIAS, is_by_kv_head=True)
FALCON = Architecture(
    describe=describe,
    of_hf=_of_falcon,
    of_gguf=_of_falcon_gguf,
    hf_values=_falcon_values,
    hf_top={
        "transformer.word_embeddings.weight": "embed",
        **with_biases({"transformer.ln_f": "norm"}),
        "lm_head.weight": "output",
    },
    hf_layers="transformer.h.",
    hf_layer={
        **with_biases(
            {
                "input_layernorm": "mlp_norm",
                "ln_mlp": "mlp_norm",
                "ln_attn": "attn_norm",
                "self_attention.dense": "o",
                "mlp.dense_h_to_4h": "up",
                "mlp.dense_4h_to_h": "down",
            }
        ),
        "self_attention.query_key_value.weight": _QKV_BY_HEAD,
        "self_attention.query_key_value.bias": _QKV_BIAS_BY_HEAD,
    },
    gguf_layer={
        **GGUF_LAYER,
        **with_biases({"attn_norm": "mlp_norm", "attn_norm_2": "attn_norm"}),
        "attn_qkv.weight": QKV,
    },
)


# Command R and Aya (Cohere), Command R7B and A (Cohere 2): RoPE on neighbouring pairs of columns. Cohere 2 has windows
# in most layers; the others have no RoPE.

_ONLY = {
    "hidden_act": "silu",
    "rotary_pct": 1.0,
    "use_gated_activation": True,
    "use_parallel_block": True,
    "use_qk_norm": False,
}


def _cohere_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    usual = {"logit_scale": 0.0625, "rope_theta": 500_000.0, "tie_word_embeddings": True}
    return {**usual, **values, "rms_norm_eps": values.get("layer_norm_eps", 1e-5)}


def _of_cohere(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(**_ONLY)
    return _with_cohere(spec, config.positive("logit_scale"))


def _of_cohere2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    usual = local_layers(spec, config.get("sliding_window_pattern", int))
    window = config.require("sliding_window", int)
    return without_global_rotations(with_windows(config, _of_cohere(config, spec), window, usual))


def _of_cohere_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    return _with_cohere(spec, file.require(f"{file.architecture}.logit_scale", float))


def _of_cohere2_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    window = file.require("cohere2.attention.sliding_window", int)
    spec = with_local_layers(_of_cohere_gguf(file, spec), window, local_layers_of_gguf(file, spec), file.path)
    return without_global_rotations(spec)


def _with_cohere(spec: ModelSpec, logit_scale: float) -> ModelSpec:
    return _with_attn_norm(replace(spec, norm="layer", logit_scale=logit_scale), has_attn_norm=False)


COHERE = Architecture(
    describe=describe,
    of_hf=_of_cohere,
    of_gguf=_of_cohere_gguf,
    hf_values=_cohere_values,
    hf_layer={**HF_LAYER, "input_layernorm.weight": "mlp_norm"},
    gguf_layer={**GGUF_LAYER, "attn_norm.weight": "mlp_norm"},
    is_interleaved_in_hf=True,
    is_interleaved_in_gguf=True,
)
COHERE2 = replace(
    COHERE,
    of_hf=_of_cohere2,
    of_gguf=_of_cohere2_gguf,
    hf_values=lambda values: _cohere_values({"rope_theta": 10_000.0, "sliding_window": 4096, **values}),
)


# GPT-NeoX and Pythia (EleutherAI): norms for attention and MLP, which run in parallel or in sequence; partial RoPE.

_NEOX_KEYS = {"layer_norm_eps": "rms_norm_eps", "rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"}


def _without_masks(name: str) -> str | None:
    """Return None for the causal masks in old files of GPT-NeoX, GPT-J and CodeGen, else the name."""
    return None if re.search(r"\.(attention|attn)\.((masked_)?bias|causal_mask)$", name) else name


def _neox_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return with_defaults(values, {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "attention_bias": True}, _NEOX_KEYS)


def _of_neox(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    is_parallel = config.get("use_parallel_residual", bool) is not False
    return _with_neox(spec, read_activation(config, "hidden_act", "gelu"), is_parallel)


def _with_neox(spec: ModelSpec, activation: Activation, is_parallel: bool) -> ModelSpec:
    return replace(with_gpt_layers(spec, activation), has_parallel_halves=is_parallel)


GPT_NEOX = Architecture(
    describe=describe_either,
    of_hf=_of_neox,
    of_gguf=lambda file, spec: _with_neox(spec, "gelu", file.require("gptneox.use_parallel_residual", bool)),
    hf_values=_neox_values,
    hf_name=_without_masks,
    hf_top={
        "gpt_neox.embed_in.weight": "embed",
        **with_biases({"gpt_neox.final_layer_norm": "norm"}),
        **dict.fromkeys(("lm_head.weight", "embed_out.weight"), "output"),
    },
    hf_layers="gpt_neox.layers.",
    hf_layer={
        **HF_LAYER,
        **with_biases({"attention.dense": "o", "mlp.dense_h_to_4h": "up", "mlp.dense_4h_to_h": "down"}),
        "attention.query_key_value.weight": _QKV_BY_HEAD,
        "attention.query_key_value.bias": _QKV_BIAS_BY_HEAD,
    },
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": QKV, "attn_qkv.bias": QKV_BIAS},
    has_partial_rope=True,
)


# StableLM (Stability AI): Llama with layer norms and partial RoPE. Some run attention and MLP in parallel, on one norm.


def _stablelm_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    usual = {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25, "num_key_value_heads": 32}
    return with_defaults(values, usual, {"layer_norm_eps": "rms_norm_eps"})


def _of_stablelm(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("qk_layernorm", False)
    return _with_stablelm(llama.of_hf(config, spec), config.get("use_parallel_residual", bool) or False)


def _of_stablelm_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Decide by the tensors, as in llama.cpp: the converter sets `use_parallel_residual` if config.json lacks it."""
    return _with_stablelm(spec, "blk.0.ffn_norm.weight" not in file.tensors)


def _with_stablelm(spec: ModelSpec, is_parallel: bool) -> ModelSpec:
    spec = replace(spec, norm="layer", has_norm_bias=True, has_parallel_halves=is_parallel)
    return _with_attn_norm(spec, has_attn_norm=not is_parallel)


STABLELM = Architecture(
    describe=describe_either,
    of_hf=_of_stablelm,
    of_gguf=_of_stablelm_gguf,
    hf_values=_stablelm_values,
    has_partial_rope=True,
)


# Phi 1, 1.5 and 2 (Microsoft) and GPT-J (EleutherAI): one norm, partial RoPE, logits with a bias.


def _with_phi(spec: ModelSpec, activation: Activation) -> ModelSpec:
    return _with_attn_norm(replace(with_gpt_layers(spec, activation), has_logit_bias=True), has_attn_norm=False)


def _of_phi(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("qk_layernorm", False)
    return _with_phi(spec, read_activation(config, "hidden_act", "gelu_new"))


def _phi_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return with_defaults(values, {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5}, {"layer_norm_eps": "rms_norm_eps"})


PHI = Architecture(
    describe=partial(describe, only_norm="attn_norm"),
    of_hf=_of_phi,
    of_gguf=lambda _, spec: _with_phi(spec, "gelu_tanh"),
    hf_values=_phi_values,
    hf_top={**HF_TOP, **with_biases({"model.final_layernorm": "norm", "lm_head": "output"})},
    hf_layer={**HF_LAYER, **with_biases({"self_attn.dense": "o", "mlp.fc1": "up", "mlp.fc2": "down"})},
    gguf_top={**GGUF_TOP, "output.bias": "output_bias"},
    gguf_layer={**GGUF_LAYER, "attn_qkv.weight": QKV, "attn_qkv.bias": QKV_BIAS},
    has_partial_rope=True,
)

_GPTJ_DEFAULTS = {
    "vocab_size": 50400,
    "hidden_size": 4096,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
}


def _gptj_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    found = with_defaults(values, _GPTJ_DEFAULTS, {**OLD_KEYS, "layer_norm_epsilon": "rms_norm_eps"})
    found["rotary_dim"] = values.get("rotary_dim", 64)  # null means something else in transformers, and is refused
    sizes = [found[key] for key in ("hidden_size", "num_attention_heads", "rotary_dim")]
    if all(type(size) is int and size > 0 for size in sizes):
        hidden_size, num_heads, rotary_dim = sizes
        found.setdefault("intermediate_size", 4 * hidden_size)
        # Adding 0.5 keeps `rotary_dim` exact when the fraction is truncated to columns again.
        found["partial_rotary_factor"] = (rotary_dim + 0.5) * num_heads / hidden_size
    return found


def _of_gptj(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.require("rotary_dim", int)
    return _with_phi(spec, read_activation(config, "activation_function", "gelu_new"))


GPTJ = Architecture(
    describe=partial(describe, only_norm="attn_norm"),
    of_hf=_of_gptj,
    hf_values=_gptj_values,
    hf_name=_without_masks,
    hf_top={"transformer.wte.weight": "embed", **with_biases({"transformer.ln_f": "norm", "lm_head": "output"})},
    hf_layers="transformer.h.",
    hf_layer={
        **with_biases({"ln_1": "attn_norm", "attn.out_proj": "o", "mlp.fc_in": "up", "mlp.fc_out": "down"}),
        **{f"attn.{name}_proj.weight": name for name in "qkv"},
    },
    is_interleaved_in_hf=True,
    has_partial_rope=True,
)
"""llama.cpp has no graph of GPT-J."""


# CodeGen 1 (Salesforce; arXiv 2203.13474): GPT-J with q, v and k in one tensor, split for four devices.


def _of_codegen(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if (num_heads := spec.attentions[0].num_heads) % 4:
        raise checks.unsupported(config.path, f"the number of heads is {num_heads}", "a multiple of 4 is")
    return _of_gptj(config, spec)


def _codegen_rows(spec: ModelSpec) -> list[list[Run]]:
    """Return the rows of q, v and k. A head's neighbouring rows, which rotate as pairs, become half-split."""
    attention, width = spec.attentions[0], spec.hidden_size // 4
    head_dim, turn = attention.head_dim, attention.rotation
    assert turn is not None
    num_pairs = len(turn.inv_freq)

    def by_head(part: int) -> list[Run]:
        first = [device * 3 * width + part * width + row for device in range(4) for row in range(0, width, head_dim)]
        rest = head_dim - 2 * num_pairs
        runs = [[(row, num_pairs, 2), (row + 1, num_pairs, 2), (row + 2 * num_pairs, rest, 1)] for row in first]
        return [run for head in runs for run in head if run[1]]

    return [by_head(0), [(device * 3 * width + width, width, 1) for device in range(4)], by_head(2)]


CODEGEN = replace(
    GPTJ,
    of_hf=_of_codegen,
    hf_layer={
        **with_biases({"ln_1": "attn_norm", "attn.out_proj": "o", "mlp.fc_in": "up", "mlp.fc_out": "down"}),
        "attn.qkv_proj.weight": Parts(("q", "v", "k"), runs=_codegen_rows),
    },
    is_interleaved_in_hf=False,
)
