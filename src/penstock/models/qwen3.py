"""Qwen 3, dense: Llama's structure with a norm on each head of queries and keys.

Source: arXiv 2505.09388, and transformers' modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from penstock.models.architectures import GGUF_LAYER, HF_LAYER, Architecture
from penstock.models.decoder import Decoder
from penstock.models.hf_config import JsonFile, read_layer_types
from penstock.models.program import Program
from penstock.types.model_spec import ModelSpec


def describe(spec: ModelSpec) -> Program:
    """The program of one step."""
    build = Decoder(spec)
    x = build.embed()
    for layer in range(spec.num_layers):
        at = f"layers.{layer}"
        attended = build.attention(layer, build.norm(x, f"{at}.attn_norm"), qk_norms="heads")
        x, attended = build.gather_after_last(layer, x, attended)
        build.add_output(layer, x, attended)
        build.add_mlp(layer, x, build.norm(x, f"{at}.mlp_norm"))
    return build.logits(build.norm(x, "norm"))


def _values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"head_dim": 128, **values}


def of_hf(config: JsonFile, spec: ModelSpec) -> ModelSpec:
    """Layers have windows only if config.json tells them to: the last ones, unless it names the type of each."""
    config.only("hidden_act", "silu")
    if not config.get("use_sliding_window", bool):
        return spec
    window, first = config.require("sliding_window", int), config.get("max_window_layers", int)
    if config.values.get("layer_types") is not None:
        kinds = read_layer_types(config, spec.num_layers)
    else:
        has_none = min(spec.num_layers, 28 if first is None else first)
        kinds = ["full_attention"] * has_none + ["sliding_attention"] * (spec.num_layers - has_none)
    windows = {"full_attention": 0, "sliding_attention": window}
    if set(kinds) - windows.keys():
        raise config.error(f"layer_types has {', '.join(sorted(set(kinds) - windows.keys()))}")
    return spec.with_attention(lambda layer, attention: replace(attention, window=windows[kinds[layer]]))


QWEN3 = Architecture(
    describe=describe,
    of_hf=of_hf,
    hf_values=_values,
    hf_layer={**HF_LAYER, "self_attn.q_norm.weight": "q_norm", "self_attn.k_norm.weight": "k_norm"},
    gguf_layer={**GGUF_LAYER, "attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm"},
)
