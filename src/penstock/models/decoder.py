"""Building blocks of transformers. A method emits operations and returns the name of the buffer with their result."""

from __future__ import annotations

import math
from collections import Counter
from typing import Literal

from penstock.models import program as prog
from penstock.models.program import Program
from penstock.models.relative import relative
from penstock.types.model_spec import (
    Activation,
    AttentionSpec,
    ExpertsMlp,
    GatedMlp,
    LatentSpec,
    LayerSpec,
    LinearAttentionSpec,
    ModelSpec,
    PlainMlp,
    ShortConvSpec,
    TextEnding,
)

QkNorms = Literal["rows", "heads", "rotated"] | None
"""q and k are normed over whole rows or per head before their rotation, per head after it, or not at all."""
SAMPLED = "sampled_"  # prefix of buffers with a row per sample
LATENT_EPS = 1e-6
"""Epsilon of the norms of KV latents and query latents, whatever the model's `norm_eps`."""


ONES = "ones"
"""Name of a weight of ones, for layer norms without weights of their own."""


class Decoder:
    """Builds the program of one model. `x` and `to` are names of buffers. Weights are named as in `LoadedModel.weights`."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._ops: list[prog.Op] = []
        self._widths: dict[str, int] = {}
        self._prefix = ""
        self._indices: dict[tuple[int, type], int] = {}
        """(layer, kind of mixer) -> index of its KV or recurrent state among those of that kind."""
        self._last_keeper = max(layer for layer, found in enumerate(spec.layers) if not _only_reads(found))
        counts: Counter[type] = Counter()
        for layer, found in enumerate(spec.layers):
            for mixer in found.mixers:
                kind, owner = type(mixer), mixer.kv_layer if isinstance(mixer, AttentionSpec) else None
                self._indices[layer, kind] = counts[kind] if owner is None else self._indices[owner, kind]
                counts[kind] += owner is None

    def _buffer(self, name: str, width: int) -> str:
        """Return the name of a buffer, with the prefix. If a buffer of another width has that name, append the width."""
        name = self._prefix + name.removeprefix(self._prefix)
        if self._widths.setdefault(name, width) != width:
            name = f"{name}_{width}"
            self._widths[name] = width
        return name

    def embed(self) -> str:
        """Embed the tokens and return the residual stream. [num_tokens, embed_size or hidden_size]"""
        x = self._buffer("x", self._spec.embed_size or self._spec.hidden_size)
        self._ops.append(prog.Embed(x, "embed", self._spec.embed_scale))
        return x

    def look_up(self, weight: str, out: str, width: int, scale: float) -> str:
        """Return other embeddings of the tokens, times `scale`. [num_tokens, width]"""
        found = self._buffer(out, width)
        self._ops.append(prog.Embed(found, weight, scale))
        return found

    def given(self, name: str) -> str:
        """Return a buffer that is filled before the first operation. [num_tokens, hidden_size]"""
        return self._buffer(name, self._spec.hidden_size)

    def beside(self, x: str, y: str, out: str) -> str:
        """Return the columns of x and then those of y."""
        joint = self._buffer(out, self._widths[x] + self._widths[y])
        self._ops += [prog.Place(joint, x, 0), prog.Place(joint, y, self._widths[x])]
        return joint

    def add_positions(self, x: str) -> str:
        """x += the learned embedding of each token's position."""
        self._ops.append(prog.EmbedPositions(x, x, "positions", self._spec.max_model_len, self._spec.first_position))
        return x

    def add_types(self, x: str) -> str:
        """x += the embedding of each token's type (first or second text of a pair), if the model has types."""
        if self._spec.num_types:
            self._ops.append(prog.EmbedTypes(x, x, "types", self._spec.num_types))
        return x

    def norm(self, x: str, weight: str, out: str = "normed") -> str:
        """Normalise whole rows of x with the spec's kind of norm. `out` may be x."""
        if self._spec.norm == "rms":
            return self._rms_norm(x, weight, out)
        normed = self._buffer(out, self._widths[x])
        bias = f"{weight}_bias" if self._spec.has_norm_bias else None
        weight = weight if self._spec.has_norm_weights else ONES
        self._ops.append(prog.LayerNorm(normed, x, weight, bias, self._spec.norm_eps))
        return normed

    def norm_groups(self, x: str, weight: str, group: int, *, eps: float) -> str:
        """Normalise every `group` columns of x in place, with its own `eps`."""
        self._ops.append(prog.RMSNorm(x, x, weight, eps, group))
        return x

    def _rms_norm(self, x: str, weight: str | None, out: str, *, group: int = 0, is_by_column: bool = False) -> str:
        normed = self._buffer(out, self._widths[x])
        weight = weight if self._spec.has_norm_weights else None
        self._ops.append(prog.RMSNorm(normed, x, weight, self._spec.norm_eps, group, is_by_column))
        return normed

    def scale(self, x: str, factor: float = 1.0, weight: str | None = None) -> str:
        """x *= factor (* weight)"""
        if factor != 1.0 or weight is not None:
            self._ops.append(prog.Scale(x, x, factor, weight))
        return x

    def columns(self, x: str, first: int, out: str, width: int) -> str:
        """Return `width` columns of x from `first` on."""
        part = self._buffer(out, width)
        self._ops.append(prog.Columns(part, x, first))
        return part

    def linear(self, x: str, weight: str, out: str, width: int, *, bias: str | None = None) -> str:
        result = self._buffer(out, width)
        self._ops.append(prog.Linear(result, x, weight, bias))
        return result

    def add_linear(self, to: str, x: str, weight: str, *, bias: str | None = None, factor: float = 1.0) -> str:
        """to += residual_scale * factor * (x @ weight.T + bias)"""
        if (factor := self._spec.residual_scale * factor) != 1.0:
            return self.add(to, self.linear(x, weight, "branch", self._widths[to], bias=bias), factor)
        self._ops.append(prog.Linear(to, x, weight, bias, residual=to))
        return to

    def add(self, to: str, x: str, factor: float | None = None) -> str:
        """to += factor * x; the factor is the spec's `residual_scale` unless given."""
        self._ops.append(prog.Add(to, to, x, self._spec.residual_scale if factor is None else factor))
        return to

    def attention(self, layer: int, x: str, *, qk_norms: QkNorms = None, has_v_norm: bool = False) -> str:
        """Return a layer's attention before its output projection. [num_tokens, num_heads * head_dim]

        `has_v_norm`: values are normed per head, without a weight.
        """
        spec, at, index = self._spec.layers[layer].attention, f"layers.{layer}", self._indices[layer, AttentionSpec]

        def projected(name: str, num_heads: int) -> str:
            bias = f"{at}.{name}_bias" if spec.has_qkv_bias else None
            return self.linear(x, f"{at}.{name}", name, num_heads * spec.head_dim, bias=bias)

        q, k, v = projected("q", spec.num_heads), "", ""
        turning = [("q", q, spec.num_heads)]
        if spec.kv_layer is None:
            k = projected("k", spec.num_kv_heads)
            v = k if spec.has_keys_as_values else projected("v", spec.num_kv_heads)
            turning.append(("k", k, spec.num_kv_heads))
        if has_v_norm and v:
            v = self._rms_norm(v, None, "v", group=spec.head_dim)
        assert k != v or not k, "v must not alias k, which is changed below"

        def norm_heads(group: int) -> None:
            for name, heads, _ in turning:
                self._rms_norm(heads, f"{at}.{name}_norm", heads, group=group)

        if qk_norms in ("rows", "heads"):
            norm_heads(spec.head_dim if qk_norms == "heads" else 0)
        angles: tuple[tuple[float, ...], float] = ((), 1.0)
        if (turn := spec.rotation) is not None:
            angles = turn.inv_freq, turn.attention_factor
            for name, heads, num_heads in turning:
                growth = (turn.query_growth, turn.growth_len) if name == "q" else (0.0, 1)
                self._ops.append(prog.Rope(heads, num_heads, spec.head_dim, *angles, *growth))
        if qk_norms == "rotated":
            norm_heads(spec.head_dim)
        out = self._buffer("attn", spec.num_heads * spec.head_dim)
        scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        sizes = (spec.num_heads, spec.num_kv_heads, spec.head_dim, scale)
        sinks = f"{at}.sinks" if spec.has_sinks else None
        if self._spec.ending is not None:
            distances = "distances" if spec.num_distances else None
            by_distance = distances, spec.num_distances, relative(self._spec, layer)
            self._ops.append(prog.TextAttention(out, q, k, v, *sizes, spec.mask, spec.window, *by_distance, sinks))
            return out
        # `key_centre` requires that the bias reaches the keys unscaled, and that only differences of scores matter.
        has_centre = spec.has_qkv_bias and not (qk_norms or spec.softcap or spec.has_sinks)
        if spec.kv_layer is None:
            self._ops.append(prog.KvWrite(index, k, v, *((f"{at}.k_bias", *angles) if has_centre else ())))
        self._ops.append(prog.Attention(out, q, index, *sizes, window=spec.window, softcap=spec.softcap, sinks=sinks))
        if spec.has_gate:
            bias = f"{at}.q_gate_bias" if spec.has_qkv_bias else None
            gate = self.linear(x, f"{at}.q_gate", "q_gate", self._widths[out], bias=bias)
            self._ops.append(prog.GatedActivation(out, gate, out, "sigmoid"))
        return out

    def latent_attention(self, layer: int, x: str) -> str:
        """Return each head's sum of latents, which `add_output` projects to values. [num_tokens, num_heads * rank]

        The key up-projection is absorbed: it multiplies the queries instead.
        """
        spec, at, index = self._spec.layers[layer].attention, f"layers.{layer}", self._indices[layer, AttentionSpec]
        latent, rank, num_heads = spec.latent, spec.latent_rank, spec.num_heads
        assert latent is not None
        assert spec.rotation is not None
        source = self.linear(x, f"{at}.q_a", "q_a", latent.query_rank) if latent.query_rank else x
        stored = self.linear(x, f"{at}.latent", "latent", rank)
        k = self.linear(x, f"{at}.k_rope", "k_rope", latent.rotary_dim)
        if latent.query_rank:
            self.norm_groups(source, f"{at}.q_a_norm", latent.query_rank, eps=LATENT_EPS)
        q = self.linear(source, f"{at}.q", "q", num_heads * latent.key_dim)
        rotated = self.linear(source, f"{at}.q_rope", "q_rope", num_heads * latent.rotary_dim)
        self.norm_groups(stored, f"{at}.latent_norm", rank, eps=LATENT_EPS)
        for heads, count in ((rotated, num_heads), (k, 1)):
            self._ops.append(prog.Rope(heads, count, latent.rotary_dim, spec.rotation.inv_freq, spec.rotation.attention_factor))
        self._ops.append(prog.LatentWrite(index, stored, k))
        q_latent = self._buffer("q_latent", num_heads * rank)
        is_transposed = not latent.has_transposed_keys
        self._ops.append(prog.HeadLinear(q_latent, q, f"{at}.key_heads", num_heads, is_transposed=is_transposed))
        out = self._buffer("latents", num_heads * rank)
        scale = (latent.key_dim + latent.rotary_dim) ** -0.5 if spec.scale is None else spec.scale
        self._ops.append(prog.LatentAttention(out, q_latent, rotated, index, num_heads, scale))
        return out

    def linear_attention(self, layer: int, x: str) -> str:
        """Return a layer's linear attention before its output projection. [num_tokens, num_heads * value_dim]"""
        found, at, index = self._spec.layers[layer], f"layers.{layer}.mix_", 2 * self._indices[layer, LinearAttentionSpec]
        spec, factors = found.mixer if found.beside is None else found.beside, found.factors
        assert isinstance(spec, LinearAttentionSpec)

        def projected(name: str, width: int) -> str:
            return self.linear(x, f"{at}{name}", f"mix_{name}", width, bias=f"{at}{name}_bias" if spec.has_bias else None)

        joint, gate = projected("in", spec.conv_width), projected("gate", spec.value_width)
        steps = projected("steps", spec.num_heads)
        rates = projected("rates", spec.num_heads) if spec.has_delta_rule else None
        if factors is not None:
            self.scale(gate, factors.gate)
            self.scale(steps, factors.steps)
        mixed = self._buffer("mix_conv", spec.conv_width)
        bias = f"{at}conv_bias" if spec.has_conv_bias else None
        self._ops.append(prog.CausalConv(mixed, joint, index, f"{at}conv", spec.kernel, bias))
        # Column order: queries, keys, values in a delta net; values, keys, queries in Mamba-2.
        q_at, v_at = (0, 2 * spec.key_width) if spec.has_delta_rule else (spec.value_width + spec.key_width, 0)
        out = self._buffer("mix_out", spec.value_width)
        # Doubling rates is the same as scaling keys and queries by sqrt(2), with a state 1/sqrt(2) as large.
        length = math.sqrt(2.0) if spec.has_rates_to_two else 1.0
        self._ops.append(
            prog.LinearAttention(
                out=out,
                x=mixed,
                index=index + 1,
                steps=steps,
                step_bias=f"{at}step_bias",
                decay=f"{at}decay",
                num_heads=spec.num_heads,
                num_key_heads=spec.num_key_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                q_at=q_at,
                k_at=spec.key_width if spec.has_delta_rule else spec.value_width,
                v_at=v_at,
                scale=length * spec.key_dim**-0.5 if spec.has_delta_rule else 1.0,
                gates=rates,
                skip=None if spec.has_delta_rule else f"{at}skip",
                is_normalised=spec.has_delta_rule,
                key_length=length,
                is_tiled=spec.has_tiled_heads,
                min_step=spec.min_step,
                max_step=spec.max_step,
            )
        )
        if spec.has_delta_rule:
            eps = self._spec.norm_eps if spec.norm_eps is None else spec.norm_eps
            self.norm_groups(out, f"{at}scale", spec.value_dim, eps=eps)
        elif spec.has_norm_before_gate:
            self._norm_mixed(f"{at}scale", out, spec)
        self._ops.append(prog.GatedActivation(out, gate, out, "silu"))
        return out if spec.has_delta_rule or spec.has_norm_before_gate else self._norm_mixed(f"{at}scale", out, spec)

    def _norm_mixed(self, weight: str, x: str, spec: LinearAttentionSpec) -> str:
        if not spec.has_norm:
            return x
        if spec.num_key_heads == 1:
            return self._rms_norm(x, weight, x)
        return self._rms_norm(x, weight, x, group=spec.value_width // spec.num_key_heads, is_by_column=True)

    def short_conv(self, layer: int, x: str) -> str:
        """Return a layer's short convolution before its output projection. [num_tokens, hidden_size]"""
        spec, at, width = self._spec.layers[layer].mixer, f"layers.{layer}", self._spec.hidden_size
        assert isinstance(spec, ShortConvSpec)
        in_bias, bias = (f"{at}.conv_in_bias", f"{at}.conv_bias") if spec.has_bias else (None, None)
        inputs = self.linear(x, f"{at}.conv_in", "conv_in", 3 * width, bias=in_bias)
        out = self._buffer("mixed", width)
        self._ops.append(prog.ShortConv(out, inputs, self._indices[layer, ShortConvSpec], f"{at}.conv", spec.kernel, bias))
        return out

    def mix(self, layer: int, x: str, *, qk_norms: QkNorms = None) -> str:
        """Return the output of the layer's mixer, before the output projection."""
        match self._spec.layers[layer].mixer:
            case ShortConvSpec():
                return self.short_conv(layer, x)
            case LinearAttentionSpec():
                return self.linear_attention(layer, x)
            case AttentionSpec(latent=LatentSpec()):
                return self.latent_attention(layer, x)
            case AttentionSpec():
                return self.attention(layer, x, qk_norms=qk_norms)
            case None:
                raise AssertionError(f"layer {layer} has no mixer")

    def add_output(self, layer: int, to: str, mixed: str) -> str:
        """to += the output projection of `mixed`, which `mix` returned."""
        mixer = self._spec.layers[layer].mixer
        if isinstance(mixer, LinearAttentionSpec):
            bias = f"layers.{layer}.mix_out_bias" if mixer.has_bias else None
            return self.add_linear(to, mixed, f"layers.{layer}.mix_out", bias=bias)
        if isinstance(mixer, AttentionSpec) and mixer.latent is not None:
            values = self._buffer("attn", mixer.num_heads * mixer.latent.value_dim)
            self._ops.append(prog.HeadLinear(values, mixed, f"layers.{layer}.value_heads", mixer.num_heads))
            mixed = values
        has_bias = mixer.has_bias if isinstance(mixer, ShortConvSpec) else self._spec.layers[layer].attention.has_o_bias
        return self.add_linear(to, mixed, f"layers.{layer}.o", bias=f"layers.{layer}.o_bias" if has_bias else None)

    def gather_after_last(self, layer: int, *buffers: str) -> tuple[str, ...]:
        """Return the buffers; in the last layer that writes KV or state, copies of only the rows that the answer needs.

        Call this before the output projection of each layer: other prompt tokens then skip the rest of that layer and all
        later ones, which only read other layers' keys and values.
        """
        pooling = "last" if self._spec.ending is None else self._spec.ending.pooling
        if layer != self._last_keeper or pooling in ("mean", "each", "sparse"):
            return buffers
        widths = [self._widths[name] for name in buffers]
        self._prefix = SAMPLED
        gathered = tuple(self._buffer(name, width) for name, width in zip(buffers, widths, strict=True))
        gather = prog.FirstRows if pooling == "first" else prog.GatherRows
        self._ops += [gather(out, x) for out, x in zip(gathered, buffers, strict=True)]
        return gathered

    def activated(self, layer: int, x: str) -> str:
        """Return an MLP's hidden values: activation(gate(x)) * up(x), or activation(up(x)) in a `PlainMlp`.

        For a mixture of experts, return the shared expert's.
        """
        mlp = self._spec.layers[layer].mlp
        if isinstance(mlp, ExpertsMlp):
            mlp = GatedMlp(intermediate_size=mlp.shared_size, activation=mlp.activation)
        assert mlp is not None
        return self._activated(f"layers.{layer}.", mlp, x)

    def _activated(self, at: str, mlp: GatedMlp | PlainMlp, x: str) -> str:
        names = ("gate", "up") if isinstance(mlp, GatedMlp) else ("up",)
        *gate, up = (
            self.linear(x, f"{at}{name}", name, mlp.intermediate_size, bias=f"{at}{name}_bias" if mlp.has_bias else None)
            for name in names
        )
        if gate:
            return self.gated(gate[0], up, mlp.activation)
        act = self._buffer("act", mlp.intermediate_size)
        if isinstance(mlp, PlainMlp) and mlp.has_xielu:
            return self._xielu(at, act, up, mlp.activation)
        self._ops.append(prog.Act(act, up, mlp.activation))
        return act

    def _xielu(self, at: str, out: str, x: str, activation: Activation) -> str:
        bent, rest = (self._buffer(name, self._widths[x]) for name in ("bent", "rest"))
        self._ops += [prog.Act(out, x, "relu2"), prog.Act(bent, x, activation), prog.Add(rest, bent, x, -1.0)]
        for part, weight in ((out, "act_p"), (rest, "act_n"), (bent, "act_beta")):
            self.scale(part, weight=f"{at}{weight}")
        return self.add(self.add(out, rest, 1.0), bent, 1.0)

    def gated(self, gate: str, up: str, activation: Activation) -> str:
        """Return activation(gate) * up."""
        act = self._buffer("act", self._widths[up])
        self._ops.append(prog.GatedActivation(act, gate, up, activation))
        return act

    def experts(self, layer: int, x: str, router_x: str | None = None) -> str:
        """Return the weighted sum of the outputs of the experts that the router chooses for each token. [., hidden_size]

        The router reads `router_x` if it is given, and x otherwise.
        """
        mlp = self._spec.layers[layer].mlp
        assert isinstance(mlp, ExpertsMlp)
        return self._experts(f"layers.{layer}.", "expert_", mlp, x, router_x)

    def _experts(self, at: str, kind: str, mlp: ExpertsMlp, x: str, router_x: str | None = None) -> str:
        out = self._buffer("mixed", self._spec.hidden_size)
        gate_bias, up_bias, down_bias = (f"{at}{kind}{name}_bias" if mlp.has_bias else None for name in ("gate", "up", "down"))
        self._ops.append(
            prog.Experts(
                out=out,
                x=x,
                router=f"{at}router",
                gate=f"{at}{kind}gate" if mlp.has_gate else None,
                up=f"{at}{kind}up",
                down=f"{at}{kind}down",
                num_experts=mlp.num_experts,
                num_experts_per_token=mlp.num_experts_per_token,
                intermediate_size=mlp.intermediate_size,
                activation=mlp.activation,
                scoring=mlp.scoring,
                is_renormalised=mlp.is_renormalised,
                share_factor=mlp.share_factor,
                router_bias=f"{at}router_bias" if mlp.has_router_bias else None,
                selection_bias=f"{at}selection_bias" if mlp.has_selection_bias else None,
                gate_bias=gate_bias,
                up_bias=up_bias,
                down_bias=down_bias,
                router_x=router_x,
                share_scale=f"{at}share_scale" if mlp.has_share_scale else None,
                num_groups=mlp.num_groups,
                num_chosen_groups=mlp.num_chosen_groups,
                num_group_scores=mlp.num_group_scores,
                sum_bias=f"{at}{kind}bias" if mlp.has_sum_bias else None,
            )
        )
        return out

    def add_mlp(self, layer: int, to: str, x: str, *, has_down_bias: bool = False, dense: str = "", factor: float = 1.0) -> str:
        """to += the layer's MLP of x. `has_down_bias`: the last projection has a bias even if the others have none.

        For an MLP without experts, `dense` prefixes its matrices' names, and `factor` scales its output.
        """
        mlp = self._spec.layers[layer].mlp
        if isinstance(mlp, ExpertsMlp):
            self.add(to, self.experts(layer, x))
            return self._add_shared(layer, to, x, mlp) if mlp.shared_size else to
        assert mlp is not None
        at = f"layers.{layer}.{dense}"
        bias = f"{at}down_bias" if mlp.has_bias or has_down_bias else None
        return self.add_linear(to, self._activated(at, mlp, x), f"{at}down", bias=bias, factor=factor)

    def mlp(self, layer: int, x: str) -> str:
        """Return the output of the layer's MLP, for a norm after it. [., hidden_size]"""
        mlp = self._spec.layers[layer].mlp
        if not isinstance(mlp, ExpertsMlp):
            return self.linear(self.activated(layer, x), f"layers.{layer}.down", "projected", self._spec.hidden_size)
        out = self.experts(layer, x)
        return self._add_shared(layer, out, x, mlp) if mlp.shared_size else out

    def _add_shared(self, layer: int, to: str, x: str, mlp: ExpertsMlp) -> str:
        """to += the shared expert of x. A gated one becomes a mixture of one expert with a sigmoid router."""
        at = f"layers.{layer}.shared_"
        if not mlp.has_shared_gate:
            kind = GatedMlp if mlp.has_gate else PlainMlp
            shared = kind(intermediate_size=mlp.shared_size, activation=mlp.activation)
            return self.add_linear(to, self._activated(at, shared, x), f"{at}down")
        gated = ExpertsMlp(
            num_experts=1,
            num_experts_per_token=1,
            intermediate_size=mlp.shared_size,
            activation=mlp.activation,
            scoring="sigmoid",
            is_renormalised=False,
        )
        return self.add(to, self._experts(at, "", gated, x))

    def finish(self, x: str) -> Program:
        """Add the last operations, for logits of x or for the spec's `ending`, and return the program."""
        ending = self._spec.ending
        if ending is None:
            self._finish_with_logits(x)
        else:
            self._finish_with_states(x, ending)
        return Program(
            ops=tuple(self._ops),
            buffers=tuple(self._widths.items()),
            kv_shapes=tuple(map(prog.KvShape.of, self._spec.kv_attentions)),
            vocab_size=self._spec.vocab_size,
        )

    def _finish_with_states(self, x: str, ending: TextEnding) -> None:
        if ending.pooling == "mean" and not ending.is_pooled_last:
            x = self._pooled(prog.MeanRows, x)
        for i, dense in enumerate(ending.dense):
            x = self.linear(x, f"dense.{i}", f"dense_{i}", dense.width, bias=f"dense.{i}_bias" if dense.has_bias else None)
            if dense.activation is not None:
                self._ops.append(prog.Act(x, x, dense.activation))
            if dense.has_norm:
                x = self.norm(x, f"dense.{i}_norm", out=f"dense_{i}")
        if ending.pooling == "mean" and ending.is_pooled_last:
            x = self._pooled(prog.MeanRows, x)
        if ending.pooling == "sparse":
            x = self._pooled(prog.SparseRows, self.linear(x, "embed", "logits", self._spec.vocab_size, bias="output_bias"))
        self._ops.append(prog.States(x, ending.is_normalised))

    def _pooled(self, kind: type[prog.MeanRows | prog.SparseRows], x: str) -> str:
        self._prefix = SAMPLED
        pooled = self._buffer("x", self._widths[x])
        self._ops.append(kind(pooled, x))
        return pooled

    def _finish_with_logits(self, x: str) -> None:
        self._prefix = ""
        out = self._buffer("logits", self._spec.vocab_size)
        weight = "embed" if self._spec.tie_word_embeddings else "output"
        bias = "output_bias" if self._spec.has_logit_bias else None
        self._ops.append(prog.Logits(out, x, weight, self._spec.logit_scale, bias))
        if self._spec.logit_softcap:
            self._ops.append(prog.Softcap(out, self._spec.logit_softcap))


def _only_reads(layer: LayerSpec) -> bool:
    """Return whether the layer reads only other layers' keys and values."""
    return bool(layer.mixers) and all(isinstance(mixer, AttentionSpec) and mixer.kv_layer is not None for mixer in layer.mixers)
