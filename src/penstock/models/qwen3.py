"""Qwen 3, dense: Llama's structure with a norm on each head of queries and keys.

Source: arXiv 2505.09388, and transformers' modeling_qwen3.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.models.architectures import Architecture
from penstock.models.decoder import Decoder
from penstock.models.llama import of_qwen_hf
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


QWEN3 = Architecture(describe=describe, of_hf=of_qwen_hf, hf_values=_values)
