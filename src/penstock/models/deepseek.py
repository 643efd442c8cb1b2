"""Latent attention: DeepSeek V2 and V3, which Kimi K2 and Moonlight share, GLM-4.7-Flash, Youtu, and MiniCPM 3.

Sources: arXiv 2405.04434 and 2412.19437, transformers' modeling_deepseek_v2.py, modeling_deepseek_v3.py,
modeling_glm4_moe_lite.py, modeling_youtu.py and modeling_minicpm3.py, and llama.cpp's src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.models import checks, llama
from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture, Parts, Run, with_defaults
from penstock.models.gguf_file import GgufFile
from penstock.models.hf_config import JsonFile
from penstock.models.layers import (
    GGUF_EXPERTS,
    dense_layers_of_hf,
    experts_of_hf,
    groups_of_hf,
    read_gguf_experts,
    sigmoid_experts_of_hf,
    with_experts,
)
from penstock.models.moe import GATE_UP_DOWN, SHARED
from penstock.types.errors import damaged
from penstock.types.model_spec import LatentSpec, ModelSpec

_SIZES = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "routed_scaling_factor": 1.0}
_V2_DEFAULTS = {**_SIZES, "q_lora_rank": 1536, "first_k_dense_replace": 0, "n_shared_experts": 2, "topk_method": "greedy"}
_V3_DEFAULTS = {
    **_SIZES,
    "q_lora_rank": 1536,
    "first_k_dense_replace": 3,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
}
_GLM_DEFAULTS = {
    **_V3_DEFAULTS,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}


_MINICPM_DEFAULTS = {
    **_SIZES,
    "q_lora_rank": 768,
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "scale_emb": 12.0,
    "scale_depth": 1.4,
    "dim_model_base": 256,
    "tie_word_embeddings": True,
}


_NULLS = ("q_lora_rank", "scale_depth", "dim_model_base")


def _values(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in transformers' defaults. A null factor or `q_lora_rank` is off. `head_dim` becomes the rotary columns."""
    found = with_defaults(values, defaults, {"n_routed_experts": "num_local_experts"}, nulls=_NULLS)
    heads = {"num_key_value_heads": found["num_attention_heads"]} if "num_attention_heads" in found else {}
    return {**heads, **found, "head_dim": found["qk_rope_head_dim"]}


def _of_v2(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only_all(norm_topk_prob=False, scoring_func="softmax", moe_layer_freq=1, mlp_bias=False)
    groups: Mapping[str, int] = {}
    if config.require("topk_method", str) != "greedy":
        config.only("topk_method", "group_limited_greedy")
        groups = groups_of_hf(config)
    return experts_of_hf(
        config,
        _with_latents(config, spec),
        width="moe_intermediate_size",
        dense=range(config.require("first_k_dense_replace", int)),
        is_renormalised=False,
        share_factor=config.require("routed_scaling_factor", float),
        shared_size=config.require("moe_intermediate_size", int) * config.require("n_shared_experts", int),
        **groups,
    )


def _of_v3(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    return _with_v3_experts(config, spec, range(config.require("first_k_dense_replace", int)))


def _of_glm(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    if config.values.get("mlp_layer_types") is None:
        config.only("first_k_dense_replace", 1)
    return _with_v3_experts(config, spec, dense_layers_of_hf(config, spec))


def _minicpm_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Fill in transformers' defaults; `v_head_dim` defaults to hidden_size / num_heads."""
    found = dict(_values(values, _MINICPM_DEFAULTS))
    hidden_size, num_heads = found.get("hidden_size"), found.get("num_attention_heads")
    if values.get("v_head_dim") is None and type(hidden_size) is int and type(num_heads) is int and num_heads > 0:
        found["v_head_dim"] = hidden_size // num_heads
    return found


def _of_minicpm(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    config.only("mlp_bias", False)
    depth, width = (config.values.get(key) and config.positive(key) for key in ("scale_depth", "dim_model_base"))
    return replace(
        _with_latents(config, spec),
        embed_scale=config.positive("scale_emb"),
        residual_scale=1.0 if depth is None else depth / spec.num_layers**0.5,
        logit_scale=1.0 if width is None else width / spec.hidden_size,
    )


def _with_v3_experts(config: JsonFile, spec: ModelSpec, dense: Container[int]) -> ModelSpec:
    config.only_all(scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)
    return sigmoid_experts_of_hf(config, _with_latents(config, spec), dense)


def _with_latents(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Make the spec's attention latent. Its rotation already covers only the rotary columns."""
    config.only_all(hidden_act="silu", attention_bias=False, rope_interleave=True)
    config.only("num_key_value_heads", spec.attentions[0].num_heads)
    names = ("qk_nope_head_dim", "v_head_dim", "qk_rope_head_dim")
    key_dim, value_dim, rotary_dim = (config.require(name, int) for name in names)
    query_rank = config.get("q_lora_rank", int)
    if query_rank is not None and query_rank < 1:
        raise config.error(f"q_lora_rank is {query_rank}")
    latent = LatentSpec(key_dim=key_dim, value_dim=value_dim, rotary_dim=rotary_dim, query_rank=query_rank or 0)
    return _with_latent(spec, latent, config.require("kv_lora_rank", int), _growth(config), config.path)


def _with_latent(spec: ModelSpec, latent: LatentSpec, rank: int, growth: float, path: Path) -> ModelSpec:
    """Return the spec with this latent attention. `growth`: YaRN's magnitude scale of queries and keys."""
    sizes = {"KV rank": rank, "key width": latent.key_dim, "value width": latent.value_dim}
    for name, size in (sizes | {"query rank": latent.query_rank or 1}).items():
        if not 1 <= size <= checks.LIMITS["head_dim"]:
            raise damaged(path, f"the {name} of latent attention is {size}, outside of 1 to {checks.LIMITS['head_dim']}")
    if latent.key_dim % 2:
        raise checks.unsupported(path, f"keys of latent attention have {latent.key_dim} columns", "even numbers are")
    turns = {attention.rotation for attention in spec.attentions}
    if len(turns) > 1 or any(turn is None or turn.query_growth for turn in turns):
        raise checks.unsupported(path, "layers rotate in several ways, or queries grow with their position", "one rotation is")
    head_dim, scale = rank + latent.rotary_dim, (latent.key_dim + latent.rotary_dim) ** -0.5 * growth**2
    return spec.with_attention_fields(num_kv_heads=1, head_dim=head_dim, has_qkv_bias=False, scale=scale, latent=latent)


def _of_gguf(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Apply the keys of llama.cpp's `deepseek2`: of V2, V3, Kimi K2, Moonlight and GLM-4.7-Flash."""
    key = file.architecture
    spec = _with_gguf_latents(file, spec)
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in file.tensors)
    function = file.get(f"{key}.expert_gating_func", int) or (2 if has_bias else 1)  # old files of V2 lack it
    number, chosen = (file.get(f"{key}.expert_group_{name}", int) or 1 for name in ("count", "used_count"))
    groups = {} if number == chosen == 1 else {"num_groups": number, "num_chosen_groups": chosen, "num_group_scores": function}
    mlp = read_gguf_experts(
        file,
        scoring="softmax" if function == 1 else "sigmoid",
        is_renormalised=file.get(f"{key}.expert_weights_norm", bool) or False,
        has_selection_bias=has_bias,
        num_shared=file.require(f"{key}.expert_shared_count", int),
        **groups,
    )
    return with_experts(spec, mlp, file.path, dense=range(file.get(f"{key}.leading_dense_block_count", int) or 0))


def _with_gguf_latents(file: GgufFile, spec: ModelSpec) -> ModelSpec:
    """Put latent attention into the layers. Files from before 2025-04 have one tensor for the key and value matrices."""
    key, turn = file.architecture, spec.attentions[0].rotation
    assert turn is not None
    rotary_dim, has_transposed_keys = 2 * len(turn.inv_freq), "blk.0.attn_k_b.weight" in file.tensors
    keys, values = (
        file.get(f"{key}.attention.{name}_length_mla", int) or file.require(f"{key}.attention.{name}_length", int)
        for name in ("key", "value")
    )
    latent = LatentSpec(
        key_dim=keys - rotary_dim,
        value_dim=values,
        rotary_dim=rotary_dim,
        query_rank=file.get(f"{key}.attention.q_lora_rank", int) or 0,
        has_transposed_keys=has_transposed_keys,
    )
    growth = 1.0
    if file.get(f"{key}.rope.scaling.type", str) == "yarn":
        # This is 0.1 * mscale_all_dim. The converter assumes mscale = mscale_all_dim, so cos and sin have no factor.
        growth += file.require(f"{key}.rope.scaling.yarn_log_multiplier", float) * math.log(
            max(1.0, file.require(f"{key}.rope.scaling.factor", float))
        )
        turn = replace(turn, attention_factor=1.0)
    spec = spec.with_attention_fields(rotation=turn)
    return _with_latent(spec, latent, file.require(f"{key}.attention.kv_lora_rank", int), growth, file.path)


def _growth(config: JsonFile) -> float:
    """Return YaRN's magnitude scale of queries and keys, from `mscale_all_dim`."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    turn = JsonFile(config.path, config.get(key, dict) or {})
    kind = turn.values.get("rope_type") or turn.values.get("type") or "default"
    growth = turn.get("mscale_all_dim", float)
    if kind == "default" or not growth:
        return 1.0
    return 1.0 + 0.1 * growth * math.log(max(1.0, turn.positive("factor")))


# Which rows of a tensor belong to which weight. Neighbours that rotate as a pair become columns i and i + n / 2.

Turning = Callable[[int, int], list[Run]]  # (first row, number of rows) -> runs of rotary rows


def _pairs(first: int, width: int) -> list[Run]:
    return [(first, width // 2, 2), (first + 1, width // 2, 2)]


def _halves(first: int, width: int) -> list[Run]:
    return [(first, width, 1)]


def _query_rows(spec: ModelSpec, turning: Turning = _pairs) -> Sequence[Sequence[Run]]:
    attention = spec.attentions[0]
    assert attention.latent is not None
    still, width = attention.latent.key_dim, attention.latent.rotary_dim
    starts = [head * (still + width) for head in range(attention.num_heads)]
    return [[(start, still, 1) for start in starts], [run for start in starts for run in turning(start + still, width)]]


def _latent_rows(spec: ModelSpec, turning: Turning = _pairs) -> Sequence[Sequence[Run]]:
    attention = spec.attentions[0]
    return [[(0, attention.latent_rank, 1)], turning(attention.latent_rank, attention.head_dim - attention.latent_rank)]


def _head_rows(spec: ModelSpec) -> Sequence[Sequence[Run]]:
    attention = spec.attentions[0]
    assert attention.latent is not None
    keys, values = attention.latent.key_dim, attention.latent.value_dim
    starts = [head * (keys + values) for head in range(attention.num_heads)]
    return [[(start, keys, 1) for start in starts], [(start + keys, values, 1) for start in starts]]


_QUERIES, _LATENTS = Parts(("q", "q_rope"), runs=_query_rows), Parts(("latent", "k_rope"), runs=_latent_rows)
_HEADS = Parts(("key_heads", "value_heads"), runs=_head_rows)
DEEPSEEK_V2 = Architecture(
    describe=llama.describe,
    of_hf=_of_v2,
    hf_values=lambda values: _values(values, _V2_DEFAULTS),
    hf_layer={
        **HF_LAYER,
        **GATE_UP_DOWN,
        **SHARED,
        "self_attn.q_proj.weight": _QUERIES,
        "self_attn.q_a_proj.weight": "q_a",
        "self_attn.q_a_layernorm.weight": "q_a_norm",
        "self_attn.q_b_proj.weight": _QUERIES,
        "self_attn.kv_a_proj_with_mqa.weight": _LATENTS,
        "self_attn.kv_a_layernorm.weight": "latent_norm",
        "self_attn.kv_b_proj.weight": _HEADS,
    },
    of_gguf=_of_gguf,
    gguf_layer={
        **GGUF_LAYER,
        **GGUF_EXPERTS,
        "attn_q.weight": _QUERIES,
        "attn_q_a.weight": "q_a",
        "attn_q_a_norm.weight": "q_a_norm",
        "attn_q_b.weight": _QUERIES,
        "attn_kv_a_mqa.weight": _LATENTS,
        "attn_kv_a_norm.weight": "latent_norm",
        "attn_kv_b.weight": _HEADS,
        "attn_k_b.weight": Parts(("key_heads",)),
        "attn_v_b.weight": Parts(("value_heads",)),
    },
    has_latents_in_gguf=True,
    has_further_layers=True,
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    of_hf=_of_v3,
    hf_values=lambda values: _values(values, _V3_DEFAULTS),
    hf_layer={**DEEPSEEK_V2.hf_layer, "mlp.gate.e_score_correction_bias": "selection_bias"},
)
GLM4_MOE_LITE = replace(DEEPSEEK_V3, of_hf=_of_glm, hf_values=lambda values: _values(values, _GLM_DEFAULTS))
YOUTU = replace(
    DEEPSEEK_V2,
    of_hf=_with_latents,
    hf_values=lambda values: _values(values, {**_V3_DEFAULTS, "tie_word_embeddings": True}),
)
_QUERIES_IN_HALVES = replace(_QUERIES, runs=partial(_query_rows, turning=_halves))
MINICPM3 = Architecture(
    describe=llama.describe,
    of_hf=_of_minicpm,
    hf_values=_minicpm_values,
    hf_layer={
        **DEEPSEEK_V2.hf_layer,
        "self_attn.q_proj.weight": _QUERIES_IN_HALVES,
        "self_attn.q_b_proj.weight": _QUERIES_IN_HALVES,
        "self_attn.kv_a_proj_with_mqa.weight": replace(_LATENTS, runs=partial(_latent_rows, turning=_halves)),
    },
)
