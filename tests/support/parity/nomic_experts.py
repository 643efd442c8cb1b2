"""Owns Nomic-BERT with experts in NumPy, in float64: no class of transformers has them.

Written after arXiv 2502.07972 and the makers' description; it shares no code with the package under test. Called by
`make_encoder_golden.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import erf
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_ERF = np.vectorize(erf)


def nomic_states(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], token_ids: tuple[int, ...]) -> Array:
    """Return the last layer's states of a text whose tokens all have the first type. [num_tokens, n_embd]"""
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    x = w["embeddings.word_embeddings.weight"][list(token_ids)] + w["embeddings.token_type_embeddings.weight"][0]
    x = _norm(x, w, "emb_ln", config)
    for layer in range(config["n_layer"]):
        at = f"encoder.layers.{layer}"
        x = _norm(x + _attend(x, w, f"{at}.attn", config), w, f"{at}.norm1", config)
        has_experts = layer % config["moe_every_n_layers"] == 1
        added = _mix(x, w, f"{at}.mlp", config) if has_experts else _mlp(x, w, f"{at}.mlp")
        x = _norm(x + added, w, f"{at}.norm2", config)
    return x


def _linear(x: Array, w: Mapping[str, Array], name: str) -> Array:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def _mlp(x: Array, w: Mapping[str, Array], at: str) -> Array:
    return _linear(_gelu(_linear(x, w, f"{at}.fc1")), w, f"{at}.fc2")


def _gelu(x: Array) -> Array:
    return x * (1 + _ERF(x / np.sqrt(2))) / 2


def _norm(x: Array, w: Mapping[str, Array], name: str, config: Mapping[str, Any]) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def _softmax(x: Array) -> Array:
    shares = np.exp(x - x.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def _attend(x: Array, w: Mapping[str, Array], at: str, config: Mapping[str, Any]) -> Array:
    num_heads = config["n_head"]
    q, k, v = (_linear(x, w, f"{at}.Wqkv").reshape(len(x), 3, num_heads, -1)[:, part] for part in range(3))
    half = q.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), config["rotary_emb_base"] ** (-np.arange(half) / half))[:, None]

    def turned(heads: Array) -> Array:
        first, second = heads[..., :half], heads[..., half:]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cos - second * sin, first * sin + second * cos], axis=-1)

    scores = np.einsum("ihd,jhd->hij", turned(q), turned(k)) / np.sqrt(2 * half)
    seen = np.einsum("hij,jhd->ihd", _softmax(scores), v).reshape(len(x), -1)
    return _linear(seen, w, f"{at}.out_proj")


def _mix(x: Array, w: Mapping[str, Array], at: str, config: Mapping[str, Any]) -> Array:
    """Return the chosen experts' outputs, times the softmax over all experts, and one bias."""
    num_experts, width = config["num_experts"], config["n_inner"]
    up, down = (w[f"{at}.experts.mlp.{name}"].reshape(num_experts, width, -1) for name in ("w1", "w2"))
    shares = _softmax(x @ w[f"{at}.router.layer.weight"].T)
    out = np.tile(w[f"{at}.experts.bias"], (len(x), 1))
    for token in range(len(x)):
        for expert in np.argsort(-shares[token])[: config["moe_top_k"]]:
            out[token] += shares[token, expert] * (_gelu(up[expert] @ x[token]) @ down[expert])
    return out
