"""The description of Llama-type decoders: RMSNorm, grouped-query attention with rotary positions, SwiGLU.

Called through `models.registry`. Knows no file format and computes nothing.
Source: Llama 2, arXiv 2307.09288; grouped queries, arXiv 2305.13245.
"""

from __future__ import annotations

from penstock.models.program import (
    Attention,
    Embed,
    GatedActivation,
    GatherRows,
    KvWrite,
    Linear,
    Logits,
    Op,
    Program,
    RMSNorm,
    Rope,
)
from penstock.types.model_spec import ModelSpec

SAMPLED = "sampled_"
"""Begins the names of buffers that have one row per sample."""


def describe(spec: ModelSpec) -> Program:
    """The program of one step. With `has_qkv_bias` the projections of q, k and v add a bias, as those of Qwen 2 do."""
    ops: list[Op] = [Embed(out="x", weight="embed")]
    for layer in range(spec.num_layers - 1):
        ops += _attention(spec, layer)
        ops += _rest(spec, layer)
    ops += _attention(spec, spec.num_layers - 1)
    # After the last attention nobody reads other tokens than those that sample: a prompt skips most of a layer.
    ops += [GatherRows(out=SAMPLED + name, x=name) for name in ("x", "attn")]
    ops += _rest(spec, spec.num_layers - 1, SAMPLED)
    ops += _head(spec)
    return Program(
        ops=tuple(ops),
        buffers=_buffers(spec),
        num_layers=spec.num_layers,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
    )


def _buffers(spec: ModelSpec) -> tuple[tuple[str, int], ...]:
    """`x` is the residual stream, `normed` its normalised copy."""
    heads, kv_heads = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    rest = (
        ("x", spec.hidden_size),
        ("normed", spec.hidden_size),
        ("attn", heads),
        ("gate", spec.intermediate_size),
        ("up", spec.intermediate_size),
        ("act", spec.intermediate_size),
    )
    sampled = tuple((SAMPLED + name, width) for name, width in rest)
    return (*rest, ("q", heads), ("k", kv_heads), ("v", kv_heads), *sampled, ("logits", spec.vocab_size))


def _attention(spec: ModelSpec, layer: int) -> list[Op]:
    at = f"layers.{layer}"

    def project(name: str) -> Linear:
        return Linear(out=name, x="normed", weight=f"{at}.{name}", bias=f"{at}.{name}_bias" if spec.has_qkv_bias else None)

    def rotate(name: str, num_heads: int) -> Rope:
        return Rope(
            x=name,
            num_heads=num_heads,
            head_dim=spec.head_dim,
            inv_freq=spec.rope_inv_freq,
            attention_factor=spec.rope_attention_factor,
        )

    write = KvWrite(layer=layer, k="k", v="v")
    if spec.has_qkv_bias:
        write = KvWrite(layer, "k", "v", f"{at}.k_bias", spec.rope_inv_freq, spec.rope_attention_factor)
    attention = Attention(
        out="attn",
        q="q",
        layer=layer,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
    )
    return [
        RMSNorm(out="normed", x="x", weight=f"{at}.attn_norm", eps=spec.norm_eps),
        project("q"),
        project("k"),
        project("v"),
        rotate("q", spec.num_heads),
        rotate("k", spec.num_kv_heads),
        write,
        attention,
    ]


def _rest(spec: ModelSpec, layer: int, of: str = "") -> list[Op]:
    """What follows a layer's attention, on buffers whose names begin with `of`."""
    at = f"layers.{layer}"
    x, normed, attn, gate, up, act = (of + name for name in ("x", "normed", "attn", "gate", "up", "act"))
    return [
        Linear(out=x, x=attn, weight=f"{at}.o", residual=x),
        RMSNorm(out=normed, x=x, weight=f"{at}.mlp_norm", eps=spec.norm_eps),
        Linear(out=gate, x=normed, weight=f"{at}.gate"),
        Linear(out=up, x=normed, weight=f"{at}.up"),
        GatedActivation(out=act, gate=gate, up=up, activation="silu"),
        Linear(out=x, x=act, weight=f"{at}.down", residual=x),
    ]


def _head(spec: ModelSpec) -> list[Op]:
    x, normed = SAMPLED + "x", SAMPLED + "normed"
    return [
        RMSNorm(out=normed, x=x, weight="norm", eps=spec.norm_eps),
        Logits(out="logits", x=normed, weight="embed" if spec.tie_word_embeddings else "output"),
    ]
