"""The language in which architectures are described: a flat list of operations on named buffers.

A model's description emits a `Program`; backends run it. Nothing here computes. All buffers hold
float32 [num_tokens, width] unless said otherwise, num_tokens being those of the step; what `GatherRows` writes
has one row for each row of the step that samples, and so has what is computed from it. Operations run in order; those
before the first `GatherRows` are on tokens, and those after it on samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]
Mask = Literal["causal"]


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = weight[token_ids[t]] * scale."""

    out: str
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class RMSNorm:
    """out = x / sqrt(mean(x^2) + eps) * weight, per group of `group` columns (0: the whole row)."""

    out: str
    x: str
    weight: str
    eps: float
    group: int = 0


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """out = (x - mean) / sqrt(var + eps) * weight + bias."""

    out: str
    x: str
    weight: str
    bias: str
    eps: float


@dataclass(frozen=True, slots=True)
class Linear:
    """out = x @ weight.T (+ bias) (+ residual). weight is [out width, x width]; `residual` may be `out`."""

    out: str
    x: str
    weight: str
    bias: str | None = None
    residual: str | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotate each head of x in place by its position: pairs (i, i + n/2) of the first n = 2 * len(inv_freq) columns.

    angle = position * inv_freq[i]; cos and sin are multiplied by `attention_factor`.
    Source: RoFormer, arXiv 2104.09864, in the half-split layout of Hugging Face checkpoints.
    """

    x: str
    num_heads: int
    head_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class KvWrite:
    """Store k and v [num_tokens, num_kv_heads * head_dim] of a layer at each token's slot, rounded to the cache's type.

    What the key's bias adds to every key may be taken off before (`models.key_centre` has the reason).
    """

    layer: int
    k: str
    v: str
    bias: str | None = None
    """Weight that was added to k before its rotation. [num_kv_heads * head_dim]"""
    inv_freq: tuple[float, ...] = ()
    """Of that rotation, as in `Rope`."""
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention:
    """out = softmax(scale * q k^T + mask) v over the row's KV in the cache, this step's included.

    q and out are [num_tokens, num_heads * head_dim]; query head h reads KV head h // (num_heads // num_kv_heads).
    """

    out: str
    q: str
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    mask: Mask = "causal"
    window: int = 0
    """Attend to the last `window` positions only, the query's own included; 0 is all."""
    softcap: float = 0.0
    """If > 0, scores become softcap * tanh(scores / softcap) before the mask."""


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out = activation(gate) * up."""

    out: str
    gate: str
    up: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Act:
    """out = activation(x), without a gate."""

    out: str
    x: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + b."""

    out: str
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class GatherRows:
    """out = the last token's row of x for each row of the step that samples. [num_samples, width]"""

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class Softcap:
    """x = cap * tanh(x / cap), in place."""

    x: str
    cap: float


@dataclass(frozen=True, slots=True)
class Logits:
    """The result: x @ weight.T as float32 [num_samples, vocab_size]. The last operation but for `Softcap` of it."""

    out: str
    x: str
    weight: str


Op = (
    Embed
    | RMSNorm
    | LayerNorm
    | Linear
    | Rope
    | KvWrite
    | Attention
    | GatedActivation
    | Act
    | Add
    | GatherRows
    | Softcap
    | Logits
)


@dataclass(frozen=True, slots=True)
class Program:
    """What a step of one model computes."""

    ops: tuple[Op, ...]
    buffers: tuple[tuple[str, int], ...]
    """(name, width) of every buffer, in order of first use."""
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int

    def width(self, name: str) -> int:
        """Columns of a buffer. Raises KeyError."""
        return dict(self.buffers)[name]
