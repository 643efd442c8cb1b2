"""The shape of a decoder-only model, read from its file; no weights."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types.kv_dtype import KvDtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    """Our name of the architecture: a key of `models.registry`."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_inv_freq: tuple[float, ...]
    """Rotation per position of each pair (i, i + rope_dim/2), radians, scaling applied. [rope_dim / 2]"""
    max_model_len: int
    """Positions that the model was trained for."""
    tie_word_embeddings: bool
    has_qkv_bias: bool = False
    rope_attention_factor: float = 1.0
    """Multiplies cos and sin (YaRN and its kin); 1 otherwise."""

    def kv_bytes_per_token(self, dtype: KvDtype) -> int:
        """Bytes of the keys and values of a position over all layers, with their scales, as the native backend stores them."""
        return self.num_layers * self.num_kv_heads * dtype.head_bytes(self.head_dim)
