"""Owns NeoBERT in NumPy, in float64: no class of transformers has it.

Written after arXiv 2502.19587 and the makers' description; it shares no code with the package under test. Called by
`make_encoder_golden.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def neobert_states(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], token_ids: tuple[int, ...]) -> Array:
    """Return the last layer's states. [num_tokens, hidden_size]"""
    w = {name.removeprefix("model."): values.astype(np.float64) for name, values in weights.items()}
    x = w["encoder.weight"][list(token_ids)]
    for layer in range(config["num_hidden_layers"]):
        at = f"transformer_encoder.{layer}"
        x = x + _attend(_norm(x, w[f"{at}.attention_norm.weight"], config), w, at, config)
        gate, up = np.split(_norm(x, w[f"{at}.ffn_norm.weight"], config) @ w[f"{at}.ffn.w12.weight"].T, 2, axis=-1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}.ffn.w3.weight"].T
    return _norm(x, w["layer_norm.weight"], config)


def neobert_scores(config: Mapping[str, Any], weights: Mapping[str, NDArray[np.float32]], token_ids: tuple[int, ...]) -> Array:
    """Return the classifier's scores of a text. [1, num_labels]"""
    first = neobert_states(config, weights, token_ids)[:1]
    pooled = np.tanh(first @ weights["dense.weight"].T + weights["dense.bias"])
    return np.asarray(pooled @ weights["classifier.weight"].T + weights["classifier.bias"])


def _norm(x: Array, weight: Array, config: Mapping[str, Any]) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["norm_eps"]) * weight


def _attend(x: Array, w: Mapping[str, Array], at: str, config: Mapping[str, Any]) -> Array:
    heads = (x @ w[f"{at}.qkv.weight"].T).reshape(len(x), config["num_attention_heads"], -1)
    q, k, v = np.split(heads, 3, axis=-1)
    width = q.shape[-1]
    angles = np.outer(np.arange(len(x)), 10_000.0 ** (-np.arange(0, width, 2) / width))[:, None]

    def turned(heads: Array) -> Array:
        pairs = (heads[..., 0::2] + 1j * heads[..., 1::2]) * np.exp(1j * angles)
        return np.stack([pairs.real, pairs.imag], axis=-1).reshape(heads.shape)

    scores = np.einsum("ihd,jhd->hij", turned(q), turned(k)) / np.sqrt(width)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    seen = np.einsum("hij,jhd->ihd", shares / shares.sum(-1, keepdims=True), v)
    return np.asarray(seen.reshape(len(x), -1) @ w[f"{at}.wo.weight"].T)
