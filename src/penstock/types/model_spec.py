"""The shape of a model, layer by layer, without weights. An architecture turns it into a `Program`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Activation = Literal["silu", "gelu_tanh", "gelu", "gelu_quick", "relu", "relu2", "elu", "tanh", "sigmoid", "swiglu_clamped"]
"""Activation functions. `models.program` has the formulas."""
Scoring = Literal["softmax", "sigmoid"]
Mask = Literal["causal", "all"]
"""The tokens of its text that a token sees: itself and earlier ones, or all."""
Pooling = Literal["first", "last", "mean", "each", "sparse"]
"""How a text's tokens become its answer: the first or last state, the mean, or one state per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Rotary positions of a layer's queries and keys."""

    inv_freq: tuple[float, ...]  # radians per position for each pair (i, i + rope_dim/2), scaling applied
    attention_factor: float = 1.0  # factor of cos and sin (YaRN and similar)
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + query_growth * ln(1 + p // growth_len)."""
    growth_len: int = 1
    length_note: str = field(default="", compare=False, repr=False)
    """Which texts the frequencies are for, where that depends on the longest one to serve."""
    stretched_len: int = field(default=0, compare=False, repr=False)
    """Tokens of the longest text that --max-model-len can request, where that may exceed the model's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Columns of latent attention (MLA). A head makes its keys and values of each token's latent, which all heads share."""

    key_dim: int  # of a head's key, and of its query
    value_dim: int
    rotary_dim: int  # of the rotated key that all heads share, and of a head's query to it
    query_rank: int = 0  # between the two projections of queries; 0: there is one
    has_transposed_keys: bool = False  # key matrices are stored transposed, to multiply queries instead of latents


@dataclass(frozen=True, slots=True, kw_only=True)
class RelativeSpec:
    """Disentangled attention: scores depend on distances, too, by 2 * `span` learned rows that each layer projects."""

    span: int
    farthest: int = 0
    """Distances from span / 2 to this one share rows, in ranges that grow by a factor. 0: each distance has its row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotation: Rotation | None
    scale: float | None = None  # factor of the scores; None is head_dim ** -0.5
    window: int = 0
    """Last positions that a token sees, its own included; 0 is all. With mask `all`, on both sides."""
    mask: Mask = "causal"
    num_distances: int = 0
    """Scores get a bias by the distance of key and query. Greater distances have the bias of this one. 0: no bias."""
    relative: RelativeSpec | None = None
    softcap: float = 0.0  # if > 0, scores become softcap * tanh(scores / softcap)
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_qk_norms: bool = False  # in architectures that leave it to the model: norms of each head of q and k
    has_sinks: bool = False  # each head's softmax has one more term, without a value
    kv_layer: int | None = None  # an earlier layer whose keys and values this one reads; None: it has its own
    has_keys_as_values: bool = False  # values are made of the keys before their norm and rotation
    has_gate: bool = False  # the output is multiplied by sigmoid(x @ q_gate.T)
    latent: LatentSpec | None = None
    """If given, all heads share one KV head: `head_dim` columns, a token's latent and then its rotated key."""

    @property
    def latent_rank(self) -> int:
        """Columns of a token's latent, which are the first of its key and all of its value; 0 without a latent."""
        return 0 if self.latent is None else self.head_dim - self.latent.rotary_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvSpec:
    """A gated convolution over the last `kernel` positions, column by column."""

    kernel: int
    has_bias: bool = False  # on the convolution and both projections


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttentionSpec:
    """A convolution, then attention that keeps a matrix for each value head instead of keys and values.

    A gated delta net, or Mamba-2, which calls values, keys and queries x, B and C.
    """

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    has_delta_rule: bool  # else it is Mamba-2
    has_bias: bool = False  # on the projections
    has_conv_bias: bool = False
    min_step: float = 0.0
    max_step: float = math.inf
    has_tiled_heads: bool = False  # value head h reads key head h % num_key_heads, and not h // (num_heads // num_key_heads)
    has_norm: bool = True  # of Mamba-2's output, by groups of the heads that share a key head, with a weight for each column
    has_norm_before_gate: bool = False
    norm_eps: float | None = None  # of the output's norm; None: that of the model
    has_rates_to_two: bool = False  # the delta rule's rates are twice as large

    @property
    def key_width(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.num_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def num_state_floats(self) -> int:
        return self.num_heads * self.key_dim * self.value_dim + (self.kernel - 1) * self.conv_width


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """A gated MLP: down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation = "silu"
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainMlp:
    """An ungated MLP: down(activation(up(x)))."""

    intermediate_size: int
    activation: Activation
    has_xielu: bool = False  # p * relu(u)^2 + n * (activation(u) - u) + beta * activation(u): xIELU, of three numbers
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsMlp:
    """A mixture of experts: a router picks a few MLPs for each token. A shared one may serve all tokens beside them."""

    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    activation: Activation = "silu"
    scoring: Scoring = "softmax"
    is_renormalised: bool = True  # the chosen experts' shares are divided by their sum
    share_factor: float = 1.0
    has_router_bias: bool = False
    has_selection_bias: bool = False  # biases that affect only the choice of experts
    num_groups: int = 0  # groups of consecutive experts; 0: all may be chosen
    num_chosen_groups: int = 0  # groups that a token may use
    num_group_scores: int = 1  # groups are ranked by the sum of this many largest scores
    has_share_scale: bool = False  # each expert's share is multiplied by a number of its own, last
    has_bias: bool = False
    has_sum_bias: bool = False  # a vector is added to the sum of the chosen experts' outputs
    has_gate: bool = True  # the MLPs are gated, the shared one too
    shared_size: int = 0  # intermediate size of the shared expert; 0: there is none
    has_shared_gate: bool = False  # the shared expert's output is multiplied by sigmoid(x @ shared_router.T)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFactors:
    """Factors between the parts of a layer of Falcon-H1, which has Mamba-2 beside attention."""

    gate: float = 1.0
    conv: tuple[float, float, float] = (1.0, 1.0, 1.0)  # of x, B and C; the loader multiplies the convolution's weights
    steps: float = 1.0
    mixed: float = 1.0  # of what Mamba-2 adds to the residual stream
    attended: float = 1.0  # likewise attention
    mlp_in: float = 1.0
    mlp_out: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    mixer: AttentionSpec | ShortConvSpec | LinearAttentionSpec | None
    mlp: GatedMlp | PlainMlp | ExpertsMlp | None
    beside: LinearAttentionSpec | None = None  # a second mixer, which reads what the first one reads
    factors: LayerFactors | None = None
    has_attn_norm: bool = True
    """False: attention reads the output of the MLP's norm, and both run side by side."""

    @property
    def attention(self) -> AttentionSpec:
        assert isinstance(self.mixer, AttentionSpec)
        return self.mixer

    @property
    def mixers(self) -> tuple[AttentionSpec | ShortConvSpec | LinearAttentionSpec, ...]:
        return tuple(mixer for mixer in (self.mixer, self.beside) if mixer is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dense:
    """norm(activation(x @ weight.T + bias)): a layer between a text's pooled state and the answer."""

    width: int
    activation: Activation | None = None
    has_bias: bool = True
    has_norm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEnding:
    """How a model that only reads texts makes its answer: an embedding, or a head's scores."""

    pooling: Pooling  # `sparse`: after the dense layers, that of the logits of all tokens of the vocabulary
    dense: tuple[Dense, ...] = ()  # poolers, heads and sentence-transformers' dense modules, in order
    is_pooled_last: bool = False  # the mean comes after the dense layers
    is_normalised: bool = False
    labels: tuple[str, ...] = ()  # names of the answer's columns if a head makes them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str  # a key of `models.architectures.ARCHITECTURES`
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    max_model_len: int
    tie_word_embeddings: bool
    embed_size: int = 0  # columns of the embeddings, which a matrix widens to hidden_size; 0: they have as many
    embed_scale: float = 1.0
    layer_input_size: int = 0  # columns of what each layer gets of a token beside the residual stream; 0: nothing
    logit_softcap: float = 0.0  # if > 0, logits become logit_softcap * tanh(logits / logit_softcap)
    logit_scale: float = 1.0
    has_logit_bias: bool = False
    residual_scale: float = 1.0  # factor of what attention and MLP add to the residual stream
    norm: Literal["rms", "layer"] = "rms"
    has_norm_bias: bool = False
    has_norm_weights: bool = True
    has_parallel_halves: bool = False  # attention and MLP read the same input, in architectures that have both forms
    num_types: int = 0
    """Token types with an embedding: with 2, a pair's second text has the second type."""
    first_position: int = 0  # row of the learned position table for a text's first token
    ending: TextEnding | None = None  # None: the model writes text, and its answer to a token is logits

    @property
    def result_width(self) -> int:
        if self.ending is None:
            return self.vocab_size
        if self.ending.pooling == "sparse":
            return self.vocab_size
        return self.ending.dense[-1].width if self.ending.dense else self.hidden_size

    @property
    def num_experts(self) -> int:
        """The experts of a layer that has the most; 1 without experts."""
        return max((layer.mlp.num_experts for layer in self.layers if isinstance(layer.mlp, ExpertsMlp)), default=1)

    @property
    def looked_up(self) -> tuple[str, ...]:
        """Names of embeddings of which a step reads only the rows of its tokens."""
        return ("embed",) * (not self.tie_word_embeddings) + ("layer_embed",) * (self.layer_input_size > 0)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionSpec, ...]:
        return tuple(mixer for layer in self.layers for mixer in layer.mixers if isinstance(mixer, AttentionSpec))

    @property
    def kv_attentions(self) -> tuple[AttentionSpec, ...]:
        """The attentions with keys and values of their own.

        A model without attention has one that nothing computes: blocks hold its states, and a position takes a 16,384th of one.
        """
        if not self.attentions:
            num_heads = max(1, sum(linear.num_state_floats for linear in self.linear_attentions) >> 18)
            return (AttentionSpec(num_heads=num_heads, num_kv_heads=num_heads, head_dim=16, rotation=None),)
        return tuple(attention for attention in self.attentions if attention.kv_layer is None)

    @property
    def linear_attentions(self) -> tuple[LinearAttentionSpec, ...]:
        return tuple(mixer for layer in self.layers for mixer in layer.mixers if isinstance(mixer, LinearAttentionSpec))

    def with_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> ModelSpec:
        """Return a copy with `change(index, layer)` in place of each layer."""
        return replace(self, layers=tuple(change(i, layer) for i, layer in enumerate(self.layers)))

    def with_attention(self, change: Callable[[int, AttentionSpec], AttentionSpec]) -> ModelSpec:
        """Return a copy with `change(layer index, attention)` in place of each attention. Other layers stay."""

        def changed(i: int, layer: LayerSpec) -> LayerSpec:
            return replace(layer, mixer=change(i, layer.mixer)) if isinstance(layer.mixer, AttentionSpec) else layer

        return self.with_layers(changed)

    def with_attention_fields(self, **fields: Any) -> ModelSpec:
        """Return a copy with these fields of `AttentionSpec` in each attention."""
        return self.with_attention(lambda _, attention: replace(attention, **fields))

    def with_windows(self, window: int, is_local: Sequence[bool]) -> ModelSpec:
        """Return a copy whose local layers see the last `window` positions, and the others all."""
        return self.with_attention(lambda i, attention: replace(attention, window=window if is_local[i] else 0))

    def with_plain_mlps(self, activation: Activation) -> ModelSpec:
        """Return a copy whose MLPs have no gate, with the same width and biases."""

        def plain(_: int, layer: LayerSpec) -> LayerSpec:
            assert isinstance(layer.mlp, GatedMlp)
            size, has_bias = layer.mlp.intermediate_size, layer.mlp.has_bias
            return replace(layer, mlp=PlainMlp(intermediate_size=size, activation=activation, has_bias=has_bias))

        return self.with_layers(plain)


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
    """Return the spec of a Llama-like model with identical layers. `rest`: the other fields of `ModelSpec`."""
    attention = AttentionSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotation=Rotation(inv_freq=rope_inv_freq, attention_factor=rope_attention_factor),
        has_qkv_bias=has_qkv_bias,
    )
    layer = LayerSpec(mixer=attention, mlp=GatedMlp(intermediate_size=intermediate_size))
    return ModelSpec(layers=(layer,) * num_layers, **rest)
