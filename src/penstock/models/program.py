"""The language in which architectures are described: a flat list of operations on named buffers.

A model's description emits a `Program`; backends run it. Nothing here computes. All buffers hold
float32 [num_tokens, width] unless said otherwise, num_tokens being those of the step; what `GatherRows`, `FirstRows` or
`MeanRows` writes has one row for each row of the step that samples, and so has what is computed from it. Operations run in
order; those before the first of these three are on tokens, and those after it on samples. The last one is the program's
ending: what the step is computed for.

There are two kinds of programs. Those with `KvWrite` and `Attention` compute a row in any number of steps, and know what came
before from the KV cache. Those with `TextAttention` compute a whole text in one step, and leave nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from penstock.types.errors import ModelError
from penstock.types.model_spec import Activation, Mask, Scoring


@dataclass(frozen=True, slots=True)
class Embed:
    """out[t] = weight[token_ids[t]] * scale."""

    out: str
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class EmbedPositions:
    """out[t] = x[t] + weight[first + position of t]. `out` may be `x`.

    weight is [first + num_positions, width of x] at the least.
    """

    out: str
    x: str
    weight: str
    num_positions: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class EmbedTypes:
    """out[t] = x[t] + weight[1 if t is a token of a pair's second text, else 0]. `out` may be `x`.

    weight is [number of types, width of x]. With one type all tokens have it.
    """

    out: str
    x: str
    weight: str
    num_types: int = 2


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
    """out = (x - mean) / sqrt(var + eps) * weight (+ bias)."""

    out: str
    x: str
    weight: str
    bias: str | None
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

    angle = position * inv_freq[i]; cos and sin are multiplied by `attention_factor`, and the columns that do not turn are not.
    Then the whole of x is multiplied by 1 + growth * ln(1 + position // growth_len).
    Source: RoFormer, arXiv 2104.09864, in the half-split layout of Hugging Face checkpoints.
    """

    x: str
    num_heads: int
    head_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    growth: float = 0.0
    growth_len: int = 1


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
    sinks: str | None = None
    """Weight with a score of each head, [num_heads]: exp(score) is one more term of the softmax's sum, and has no value.
    Source: gpt-oss, arXiv 2508.10925."""


@dataclass(frozen=True, slots=True)
class TextAttention:
    """out = softmax(scale * q k^T + bias by distance + mask) v, where k and v are those of the row's own tokens.

    q and out are [num_tokens, num_heads * head_dim], k and v [num_tokens, num_kv_heads * head_dim]; query head h reads KV head
    h // (num_heads // num_kv_heads). The row's text must be computed in one step, from its first token on.
    """

    out: str
    q: str
    k: str
    v: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    mask: Mask = "all"
    window: int = 0
    """Token i sees token j only if abs(i - j) < window; 0 is all. The mask `causal` hides what comes behind i, too."""
    distances: str | None = None
    """Weight of what is added to the score of query i and key j in head h: column D + min(max(j - i, -D), D) of row h, where D
    is `num_distances`. [num_heads, 2 D + 1]"""
    num_distances: int = 0


@dataclass(frozen=True, slots=True)
class ShortConv:
    """A gated causal convolution along a row, each column by itself. x is [num_tokens, 3 * width of out]: b, c, u side by side.

    v = b * u, rounded to bf16, and 0 before the row's first position. out[t] = c[t] * s[t], where s[t] is the sum over i of
    weight[:, i] * v[t - kernel + 1 + i] (+ bias). weight is [width of out, kernel].

    v of the last `kernel` - 1 positions is the layer's recurrent state, which KV blocks hold (`Program.state`).
    Source: transformers' modeling_lfm2.py, which in bf16 rounds v as well.
    """

    out: str
    x: str
    layer: int
    """Its index among the program's operations with a state."""
    weight: str
    kernel: int
    """Number of positions that a token reads, its own included; at least 2."""
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class GatedActivation:
    """out = activation(gate) * up.

    `silu` is x * sigmoid(x). `gelu` is x * Phi(x), Phi being the normal distribution's function; `gelu_tanh` is its tanh form,
    arXiv 1606.08415, and `gelu_quick` is x * sigmoid(1.702 x). `relu` is max(x, 0), and `relu2` is the square of that.
    `tanh` is the hyperbolic tangent. `swiglu_clamped` is (u + 1) * g * sigmoid(1.702 g) with g = min(gate, 7) and u = up cut
    to [-7, 7].
    """

    out: str
    gate: str
    up: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Experts:
    """out = the sum over the experts e that are chosen for a token of p_e * down_e(activation(gate_e(x)) * up_e(x)).

    Each expert's score is `scoring` of x @ router.T (+ router_bias): softmax over all experts, or sigmoid. The
    `num_experts_per_token` with the largest score (+ selection_bias) are chosen, of equal ones the first. p is the score of a
    chosen one without the selection bias: divided by the sum over the chosen ones if `is_renormalised`, times `share_factor`.
    The matrices of all experts lie in one, one below the other: gate and up are
    [num_experts * intermediate_size, width of x], down is [num_experts * width of out, intermediate_size]. Biases, which all
    three have or none, are [num_experts, outputs]; the router's are [num_experts].
    Sources: Mixtral of Experts, arXiv 2401.04088; OLMoE, arXiv 2409.02060; DeepSeek-V3, arXiv 2412.19437.
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
    scoring: Scoring = "softmax"
    is_renormalised: bool = True
    share_factor: float = 1.0
    router_bias: str | None = None
    selection_bias: str | None = None
    gate_bias: str | None = None
    up_bias: str | None = None
    down_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Act:
    """out = activation(x), without a gate. `GatedActivation` has the formulas."""

    out: str
    x: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Add:
    """out = a + factor * b."""

    out: str
    a: str
    b: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class GatherRows:
    """out = the last token's row of x for each row of the step that samples. [num_samples, width]"""

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class FirstRows:
    """out = the first token's row of x for each row of the step that samples. [num_samples, width]

    The row's text must be computed in one step, from its first token on.
    """

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class MeanRows:
    """out = the mean of x over a row's tokens, for each row of the step that samples. [num_samples, width]

    The row's text must be computed in one step, from its first token on.
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
    """An ending: scale * x @ weight.T, float32 [num_samples, vocab_size]. The last operation but for `Softcap` of it."""

    out: str
    x: str
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class States:
    """An ending: x itself, float32 [num_samples, width]: hidden states of texts, or the scores of a classification head.

    If x has a row for each token, so has the result. With `is_normalised` each row is divided by its Euclidean length.
    """

    x: str
    is_normalised: bool = False


Op = (
    Embed
    | EmbedPositions
    | EmbedTypes
    | RMSNorm
    | LayerNorm
    | Linear
    | Rope
    | KvWrite
    | Attention
    | TextAttention
    | ShortConv
    | GatedActivation
    | Experts
    | Act
    | Add
    | GatherRows
    | FirstRows
    | MeanRows
    | Softcap
    | Logits
    | States
)


def features(op: Op) -> Iterator[str]:
    """Names of what a backend must know to compute an operation: its own, each field that is not as by default, its activation.

    No backend knows the name of a new field yet: each refuses the operation, and does not compute it without the field.
    """
    name = type(op).__name__
    yield name
    for field in fields(op):
        value = getattr(op, field.name)
        if field.name == "activation":
            yield f"{name} with {value}"
        elif value is None and field.default is MISSING:
            yield f"{name} without {field.name}"
        elif field.default is not MISSING and value != field.default:
            yield f"{name}.{field.name}"


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent state that a KV block holds, behind its last computed position: [num_layers, num_columns, width], bf16.

    The column of position p is at p modulo the block's size modulo `num_columns`.
    """

    num_layers: int
    num_columns: int
    """Last computed positions of which there is a column."""
    width: int


@dataclass(frozen=True, slots=True)
class Program:
    """The computation of one step of a model. Raises ModelError if layers differ in the shape of their keys and values."""

    ops: tuple[Op, ...]
    buffers: tuple[tuple[str, int], ...]
    """(name, width) of every buffer, in order of first use."""
    num_layers: int
    """Layers with keys and values, whose indices `KvWrite` and `Attention` have."""
    num_kv_heads: int
    """The number in every layer: the KV cache of each backend has one shape for all."""
    head_dim: int
    vocab_size: int

    def __post_init__(self) -> None:
        if self.is_one_pass and any(isinstance(op, KvWrite | Attention | ShortConv) for op in self.ops):
            raise ModelError(
                "some layers read the KV cache and others the tokens of the step alone.",
                remedy="Mend the architecture's description.",
            )
        for op in self.ops:
            if isinstance(op, Attention) and (op.num_kv_heads, op.head_dim) != (self.num_kv_heads, self.head_dim):
                raise ModelError(
                    f"layer {op.layer} has {op.num_kv_heads} key-value heads of {op.head_dim} columns, "
                    f"and another layer {self.num_kv_heads} of {self.head_dim}: no backend has a KV cache for that yet.",
                    remedy="Use another model.",
                )

    @property
    def is_one_pass(self) -> bool:
        """Each text is computed in one step, and nothing of it is kept."""
        return any(isinstance(op, TextAttention) for op in self.ops)

    @property
    def state(self) -> StateShape | None:
        """None for programs without recurrent state, which most are."""
        convs = [op for op in self.ops if isinstance(op, ShortConv)]
        if not convs:
            return None
        ((kernel, width),) = {(op.kernel, self.width(op.out)) for op in convs}
        return StateShape(len(convs), kernel - 1, width)

    @property
    def ending(self) -> Logits | States:
        """The operation that the step is computed for. Raises ModelError for a program that has none, or two."""
        endings = [op for op in self.ops if isinstance(op, Logits | States)]
        if len(endings) != 1:
            raise ModelError(f"the program has {len(endings)} endings, not one.", remedy="Mend the architecture's description.")
        return endings[0]

    @property
    def window(self) -> int:
        """The last positions that a token sees in any layer, its own included; 0: there is a layer in which it sees all.

        It is 2 at least, and no less than the positions from whose blocks a short convolution takes its inputs.
        """
        windows = [op.window for op in self.ops if isinstance(op, Attention)]
        kernels = [op.kernel for op in self.ops if isinstance(op, ShortConv)]
        return max(2, *windows, *kernels) if windows and all(windows) else 0

    def width(self, name: str) -> int:
        """Columns of a buffer. Raises KeyError."""
        return dict(self.buffers)[name]
