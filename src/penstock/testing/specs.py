"""Specs of models whose layers are all alike, from flat sizes: for tests and benchmarks."""

from __future__ import annotations

from typing import Any

from penstock.types.model_spec import AttentionSpec, GatedMlp, LayerSpec, ModelSpec, Rotation


def make_spec(
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
    rope_inv_freq: tuple[float, ...],
    rope_attention_factor: float = 1.0,
    has_qkv_bias: bool = False,
    **rest: Any,
) -> ModelSpec:
    """A spec of `num_layers` equal layers; `rest` are the other fields of `ModelSpec`."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotation=Rotation(inv_freq=rope_inv_freq, attention_factor=rope_attention_factor),
        has_qkv_bias=has_qkv_bias,
    )
    return ModelSpec(
        layers=(LayerSpec(attention=attention, mlp=GatedMlp(intermediate_size=intermediate_size)),) * num_layers, **rest
    )
