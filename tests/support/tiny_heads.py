"""Tiny random draft heads (EAGLE-3) as directories, for tests, and what they compute, written down a second time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.tiny_models import TinyLlama, encode, write_encoded

F32 = NDArray[np.float32]
NUM_LOGITS = 100
"""Tokens that a head can guess."""


def head_weights(target: TinyLlama, seed: int = 0) -> dict[str, F32]:
    """By the names of SpecForge's checkpoints, rounded to bf16."""
    rng, size = np.random.default_rng(seed), target.hidden_size
    heads, kv_heads = target.num_heads * target.head_dim, target.num_kv_heads * target.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (size, 3 * size),
        "midlayer.input_layernorm.weight": (size,),
        "midlayer.hidden_norm.weight": (size,),
        "midlayer.self_attn.q_proj.weight": (heads, 2 * size),
        "midlayer.self_attn.k_proj.weight": (kv_heads, 2 * size),
        "midlayer.self_attn.v_proj.weight": (kv_heads, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, heads),
        "midlayer.post_attention_layernorm.weight": (size,),
        "midlayer.mlp.gate_proj.weight": (target.intermediate_size, size),
        "midlayer.mlp.up_proj.weight": (target.intermediate_size, size),
        "midlayer.mlp.down_proj.weight": (size, target.intermediate_size),
        "norm.weight": (size,),
        "lm_head.weight": (NUM_LOGITS, size),
    }
    found: dict[str, F32] = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape).astype(np.float32)
        values = 1.0 + 0.1 * noise if "norm" in name else 2.0 * noise / np.sqrt(np.float32(shape[-1]))
        found[name] = as_bf16(values.astype(np.float32))
    return found


def as_bf16(values: F32) -> F32:
    return (values.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def guessable(target: TinyLlama, seed: int = 0) -> NDArray[np.int64]:
    """The token of each of the head's logits, ascending."""
    return np.sort(np.random.default_rng(seed).choice(target.vocab_size, NUM_LOGITS, replace=False)).astype(np.int64)


def config_of(target: TinyLlama) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": NUM_LOGITS,
        "hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "max_position_embeddings": 128,
        "rms_norm_eps": target.norm_eps,
        "rope_theta": target.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }


def write_head(
    directory: Path,
    target: TinyLlama,
    *,
    seed: int = 0,
    extra: Mapping[str, Any] | None = None,
    renamed: Mapping[str, str] | None = None,
    without: tuple[str, ...] = (),
) -> Path:
    """`extra` adds keys to config.json or replaces them; `renamed` replaces a part of tensors' names."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**config_of(target), **(extra or {})}))
    tokens = guessable(target, seed)
    is_guessable = np.isin(np.arange(target.vocab_size), tokens)
    tensors = {name: ("BF16", values.shape, encode(values, "bf16")) for name, values in head_weights(target, seed).items()}
    tensors["d2t"] = "I64", tokens.shape, (tokens - np.arange(NUM_LOGITS)).tobytes()
    tensors["t2d"] = "BOOL", is_guessable.shape, is_guessable.tobytes()
    for old, new in (renamed or {}).items():
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    write_encoded(directory / "model.safetensors", {name: one for name, one in tensors.items() if name not in without})
    return directory


class HeadInNumpy:
    """Guesses of a head, from all tokens at once, by the equations of the paper's code: no cache, no steps."""

    def __init__(self, target: TinyLlama, seed: int = 0, *, norms_first: bool = False) -> None:
        self._target, self._tokens = target, guessable(target, seed)
        self._weights = {
            name: _in_8_bits(values) if values.ndim == 2 else values for name, values in head_weights(target, seed).items()
        }
        self._embed = as_bf16(target.weights()["model.embed_tokens.weight"])
        self._norms_first = norms_first

    def features(self, sources: F32) -> F32:
        """`sources`: the model's three residual streams side by side."""
        return sources @ self._weights["fc.weight"].T

    def judged(self, token_ids: Sequence[int], features: F32, guesses: Sequence[int]) -> list[tuple[float, float]]:
        """Return (probability, that of the likeliest token) of each guess, given those before it. Rounding may decide between
        two tokens that are nearly as likely."""
        states, read = features, list(token_ids[1:])
        found: list[tuple[float, float]] = []
        for guess in guesses:
            last = self._layer(self._embed[read], states)[-1:]
            logits = (self._norm(last, "norm") @ self._weights["lm_head.weight"].T)[0]
            shares = np.exp(logits - logits.max())
            chances = np.zeros(self._target.vocab_size, np.float32)
            chances[self._tokens] = shares / shares.sum()
            found.append((float(chances[guess]), float(chances.max())))
            read.append(guess)
            states = np.concatenate([states, last])
        return found

    def _layer(self, embedded: F32, states: F32) -> F32:
        normed = self._norm(states, "midlayer.hidden_norm")
        both = np.concatenate([self._norm(embedded, "midlayer.input_layernorm"), normed], axis=1)
        x = (normed if self._norms_first else states) + self._attention(both)
        y = self._norm(x, "midlayer.post_attention_layernorm")
        gate, up = (y @ self._weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (gate / (1 + np.exp(-gate)) * up) @ self._weights["midlayer.mlp.down_proj.weight"].T

    def _norm(self, x: F32, name: str) -> F32:
        scale = np.sqrt(np.mean(x * x, axis=1, keepdims=True) + np.float32(self._target.norm_eps))
        return x / scale * self._weights[f"{name}.weight"]

    def _attention(self, x: F32) -> F32:
        num, heads, kv_heads, dim = len(x), self._target.num_heads, self._target.num_kv_heads, self._target.head_dim
        q, k, v = (
            (x @ self._weights[f"midlayer.self_attn.{name}_proj.weight"].T).reshape(num, -1, dim).swapaxes(0, 1)
            for name in "qkv"
        )
        q, k = self._turned(q), np.repeat(self._turned(k), heads // kv_heads, axis=0)
        scores = q @ k.swapaxes(1, 2) / np.sqrt(dim) + np.triu(np.full((num, num), -np.inf), 1)
        shares = np.exp(scores - scores.max(axis=2, keepdims=True))
        out = shares / shares.sum(axis=2, keepdims=True) @ np.repeat(v, heads // kv_heads, axis=0)
        return (out.swapaxes(0, 1).reshape(num, -1) @ self._weights["midlayer.self_attn.o_proj.weight"].T).astype(np.float32)

    def _turned(self, x: F32) -> F32:
        half = self._target.head_dim // 2
        angles = np.arange(x.shape[1])[:, None] * self._target.rope_theta ** -(np.arange(half) / half)
        low, high = x[..., :half], x[..., half:]
        return np.concatenate(
            [low * np.cos(angles) - high * np.sin(angles), high * np.cos(angles) + low * np.sin(angles)], axis=2
        ).astype(np.float32)


def _in_8_bits(values: F32) -> F32:
    """Round each group of 32 columns to 255 values."""
    groups = values.reshape(len(values), -1, 32)
    scales = (np.abs(groups).max(axis=2, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    rounded: F32 = np.rint(groups / scales) * scales
    return rounded.reshape(values.shape)
