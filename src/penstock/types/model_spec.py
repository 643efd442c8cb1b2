"""The shape of a model, layer by layer, read from its files; no weights.

Loaders make a `ModelSpec`. The description of its architecture makes a `Program` of it, and `deploy` sizes the KV cache by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from penstock.types.kv_dtype import KvDtype, state_bytes

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_quick", "relu", "relu2", "tanh", "swiglu_clamped"]
"""`swiglu_clamped` is of a gate and its partner together; the others are of one number. `models.program` has the formulas."""
Scoring = Literal["softmax", "sigmoid"]
"""How a router's scores become shares."""
Mask = Literal["causal", "all"]
"""The tokens of its text that a token sees: itself and those before it, or all."""
Pooling = Literal["first", "last", "mean", "each"]
"""How a text's tokens become its answer: the first or last one's state, the mean, or one state for each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary positions of a layer's queries and keys."""

    inv_freq: tuple[float, ...]
    """Rotation per position of each pair (i, i + rope_dim/2), radians, scaling applied. [rope_dim / 2]"""
    attention_factor: float = 1.0
    """Factor of cos and sin (YaRN and its kin)."""
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + p // growth_len)."""
    growth_len: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """Attention of a layer: query heads that share key-value heads in groups, over the row's earlier positions."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Columns of a head. Queries, keys and values have the same number."""
    rotation: Rotation | None
    """None: queries and keys keep their direction at every position."""
    scale: float | None = None
    """Factor of the scores; None is head_dim ** -0.5."""
    window: int = 0
    """Number of last positions that a token sees, its own included; 0 is all. With mask `all`, it sees those that are less than
    that far away, on both sides."""
    mask: Mask = "causal"
    num_distances: int = 0
    """Scores have a learned or fixed bias by the distance of key and query, the same beyond so many positions; 0: none has."""
    softcap: float = 0.0
    """If > 0, scores become softcap * tanh(scores / softcap)."""
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    """The output projection has a bias."""
    has_sinks: bool = False
    """Each head's softmax has one more term, which no value belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution over the last few positions, each column of the hidden state by itself."""

    kernel: int
    """Number of last positions that an output depends on, its own included."""
    has_bias: bool = False
    """The convolution and both projections have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False
    """All three projections have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation
    has_bias: bool = False
    """Both projections have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsMlp:
    """A mixture of experts: each token goes through the few gated MLPs that a router chooses for it."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    """Width of each expert."""
    activation: Activation = "silu"
    scoring: Scoring = "softmax"
    is_renormalised: bool = True
    """Shares of the chosen experts are divided by their sum."""
    share_factor: float = 1.0
    """Factor of the shares, after that."""
    has_router_bias: bool = False
    has_selection_bias: bool = False
    """Biases that only the choice of experts sees."""
    has_bias: bool = False
    """The experts' projections have biases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    mixer: AttentionSpec | ShortConvSpec
    """How a token learns of those before it."""
    mlp: GatedMlp | PlainMlp | ExpertsMlp
    has_attn_norm: bool = True
    """False: attention reads what the norm before the MLP made, and both run side by side."""

    @property
    def attention(self) -> AttentionSpec:
        """The attention of a layer that has one."""
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """norm(activation(x @ weight.T + bias)): a layer between a text's pooled state and the answer."""

    width: int
    activation: Activation | None = None
    has_bias: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnding:
    """The answer of a model that reads texts and writes none: an embedding, or the scores of a head."""

    pooling: Pooling
    dense: tuple[Dense, ...] = ()
    """In order. Poolers, heads and the dense modules of sentence-transformers are such layers."""
    is_normalised: bool = False
    """The answer is divided by its Euclidean length."""
    labels: tuple[str, ...] = ()
    """The names of the answer's columns, if a head makes them; an embedding has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    """Our name of the architecture: a key of `models.architectures.ARCHITECTURES`."""
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    """In order; mostly one and the same value, many times."""
    norm_eps: float
    max_model_len: int
    """Positions that the model was trained for."""
    tie_word_embeddings: bool
    embed_scale: float = 1.0
    """Factor of the embeddings."""
    logit_softcap: float = 0.0
    """If > 0, logits become logit_softcap * tanh(logits / logit_softcap)."""
    logit_scale: float = 1.0
    """Factor of the logits, before the cap."""
    residual_scale: float = 1.0
    """Factor of what a layer's attention and its MLP add to the residual stream."""
    norm: Literal["rms", "layer"] = "rms"
    has_norm_bias: bool = False
    """Layer norms have biases."""
    num_types: int = 0
    """Token types that have an embedding: with 2, the tokens of a pair's second text are of the second; 0: there are none."""
    first_position: int = 0
    """The row of the table of learned positions that belongs to a text's first token."""
    ending: TextEnding | None = None
    """None: the model writes text, and its answer to each token is logits."""

    @property
    def result_width(self) -> int:
        """Columns of a text's answer, or of a token's logits."""
        if self.ending is None:
            return self.vocab_size
        return self.ending.dense[-1].width if self.ending.dense else self.hidden_size

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        """The attentions of the layers that have one, in order."""
        return tuple(layer.mixer for layer in self.layers if isinstance(layer.mixer, AttentionSpec))

    def with_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
        """The same with each layer as `change` makes it of its number and itself."""
        return replace(self, layers=tuple(change(i, layer) for i, layer in enumerate(self.layers)))

    def with_attention(self, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
        """The same with the attention of each layer as `change` makes it of the layer's number and its attention.

        Layers without attention are left as they are.
        """

        def changed(i: int, layer: LayerSpec) -> LayerSpec:
            return replace(layer, mixer=change(i, layer.mixer)) if isinstance(layer.mixer, AttentionSpec) else layer

        return self.with_layers(changed)

    def with_windows(self, window: int, is_local: Sequence[bool]) -> ModelSpec:
        """The same where local layers see the last `window` positions, and the others all. `is_local` has a value per layer."""
        return self.with_attention(lambda i, attention: replace(attention, window=window if is_local[i] else 0))

    def with_plain_mlps(self, activation: Activation) -> ModelSpec:
        """The same with MLPs of the same width and biases that have no gate."""

        def plain(_: int, layer: LayerSpec) -> LayerSpec:
            assert isinstance(layer.mlp, GatedMlp)
            size, has_bias = layer.mlp.intermediate_size, layer.mlp.has_bias
            return replace(layer, mlp=PlainMlp(intermediate_size=size, activation=activation, has_bias=has_bias))

        return self.with_layers(plain)

    def kv_bytes_per_token(self, dtype: KvDtype) -> int:
        """Bytes of the keys and values of a position over all layers, with their scales, as the native backend stores them."""
        return sum(attention.num_kv_heads * dtype.head_bytes(attention.head_dim) for attention in self.attentions)

    @property
    def has_state(self) -> bool:
        """Some layers have a recurrent state."""
        return len(self.attentions) < self.num_layers

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state in a KV block of the native backend; 0 for most models."""
        num_columns = sum(layer.mixer.kernel - 1 for layer in self.layers if isinstance(layer.mixer, ShortConvSpec))
        return state_bytes(num_columns, self.hidden_size)

    def block_bytes(self, dtype: KvDtype, block_size: int) -> int:
        """Bytes of a KV block of the native backend."""
        return block_size * self.kv_bytes_per_token(dtype) + self.state_bytes

    @property
    def expert_buffer_bytes_per_token(self) -> int:
        """Bytes for a token of a step and the experts that it goes to, at the most, as the native backend lays them out
        (native/experts.h); layers of one shape share them."""
        shapes = {
            (mlp.num_experts, mlp.num_experts_per_token, mlp.intermediate_size)
            for layer in self.layers
            if isinstance(mlp := layer.mlp, ExpertsMlp)
        }
        return sum(
            4 * num_experts
            + num_chosen * (12 + self._pair_bytes(self.hidden_size, 2, width) + self._pair_bytes(width, 1, self.hidden_size))
            for num_experts, num_chosen, width in shapes
        )

    @staticmethod
    def _pair_bytes(num_cols: int, num_matrices: int, num_rows: int) -> int:
        """Bytes that an expert's matrices multiply of a token, in 16 bits or in 8 with scales and outliers, and make of it."""
        return 2 * num_cols + 20 + 4 * num_matrices * -(-num_rows // 16) * 16


def spec_of_equal_layers(
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
    """The spec of a model like Llama, whose layers are all alike. `rest` are the other fields of `ModelSpec`."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotation=Rotation(inv_freq=rope_inv_freq, attention_factor=rope_attention_factor),
        has_qkv_bias=has_qkv_bias,
    )
    layer = LayerSpec(mixer=attention, mlp=GatedMlp(intermediate_size=intermediate_size))
    return ModelSpec(layers=(layer,) * num_layers, **rest)
