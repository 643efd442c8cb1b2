"""The language in which architectures are described: a flat list of operations on named buffers.

A model's description emits a `Program`; backends run it. Nothing here computes. All buffers hold
float32 [num_tokens, width] unless said otherwise, num_tokens being those of the step; what `GatherRows` writes
has one row for each row of the step that samples, and so has what is computed from it. Operations run in order; those
before the first `GatherRows` are on tokens, and those after it on samples. The last one is the program's ending: what the
step is computed for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation

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

    The part that the bias adds to every key may be taken off before (`models.rope` has the reason).
    """

    layer: int
    k: str
    v: str
    bias: str | None = None
    """Weight that was added to k before its rotation. [num_kv_heads * head_dim]"""
    inv_freq: tuple[float, ...] = ()
    """Frequencies of that rotation, as in `Rope`."""
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
class Experts:
    """out = the sum over the experts e that are chosen for a token of p_e * down_e(activation(gate_e(x)) * up_e(x)).

    The router's scores are x @ router.T. The `num_experts_per_token` largest are chosen, of equal ones the first;
    p is the softmax over these alone. The matrices of all experts lie in one, one below the other: gate and up are
    [num_experts * intermediate_size, width of x], down is [num_experts * width of out, intermediate_size].
    Source: Mixtral of Experts, arXiv 2401.04088.
    """

    out: str
    x: str
    router: str
    gate: str
    up: str
    down: str
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
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
class MeanRows:
    """out = the mean of x over a row's tokens, for each row of the step that samples. [num_samples, width]

    It is of the tokens of one step: the row's text must be computed in one, from its first token on.
    """

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class Softcap:
    """x = cap * tanh(x / cap), in place."""

    x: str
    cap: float


@dataclass(frozen=True, slots=True)
class Logits:
    """An ending: x @ weight.T as float32 [num_samples, vocab_size]. The last operation but for `Softcap` of it."""

    out: str
    x: str
    weight: str


@dataclass(frozen=True, slots=True)
class States:
    """An ending: x itself, float32 [num_samples, width]: hidden states of texts, or the scores of a classification head.

    With `is_normalised` each row is divided by its Euclidean length.
    """

    x: str
    is_normalised: bool = False


Op = (
    Embed
    | RMSNorm
    | LayerNorm
    | Linear
    | Rope
    | KvWrite
    | Attention
    | GatedActivation
    | Experts
    | Act
    | Add
    | GatherRows
    | MeanRows
    | Softcap
    | Logits
    | States
)


@dataclass(frozen=True, slots=True)
class Program:
    """The computation of one step of a model. Raises ModelError if layers differ in the shape of their keys and values."""

    ops: tuple[Op, ...]
    buffers: tuple[tuple[str, int], ...]
    """(name, width) of every buffer, in order of first use."""
    num_layers: int
    num_kv_heads: int
    """The number in every layer: the KV cache of each backend has one shape for all."""
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        for op in self.ops:
            if isinstance(op, Attention) and (op.num_kv_heads, op.head_dim) != (self.num_kv_heads, self.head_dim):
                raise ModelError(
                    f"layer {op.layer} has {op.num_kv_heads} key-value heads of {op.head_dim} columns, "
                    f"and another layer {self.num_kv_heads} of {self.head_dim}: no backend has a KV cache for that yet.",
                    remedy="Use another model.",
                )

    @property
    def ending(self) -> Logits | States:
        """The operation that the step is computed for. Raises ModelError for a program that has none, or two."""
        endings = [op for op in self.ops if isinstance(op, Logits | States)]
        if len(endings) != 1:
            raise ModelError(f"the program has {len(endings)} endings, not one.", remedy="Mend the architecture's description.")
        return endings[0]

    def width(self, name: str) -> int:
        """Columns of a buffer. Raises KeyError."""
        return dict(self.buffers)[name]
