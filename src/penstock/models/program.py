"""Programs: the operations of one step of a model, as a flat list on named buffers. Backends run them in order.

Buffers are float32 [num_tokens, width]; after `GatherRows` and its like, [num_samples, width]. Programs with `TextAttention`
compute a request's whole input in one step; others use the KV cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields

from penstock.types.errors import ModelError
from penstock.types.kv_dtype import KvDtype, padded_head_dim, padded_latent
from penstock.types.model_spec import Activation, AttentionSpec, Mask, RelativeSpec, Scoring

HEAD_FC = "fc"
"""A draft head's weight that the program of its model multiplies."""


@dataclass(frozen=True, slots=True)
class Op:
    """An operation of a program. Its fields name buffers and weights. `out` may be an input of the same shape."""

    def reads(self, name: str) -> bool:
        """Return whether the operation reads buffer `name`, or a weight that has this name."""
        return any(getattr(self, field.name) == name for field in fields(self) if field.name != "out")


@dataclass(frozen=True, slots=True)
class Map(Op):
    """An operation that reads buffer `x` and writes buffer `out`."""

    out: str
    x: str


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """out[t] = weight[token_ids[t]] * scale."""

    out: str
    weight: str
    scale: float = 1.0


@dataclass(frozen=True, slots=True)
class EmbedPositions(Map):
    """out[t] = x[t] + weight[first + position of t]."""

    weight: str
    num_positions: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class EmbedTypes(Map):
    """out[t] = x[t] + weight[1 for tokens of a pair's second text, else 0]."""

    weight: str
    num_types: int = 2


@dataclass(frozen=True, slots=True)
class RMSNorm(Map):
    """out = x / sqrt(mean(x^2) + eps) (* weight), per group of `group` columns (0: the whole row)."""

    weight: str | None
    eps: float
    group: int = 0
    is_by_column: bool = False  # the weight covers the whole row, not one group


@dataclass(frozen=True, slots=True)
class LayerNorm(Map):
    """out = (x - mean) / sqrt(var + eps) * weight (+ bias)."""

    weight: str
    bias: str | None
    eps: float


@dataclass(frozen=True, slots=True)
class Linear(Map):
    """out = x @ weight.T (+ bias) (+ residual). weight is [out width, x width]."""

    weight: str
    bias: str | None = None
    residual: str | None = None


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotate each head of x in place: pairs (i, i + n/2) of the first n = 2 * len(inv_freq) columns, by position * inv_freq[i].

    cos and sin are multiplied by `attention_factor`, then x by 1 + growth * ln(1 + position // growth_len). Source: arXiv
    2104.09864.
    """

    x: str
    num_heads: int
    head_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    growth: float = 0.0
    growth_len: int = 1


@dataclass(frozen=True, slots=True)
class KvWrite(Op):
    """Store a layer's keys and values in the cache. [num_tokens, num_kv_heads * head_dim of the layer's `KvShape`]

    Backends may subtract `rope.key_centre` from the keys.
    """

    layer: int
    k: str
    v: str
    bias: str | None = None  # the weight that was added to k before its rotation
    inv_freq: tuple[float, ...] = ()
    attention_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """out = softmax(scale * q k^T + mask) v over the row's cached KV, this step's too. Several operations may read one layer.

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
    window: int = 0  # the last positions to attend to, the query's own included; 0: all
    softcap: float = 0.0  # if > 0, scores become softcap * tanh(scores / softcap)
    sinks: str | None = None
    """Weight with a score for each head. Its exp is added to the softmax's sum. Source: arXiv 2508.10925."""


@dataclass(frozen=True, slots=True)
class HeadLinear(Map):
    """A product for each head: head h of out = head h of x @ weight[h].T, or @ weight[h] if `is_transposed`.

    weight has the matrices of all heads, one below the other.
    """

    weight: str
    num_heads: int
    is_transposed: bool = False


@dataclass(frozen=True, slots=True)
class LatentWrite(Op):
    """Store a layer's latents and rotated keys in the cache. [num_tokens, num_latent], [num_tokens, head_dim - num_latent]"""

    layer: int
    latent: str
    k: str


@dataclass(frozen=True, slots=True)
class LatentAttention(Op):
    """out = softmax(scale * (q_latent latent^T + q k^T) + mask) latent over the row's latents and rotated keys in the cache.

    Buffers have columns for each of `num_heads`, which all read the same. Source: arXiv 2405.04434, in its absorbed form.
    """

    out: str  # [num_tokens, num_heads * num_latent]
    q_latent: str  # likewise
    q: str  # rotated [num_tokens, num_heads * (head_dim - num_latent)]
    layer: int
    num_heads: int
    scale: float


@dataclass(frozen=True, slots=True)
class Relative:
    """Where disentangled attention gets the key and the query of each distance. Source: arXiv 2006.03654.

    They are projected, as those of tokens are, from the layer norm of a table's row. The `str` fields name weights.
    """

    spec: RelativeSpec
    table: str
    norm: str
    norm_bias: str
    k: str
    k_bias: str
    q: str
    q_bias: str
    eps: float


@dataclass(frozen=True, slots=True)
class TextAttention(Op):
    """out = softmax(scale * q k^T + bias by distance + mask) v over the tokens of a row's whole input.

    With `relative`, the score of i and j is scale * (q_i k_j + q_i k_d + q_d k_j), where d is their distance, j - i.
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
    window: int = 0  # token i sees token j only if abs(i - j) < window; 0: all
    distances: str | None = None
    """Weight [num_heads, 2 D + 1], D = `num_distances`: column D + clip(j - i, -D, D) is added to the score of i and j."""
    num_distances: int = 0
    relative: Relative | None = None
    sinks: str | None = None  # as in `Attention`


@dataclass(frozen=True, slots=True)
class ShortConv(Map):
    """A gated causal convolution, column by column. x is [num_tokens, 3 * width of out]: b, c, u side by side.

    v = b * u, rounded to bf16. out[t] = c[t] * (the sum over i of weight[:, i] * v[t - kernel + 1 + i] (+ bias)). KV blocks
    store v of the last `kernel` - 1 positions.
    """

    layer: int  # index among the operations with a state
    weight: str
    kernel: int  # positions that a token reads, at least 2
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class CausalConv(Map):
    """out[t] = silu(the sum over i of weight[:, i] * x[t - kernel + 1 + i] (+ bias)), column by column.

    Its state is x of the last `kernel` - 1 positions, in float32; 0 before the first.
    """

    index: int  # among the operations with a state in blocks of its own
    weight: str
    kernel: int  # positions that a token reads, at least 2
    bias: str | None = None


@dataclass(frozen=True, slots=True)
class LinearAttention(Map):
    """Attention without a softmax: each value head has a matrix S [key_dim, value_dim], which all tokens change in turn.

    x has queries and keys, `num_key_heads` of `key_dim` columns each, and values, `num_heads` of `value_dim`, side by side from
    columns `q_at`, `k_at`, `v_at`. Value head h reads key head h // (num_heads // num_key_heads). For each token:

        d = softplus(steps[h] + step_bias[h]), clipped to [min_step, max_step];  S = exp(d * decay[h]) * S
        u = d * v, or with `gates` the delta rule: sigmoid(gates[h]) * (v - k S)
        S = S + k^T u;  out = scale * q S (+ skip[h] * v)

    With `is_normalised`, q and k are first divided by sqrt(sum of squares + 1e-6), and k is multiplied by `key_length`. S is
    float32, and 0 before the first token.
    Sources: arXiv 2412.06464 (gated delta rule), 2405.21060 (Mamba-2).
    """

    index: int  # among the operations with a state in blocks of its own
    steps: str  # buffer [num_tokens, num_heads]
    step_bias: str
    decay: str  # weight [num_heads], at most 0
    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    q_at: int
    k_at: int
    v_at: int
    scale: float = 1.0
    gates: str | None = None  # buffer [num_tokens, num_heads]
    skip: str | None = None
    is_normalised: bool = False
    key_length: float = 1.0
    is_tiled: bool = False  # value head h reads key head h % num_key_heads
    min_step: float = 0.0
    max_step: float = math.inf


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """out = activation(gate) * up.

    - `silu`: x * sigmoid(x); `gelu_quick`: x * sigmoid(1.702 x); `relu2`: relu(x)^2; `sigmoid`
    - `elu`: x, or exp(x) - 1 below 0
    - `gelu`: x * Phi(x); `gelu_tanh`: its tanh form, arXiv 1606.08415
    - `swiglu_clamped`: (u + 1) * g * sigmoid(1.702 g) with g = min(gate, 7) and u = up clipped to [-7, 7]
    """

    out: str
    gate: str
    up: str
    activation: Activation


@dataclass(frozen=True, slots=True)
class Experts(Map):
    """out = the sum of p_e * down_e(activation(gate_e(x)) * up_e(x)) over the experts e chosen for a token (+ sum_bias).

    Without gates, each is down_e(activation(up_e(x))). A score is the softmax or sigmoid of r @ router.T (+ router_bias); r is
    x, or the buffer `router_x`. The largest (+ selection_bias) are chosen; ties go to the first. p is the score, divided by the
    chosen ones' sum if `is_renormalised`, times `share_factor` (* share_scale of e). Experts' matrices are stacked.

    With groups of consecutive experts, only those of `num_chosen_groups` may be chosen: the groups with the largest sums of
    their `num_group_scores` largest scores (+ selection_bias).
    """

    router: str
    gate: str | None
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
    router_x: str | None = None
    share_scale: str | None = None
    num_groups: int = 0
    num_chosen_groups: int = 0
    num_group_scores: int = 1
    sum_bias: str | None = None


@dataclass(frozen=True, slots=True)
class Act(Map):
    """out = activation(x)."""

    activation: Activation


@dataclass(frozen=True, slots=True)
class Add(Op):
    """out = a + factor * b."""

    out: str
    a: str
    b: str
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Scale(Map):
    """out = factor * x (* weight, which is one number)."""

    factor: float = 1.0
    weight: str | None = None


@dataclass(frozen=True, slots=True)
class Columns(Map):
    """out = the columns of x from `first` on, as many as out has."""

    first: int


@dataclass(frozen=True, slots=True)
class Place(Map):
    """The columns of out from `first` on = x, and any after them = 0. Columns before `first` stay."""

    first: int


@dataclass(frozen=True, slots=True)
class GatherRows(Map):
    """out = the last token's x for each row that samples."""


@dataclass(frozen=True, slots=True)
class FirstRows(Map):
    """out = the first token's x for each row that samples. The row's whole input must be in one step."""


@dataclass(frozen=True, slots=True)
class MeanRows(Map):
    """out = the mean of x over the tokens of each row that samples. The row's whole input must be in one step."""


@dataclass(frozen=True, slots=True)
class SparseRows(Map):
    """out = ln(1 + max(0, the largest of x over the tokens of each row that samples)), column by column.

    The row's whole input must be in one step. Source: arXiv 2109.10086 (SPLADE).
    """


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """x = cap * tanh(x / cap), in place."""

    x: str
    cap: float


@dataclass(frozen=True, slots=True)
class Logits(Map):
    """The last operation: out = scale * (x @ weight.T + bias). Only a `Softcap` may follow.

    Logit i is of token i, or with `tokens`, of the token that this weight has in column i.
    """

    weight: str
    scale: float = 1.0
    bias: str | None = None
    tokens: str | None = None


@dataclass(frozen=True, slots=True)
class States(Op):
    """The last operation: the result is x, each row divided by its norm if `is_normalised`."""

    x: str
    is_normalised: bool = False


def features(op: Op) -> Iterator[str]:
    """Yield what a backend must support: the operation's name, its activation, and fields that differ from their defaults.

    A backend refuses features that it does not list, so a new field is never ignored.
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
class KvShape:
    """The shape of a layer's keys, and of its values: [num_kv_heads, head_dim] per position.

    With `num_latent`, the layer has no values of its own: they are the keys' first `num_latent` columns.
    """

    num_kv_heads: int
    head_dim: int
    num_latent: int = 0

    @classmethod
    def of(cls, attention: AttentionSpec) -> KvShape:
        return cls(attention.num_kv_heads, attention.head_dim, attention.latent_rank)

    def padded(self) -> KvShape:
        """Return the shape as the native backend stores it."""
        if not self.num_latent:
            return KvShape(self.num_kv_heads, padded_head_dim(self.head_dim))
        latent = padded_latent(self.num_latent)
        return KvShape(self.num_kv_heads, latent + padded_head_dim(self.head_dim - self.num_latent), latent)

    def num_bytes(self, dtype: KvDtype) -> int:
        """Return the bytes of one position in the native backend."""
        return self.num_kv_heads * dtype.head_bytes(self.padded().head_dim, has_values=not self.num_latent)


@dataclass(frozen=True, slots=True)
class StateShape:
    """The recurrent state that a KV block stores after its last computed position: bf16 [num_layers, num_columns, width].

    The state at position p is in column p % block_size % num_columns.
    """

    num_layers: int
    num_columns: int
    width: int


@dataclass(frozen=True, slots=True)
class PagedState:
    """A recurrent state in blocks of its own: for each operation that has one, in order, matrices [num_matrices, rows, columns]
    of float32. A convolution has one, [kernel - 1, width]; attention one for each value head, [key_dim, value_dim].
    """

    matrices: tuple[tuple[int, int, int], ...]

    @property
    def num_floats(self) -> int:
        return sum(count * rows * columns for count, rows, columns in self.matrices)


@dataclass(frozen=True, slots=True)
class Program:
    """The operations of one step of a model. Raises ModelError if attention reads keys and values of another shape."""

    ops: tuple[Op, ...]
    buffers: tuple[tuple[str, int], ...]  # (name, width), in order of first use
    kv_shapes: tuple[KvShape, ...]  # of each layer with keys and values
    vocab_size: int
    given: str = ""
    """Buffer that `StepPlan.features` fills before the first operation; empty: none."""
    kept: str = ""
    """Buffer that becomes `StepResult.features`; empty: none."""

    def __post_init__(self) -> None:
        has_cache = any(isinstance(op, _WITH_CACHE) for op in self.ops)
        assert not (self.is_one_pass and has_cache), "some layers read the KV cache, others only the tokens of the step"
        for op in self.ops:
            if isinstance(op, Attention) and self.kv_shapes[op.layer] != KvShape(op.num_kv_heads, op.head_dim):
                raise ModelError(
                    f"layer {op.layer} stores {self.kv_shapes[op.layer]}, and its attention reads {op.num_kv_heads} heads of "
                    f"{op.head_dim} columns.",
                    remedy="Correct the architecture's description.",
                )

    @property
    def is_one_pass(self) -> bool:
        """Whether the model only reads text: a request's whole input is computed in one step, and no KV is kept."""
        return any(isinstance(op, TextAttention) for op in self.ops)

    @property
    def state(self) -> StateShape | None:
        convs = [op for op in self.ops if isinstance(op, ShortConv)]
        if not convs:
            return None
        ((kernel, width),) = {(op.kernel, self.width(op.out)) for op in convs}
        return StateShape(len(convs), kernel - 1, width)

    @property
    def paged_state(self) -> PagedState | None:
        found = {op.index: self._state_of(op) for op in self.ops if isinstance(op, CausalConv | LinearAttention)}
        return PagedState(tuple(found[index] for index in range(len(found)))) if found else None

    def _state_of(self, op: CausalConv | LinearAttention) -> tuple[int, int, int]:
        if isinstance(op, CausalConv):
            return 1, op.kernel - 1, self.width(op.out)
        return op.num_heads, op.key_dim, op.value_dim

    @property
    def ending(self) -> Logits | States:
        """The operation that makes the step's result."""
        (ending,) = [op for op in self.ops if isinstance(op, Logits | States)]
        return ending

    @property
    def window(self) -> int:
        """How many positions a token can see in any layer, itself included; 0: all. At least 2 and a convolution's kernel."""
        if self.paged_state is not None:
            return 0
        windows = [
            op.window if isinstance(op, Attention) else 0 for op in self.ops if isinstance(op, Attention | LatentAttention)
        ]
        kernels = [op.kernel for op in self.ops if isinstance(op, ShortConv)]
        return max(2, *windows, *kernels) if windows and all(windows) else 0

    @property
    def keeps_samples(self) -> bool:
        """Whether `kept` has a row for each row that samples. Otherwise, it has one for each token."""
        return any(isinstance(op, GatherRows) and op.out == self.kept for op in self.ops)

    def width(self, name: str) -> int:
        return dict(self.buffers)[name]


_WITH_CACHE = KvWrite | Attention | LatentWrite | LatentAttention | ShortConv | CausalConv | LinearAttention
