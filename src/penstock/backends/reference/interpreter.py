"""Runs a `Program` in NumPy, one row of a step at a time. It defines every operation.

Buffers are float32. A token's bits depend only on its row, not on tokens computed with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.backends.reference.kv_cache import KvCache, round_to_bf16
from penstock.models import program as prog
from penstock.models.adapter import AdapterFactors, site_of
from penstock.models.program import Op, Program, Relative
from penstock.models.relative import keys_and_queries, rows_of
from penstock.models.rope import key_centre
from penstock.models.weights import WeightTensor
from penstock.types.kv_dtype import KvDtype
from penstock.types.model_spec import Activation

F32 = NDArray[np.float32]

PRODUCT_TILE = 8  # rows of every matrix product


@dataclass(slots=True)
class RowRun:
    """The inputs and buffers of one row of the batch while the program runs."""

    cache: KvCache | None  # None for programs that read each text in one pass
    token_ids: NDArray[np.int32]  # [T]
    context_len: int  # position of the first token
    slots: NDArray[np.int64]  # [T], where each token's KV goes
    block_table: NDArray[np.int32]
    gathered: NDArray[np.int64]  # [S], indices of tokens that need logits, ascending and without gaps
    buffers: dict[str, F32] = field(default_factory=dict)  # [T, width], or [S, width] after `GatherRows` and its like
    second_at: int = 0
    """Position of the first token of a pair's second text; 0: the row is one text."""
    adapter: AdapterFactors | None = None
    state: list[F32] = field(default_factory=list)
    """The state of each operation that has one (`PagedState`), before the row's first token; then after its last."""
    saves: Mapping[int, list[F32]] = field(default_factory=dict)
    """Position -> the state after that many tokens, which the operations fill in."""
    first: int = field(init=False)  # position of the first token that products see now
    positions: NDArray[np.int64] = field(init=False)  # [T], or [S] after `GatherRows`

    def __post_init__(self) -> None:
        self.first = self.context_len
        self.positions = self.context_len + np.arange(len(self.token_ids))


class Interpreter:
    """Runs a program for one row at a time. Weights become float32 when they are first used."""

    def __init__(self, program: Program, weights: Mapping[str, WeightTensor], *, num_positions: int = 1) -> None:
        self._program = program
        self._widths = dict(program.buffers)
        self._num_positions = num_positions
        ending = program.ending
        self._result = ending.out if isinstance(ending, prog.Logits) else ending.x
        self._weights = weights
        self._matrices: dict[str, F32] = {}
        self._of_distances: dict[Relative, tuple[F32, F32]] = {}
        self._methods: Mapping[type[Op], Callable[[Any, RowRun], F32 | None]] = {
            prog.Embed: self._embed,
            prog.EmbedPositions: lambda op, row: row.buffers[op.x] + self._matrix(op.weight)[op.first + row.positions],
            prog.EmbedTypes: self._embed_types,
            prog.RMSNorm: self._rms_norm,
            prog.LayerNorm: self._layer_norm,
            prog.Linear: self._linear,
            prog.Rope: self._rope,
            prog.KvWrite: self._kv_write,
            prog.Attention: self._attention,
            prog.HeadLinear: self._head_linear,
            prog.LatentWrite: self._latent_write,
            prog.LatentAttention: self._latent_attention,
            prog.TextAttention: self._text_attention,
            prog.ShortConv: self._short_conv,
            prog.CausalConv: self._causal_conv,
            prog.LinearAttention: self._linear_attention,
            prog.GatedActivation: lambda op, row: gated(row.buffers[op.gate], row.buffers[op.up], op.activation),
            prog.Experts: self._experts,
            prog.Act: lambda op, row: activate(row.buffers[op.x], op.activation),
            prog.Add: lambda op, row: row.buffers[op.a] + row.buffers[op.b] * np.float32(op.factor),
            prog.Scale: self._scale,
            prog.Columns: self._columns,
            prog.Place: self._place,
            prog.GatherRows: self._gather_rows,
            prog.FirstRows: self._first_rows,
            prog.MeanRows: self._mean_rows,
            prog.SparseRows: self._sparse_rows,
            prog.Softcap: self._softcap,
            prog.Logits: self._logits,
            prog.States: self._states,
        }

    def run(self, row: RowRun) -> F32:
        """Run the program for a row: write the KV of its tokens and return logits [S, vocab_size], or states."""
        if row.context_len and self._program.is_one_pass:
            raise ValueError("the text must be computed in one step")
        with np.errstate(over="ignore", invalid="ignore"):  # inf and NaN pass, as on every backend
            for op in self._program.ops:
                value = self._methods[type(op)](op, row)
                if value is not None:
                    row.buffers[getattr(op, "out", "")] = value
        return row.buffers[self._result]

    def _matrix(self, name: str) -> F32:
        if name not in self._matrices:
            self._matrices[name] = self._weights[name].dequantize()
        return self._matrices[name]

    def _vector(self, name: str) -> F32:
        vector: F32 = self._matrix(name)[0]
        return vector

    def _embed(self, op: prog.Embed, row: RowRun) -> F32:
        rows = self._matrix(op.weight)[row.token_ids]
        if factors := _factors(op, row):
            a, b = factors
            rows = rows + product(a.T[row.token_ids], b, row.first)
        return rows * np.float32(op.scale)

    def _embed_types(self, op: prog.EmbedTypes, row: RowRun) -> F32:
        is_second = (row.second_at > 0) & (row.positions >= row.second_at)
        types = np.minimum(is_second, op.num_types - 1).astype(np.int64)
        return row.buffers[op.x] + self._matrix(op.weight)[types]

    def _rms_norm(self, op: prog.RMSNorm, row: RowRun) -> F32:
        x = row.buffers[op.x]
        group = op.group or x.shape[1]
        groups = x.reshape(len(x), x.shape[1] // group, group)
        mean_square = np.mean(groups * groups, axis=-1, keepdims=True)
        normed: F32 = groups / np.sqrt(mean_square + np.float32(op.eps))
        if op.weight is not None:
            normed = normed * self._vector(op.weight).reshape(-1, group)  # one for all groups, or one for each
        return normed.reshape(x.shape)

    def _layer_norm(self, op: prog.LayerNorm, row: RowRun) -> F32:
        x = row.buffers[op.x]
        centred = x - np.mean(x, axis=-1, keepdims=True)
        variance = np.mean(centred * centred, axis=-1, keepdims=True)
        out: F32 = centred / np.sqrt(variance + np.float32(op.eps)) * self._vector(op.weight)
        return out if op.bias is None else out + self._vector(op.bias)

    def _linear(self, op: prog.Linear, row: RowRun) -> F32:
        out = self._adapted_product(op, row)
        if op.bias is not None:
            out = out + self._vector(op.bias)
        if op.residual is not None:
            out = out + row.buffers[op.residual]
        return out

    def _logits(self, op: prog.Logits, row: RowRun) -> F32:
        out = self._adapted_product(op, row)
        if op.bias is not None:
            out = out + self._vector(op.bias)
        out = out * np.float32(op.scale)
        if op.tokens is None:
            return out
        of_all = np.full((len(out), self._program.vocab_size), -np.inf, np.float32)
        of_all[:, self._vector(op.tokens).astype(np.int64)] = out
        return of_all

    def _adapted_product(self, op: prog.Linear | prog.Logits, row: RowRun) -> F32:
        x = row.buffers[op.x]
        out = product(x, self._matrix(op.weight), row.first)
        if factors := _factors(op, row):
            a, b = factors
            out = out + product(product(x, a, row.first), b, row.first)
        return out

    def _rope(self, op: prog.Rope, row: RowRun) -> None:
        half = len(op.inv_freq)
        angles = np.outer(row.positions, np.array(op.inv_freq, np.float64))[:, None, :]
        cos = (np.cos(angles) * op.attention_factor).astype(np.float32)
        sin = (np.sin(angles) * op.attention_factor).astype(np.float32)
        heads = row.buffers[op.x].reshape(-1, op.num_heads, op.head_dim)
        first, second = heads[..., :half], heads[..., half : 2 * half]
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin, heads[..., 2 * half :]], axis=-1)
        if op.growth:
            growth = 1 + op.growth * np.log1p(row.positions // op.growth_len)
            rotated = rotated * growth.astype(np.float32)[:, None, None]
        row.buffers[op.x] = rotated.reshape(row.buffers[op.x].shape)

    def _kv_write(self, op: prog.KvWrite, row: RowRun) -> None:
        k = row.buffers[op.k]
        assert row.cache is not None, "programs that write KV have a cache"
        # bf16 stores whole keys, not centred ones, as the checkpoints' own implementation does.
        if op.bias is not None and row.cache.dtype is not KvDtype.BF16:
            bias = self._weights[op.bias].dequantize().reshape(-1)
            k = k - key_centre(op, bias, self._program.kv_shapes[op.layer].head_dim, self._num_positions)
        row.cache.write(op.layer, row.slots, k, row.buffers[op.v])

    def _attention(self, op: prog.Attention, row: RowRun) -> F32:
        assert row.cache is not None, "programs that read KV have a cache"
        keys, values = row.cache.read(op.layer, row.block_table, row.context_len + len(row.token_ids))
        queries = row.buffers[op.q].reshape(-1, op.num_heads, op.head_dim)
        out = np.empty_like(queries)
        sinks = None if op.sinks is None else self._vector(op.sinks)
        for i, position in enumerate(row.positions.tolist()):
            start = max(0, position + 1 - op.window) if op.window else 0
            seen = slice(start, position + 1)
            out[i] = attend(queries[i], keys[seen], values[seen], op.scale, softcap=op.softcap, sinks=sinks)
        return out.reshape(row.buffers[op.q].shape)

    def _head_linear(self, op: prog.HeadLinear, row: RowRun) -> F32:
        weight = self._matrix(op.weight)
        heads = np.split(row.buffers[op.x], op.num_heads, axis=1), np.split(weight, op.num_heads)
        products = [
            product(np.ascontiguousarray(x), np.ascontiguousarray(own.T) if op.is_transposed else own, row.first)
            for x, own in zip(*heads, strict=True)
        ]
        return np.concatenate(products, axis=1)

    def _latent_write(self, op: prog.LatentWrite, row: RowRun) -> None:
        assert row.cache is not None, "programs that write KV have a cache"
        row.cache.write_latents(op.layer, row.slots, row.buffers[op.latent], row.buffers[op.k])

    def _latent_attention(self, op: prog.LatentAttention, row: RowRun) -> F32:
        assert row.cache is not None, "programs that read KV have a cache"
        keys, values = row.cache.read(op.layer, row.block_table, row.context_len + len(row.token_ids))
        latent, rotated = (row.buffers[name].reshape(len(row.token_ids), op.num_heads, -1) for name in (op.q_latent, op.q))
        queries = np.concatenate([latent, rotated], axis=-1)
        out = np.empty_like(latent)
        for i, position in enumerate(row.positions.tolist()):
            seen = slice(0, position + 1)
            out[i] = attend(queries[i], keys[seen], values[seen], op.scale)
        return out.reshape(len(queries), -1)

    def _text_attention(self, op: prog.TextAttention, row: RowRun) -> F32:
        queries = row.buffers[op.q].reshape(-1, op.num_heads, op.head_dim)
        keys, values = (row.buffers[name].reshape(-1, op.num_kv_heads, op.head_dim) for name in (op.k, op.v))
        out = np.empty_like(queries)
        distances = None if op.distances is None else self._matrix(op.distances)
        sinks = None if op.sinks is None else self._vector(op.sinks)
        of_distances = [] if op.relative is None else self._keys_and_queries(op, op.relative, len(queries))
        for i in range(len(queries)):
            start = max(0, i + 1 - op.window) if op.window else 0
            end = i + 1 if op.mask == "causal" else min(len(keys), i + op.window) if op.window else len(keys)
            biases = None
            if distances is not None:
                farthest = op.num_distances
                biases = distances[:, farthest + np.clip(np.arange(start, end) - i, -farthest, farthest)]
            if of_distances:
                far_keys, far_queries = (part[:, len(queries) - 1 - i :][:, start:end] for part in of_distances)
                scores = np.einsum("hd,hjd->hj", queries[i], far_keys) + np.einsum("hjd,jhd->hj", far_queries, keys[start:end])
                biases = scores * np.float32(op.scale) + (0 if biases is None else biases)
            out[i] = attend(queries[i], keys[start:end], values[start:end], op.scale, sinks=sinks, biases=biases)
        return out.reshape(len(queries), -1)

    def _keys_and_queries(self, op: prog.TextAttention, relative: Relative, num_tokens: int) -> list[F32]:
        """Return the key and the query of each distance in a text. [num_heads, 2 * num_tokens - 1, head_dim]"""
        if relative not in self._of_distances:
            self._of_distances[relative] = keys_and_queries(relative, self._matrix)
        rows = rows_of(relative.spec, num_tokens)
        parts = self._of_distances[relative]
        return [part[rows].reshape(-1, op.num_heads, op.head_dim).swapaxes(0, 1) for part in parts]

    def _short_conv(self, op: prog.ShortConv, row: RowRun) -> F32:
        assert row.cache is not None, "programs with a state have a cache"
        b, c, u = np.split(row.buffers[op.x], 3, axis=1)
        own: F32 = round_to_bf16(b * u)
        weight = self._matrix(op.weight)
        seen = np.concatenate([row.cache.read_state(op.layer, row.block_table, row.context_len), own])
        total: F32 = np.zeros_like(own)
        for tap in range(op.kernel):
            total += seen[tap : tap + len(own)] * weight[:, tap]
        if op.bias is not None:
            total += self._vector(op.bias)
        row.cache.write_state(op.layer, row.slots, own)
        return c * total

    def _causal_conv(self, op: prog.CausalConv, row: RowRun) -> F32:
        x, weight = row.buffers[op.x], self._matrix(op.weight)
        seen = np.concatenate([row.state[op.index][0], x])
        total: F32 = np.zeros_like(x)
        for tap in range(op.kernel):
            total += seen[tap : tap + len(x)] * weight[:, tap]
        if op.bias is not None:
            total += self._vector(op.bias)
        for position, saved in row.saves.items():
            num_tokens = position - row.context_len
            saved[op.index] = seen[None, num_tokens : num_tokens + op.kernel - 1]
        row.state[op.index] = seen[None, len(x) :]
        return activate(total, "silu")

    def _linear_attention(self, op: prog.LinearAttention, row: RowRun) -> F32:
        x, num_heads, num_key_heads = row.buffers[op.x], op.num_heads, op.num_key_heads
        q, k = (x[:, at : at + num_key_heads * op.key_dim].reshape(-1, num_key_heads, op.key_dim) for at in (op.q_at, op.k_at))
        if op.is_normalised:
            q, k = (part / np.sqrt((part * part).sum(-1, keepdims=True) + np.float32(1e-6)) for part in (q, k))
            k = k * np.float32(op.key_length)
        head = np.arange(num_heads)
        key_head = head % num_key_heads if op.is_tiled else head // (num_heads // num_key_heads)
        q, k = q[:, key_head], k[:, key_head]
        v = x[:, op.v_at : op.v_at + num_heads * op.value_dim].reshape(-1, num_heads, op.value_dim)
        steps = row.buffers[op.steps] + self._vector(op.step_bias)
        steps = np.logaddexp(steps, np.float32(0))
        steps = np.clip(steps, np.float32(op.min_step), np.float32(op.max_step))
        decays = np.exp(steps * self._vector(op.decay))
        rates = steps if op.gates is None else sigmoid(row.buffers[op.gates])
        out = np.empty_like(v)
        state = row.state[op.index].copy()
        for i, position in enumerate(row.positions.tolist()):
            state *= decays[i, :, None, None]
            added = v[i] if op.gates is None else v[i] - np.einsum("hk,hkv->hv", k[i], state)
            state += k[i, :, :, None] * (rates[i, :, None] * added)[:, None, :]
            out[i] = np.einsum("hk,hkv->hv", q[i], state) * np.float32(op.scale)
            if position + 1 in row.saves:
                row.saves[position + 1][op.index] = state.copy()
        row.state[op.index] = state
        if op.skip is not None:
            out = out + self._vector(op.skip)[:, None] * v
        return out.reshape(len(x), -1)

    def _experts(self, op: prog.Experts, row: RowRun) -> F32:
        x = row.buffers[op.x]
        raw = product(row.buffers[op.router_x or op.x], self._matrix(op.router), row.first)
        if op.router_bias is not None:
            raw = raw + self._vector(op.router_bias)
        gate, up, down = (
            self._matrix(name).reshape(op.num_experts, -1, self._matrix(name).shape[1])
            for name in (op.gate or op.up, op.up, op.down)
        )
        biases = [np.float32(0)] * op.num_experts
        gate_bias, up_bias, down_bias = (
            biases if name is None else self._matrix(name) for name in (op.gate_bias, op.up_bias, op.down_bias)
        )
        out = np.zeros((len(x), down.shape[1]), np.float32)
        for i in range(len(x)):
            for expert, share in zip(*self._choose(op, raw[i]), strict=True):
                inner = up[expert] @ x[i] + up_bias[expert]
                if op.gate is None:
                    inner = activate(inner, op.activation)
                else:
                    inner = gated(gate[expert] @ x[i] + gate_bias[expert], inner, op.activation)
                out[i] += share * (down[expert] @ inner + down_bias[expert])
        return out if op.sum_bias is None else out + self._vector(op.sum_bias)

    def _choose(self, op: prog.Experts, raw: F32) -> tuple[list[int], list[np.float32]]:
        """Return the experts of one token, best first, and their weights in the sum. `raw` is the router's output."""
        if op.scoring == "softmax":
            scores = np.exp(raw - raw.max())
            scores = scores / scores.sum()
        else:
            scores = sigmoid(raw)
        # A softmax may round different logits to equal scores.
        wanted = raw if op.scoring == "softmax" else scores
        if op.selection_bias is not None:
            wanted = scores + self._vector(op.selection_bias)
        if op.num_groups:
            groups = wanted.reshape(op.num_groups, -1)
            sums = np.sort(groups, axis=1)[:, -op.num_group_scores :].sum(axis=1)
            others = np.argsort(-sums, kind="stable")[op.num_chosen_groups :]
            wanted = groups.copy()
            wanted[others] = -np.inf
            wanted = wanted.reshape(-1)
        chosen = np.argsort(-wanted, kind="stable")[: op.num_experts_per_token]
        shares = scores[chosen]
        if op.is_renormalised:
            shares = shares / shares.sum()
        shares = shares * np.float32(op.share_factor)
        return chosen.tolist(), list(shares if op.share_scale is None else shares * self._vector(op.share_scale)[chosen])

    def _scale(self, op: prog.Scale, row: RowRun) -> F32:
        factor = np.float32(op.factor)
        return row.buffers[op.x] * (factor if op.weight is None else factor * self._vector(op.weight)[0])

    def _columns(self, op: prog.Columns, row: RowRun) -> F32:
        return row.buffers[op.x][:, op.first : op.first + self._widths[op.out]]

    def _place(self, op: prog.Place, row: RowRun) -> F32:
        x = row.buffers[op.x]
        out = np.zeros((len(x), self._widths[op.out]), np.float32)
        if op.first:
            out[:, : op.first] = row.buffers[op.out][:, : op.first]
        out[:, op.first : op.first + x.shape[1]] = x
        return out

    def _gather_rows(self, op: prog.GatherRows, row: RowRun) -> F32:
        # From here on, products use only the gathered tokens.
        row.positions = row.context_len + row.gathered
        row.first = int(row.positions[0]) if len(row.gathered) else row.context_len
        return row.buffers[op.x][row.gathered]

    def _first_rows(self, op: prog.FirstRows, row: RowRun) -> F32:
        if row.context_len:
            raise ValueError("the first token of a row must be computed with the others")
        return np.repeat(row.buffers[op.x][:1], len(row.gathered), axis=0)

    def _mean_rows(self, op: prog.MeanRows, row: RowRun) -> F32:
        if row.context_len:
            raise ValueError("the mean of a row's tokens needs all of them in one step")
        x = row.buffers[op.x]
        means = [x[: last + 1].mean(axis=0, keepdims=True) for last in row.gathered.tolist()]
        return np.concatenate(means) if means else x[:0]

    def _sparse_rows(self, op: prog.SparseRows, row: RowRun) -> F32:
        if row.context_len:
            raise ValueError("the maximum over a row's tokens needs all of them in one step")
        x = row.buffers[op.x]
        found = [np.log1p(np.maximum(x[: last + 1].max(axis=0, keepdims=True), 0)) for last in row.gathered.tolist()]
        return np.concatenate(found) if found else x[:0]

    def _softcap(self, op: prog.Softcap, row: RowRun) -> None:
        cap = np.float32(op.cap)
        row.buffers[op.x] = cap * np.tanh(row.buffers[op.x] / cap)

    def _states(self, op: prog.States, row: RowRun) -> None:
        if op.is_normalised:
            x = row.buffers[op.x]
            row.buffers[op.x] = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), np.float32(1e-12))


def _factors(op: prog.Linear | prog.Embed | prog.Logits, row: RowRun) -> tuple[F32, F32] | None:
    return None if row.adapter is None else row.adapter.by_weight.get(site_of(op))


def product(x: F32, weight: F32, first_position: int) -> F32:
    """Return x @ weight.T: [T, in] by [out, in]; x[0] belongs to the token at `first_position`.

    BLAS sums in an order that depends on the shape. So all products have `PRODUCT_TILE` rows, and a token's position determines
    its row in the product.
    """
    lead = first_position % PRODUCT_TILE
    num_tiles = -(-(lead + len(x)) // PRODUCT_TILE) if len(x) else 0
    tiles = np.zeros((num_tiles, PRODUCT_TILE, x.shape[1]), np.float32)
    tiles.reshape(-1, x.shape[1])[lead : lead + len(x)] = x
    out = np.empty((num_tiles, PRODUCT_TILE, len(weight)), np.float32)
    for tile, result in zip(tiles, out, strict=True):
        result[:] = tile @ weight.T
    return out.reshape(-1, len(weight))[lead : lead + len(x)]


def attend(
    q: F32,
    keys: F32,
    values: F32,
    scale: float,
    *,
    softcap: float = 0.0,
    sinks: F32 | None = None,
    biases: F32 | None = None,
) -> F32:
    """Return the attention of one token: q [num_heads, head_dim] over keys and values [n, num_kv_heads, columns].

    sinks [num_heads] are scores without a value; biases [num_heads, n] are added to the scores.
    """
    num_kv_heads = keys.shape[1]
    group = len(q) // num_kv_heads
    out = np.empty((len(q), values.shape[-1]), np.float32)
    for kv_head in range(num_kv_heads):
        heads = slice(kv_head * group, (kv_head + 1) * group)
        scores = q[heads] @ np.ascontiguousarray(keys[:, kv_head]).T * np.float32(scale)
        if biases is not None:
            scores = scores + biases[heads]
        if softcap > 0:
            scores = np.float32(softcap) * np.tanh(scores / np.float32(softcap))
        if sinks is not None:
            scores = np.concatenate([scores, sinks[heads, None]], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = (weights / weights.sum(axis=-1, keepdims=True))[:, : len(keys)]
        out[heads] = weights @ np.ascontiguousarray(values[:, kv_head])
    return out


def gated(gate: F32, up: F32, activation: Activation) -> F32:
    if activation == "swiglu_clamped":
        gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
        clamped: F32 = (up + 1) * (gate * sigmoid(np.float32(1.702) * gate))
        return clamped
    product: F32 = activate(gate, activation) * up
    return product


def activate(x: F32, activation: Activation) -> F32:
    """Apply an activation function to each number; `GatedActivation` has the formulas."""
    result: F32
    match activation:
        case "silu":
            with np.errstate(over="ignore"):  # as in `sigmoid`
                result = x / (1 + np.exp(-x))
        case "gelu_tanh":
            inner = np.float32(np.sqrt(2.0 / np.pi)) * (x + np.float32(0.044715) * x * x * x)
            result = np.float32(0.5) * x * (1 + np.tanh(inner))
        case "gelu":
            result = x * _normal(x).astype(np.float32)
        case "gelu_quick":
            result = x * sigmoid(np.float32(1.702) * x)
        case "relu":
            result = np.maximum(x, np.float32(0))
        case "relu2":
            result = np.maximum(x, np.float32(0)) ** 2
        case "elu":
            result = np.where(x > 0, x, np.expm1(np.minimum(x, np.float32(0))))
        case "tanh":
            result = np.tanh(x)
        case "sigmoid":
            result = sigmoid(x)
        case "swiglu_clamped":
            raise ValueError("swiglu_clamped needs a gate")
    return result


def sigmoid(x: F32) -> F32:
    with np.errstate(over="ignore"):  # exp of a large number is inf, and the result 0
        result: F32 = np.reciprocal(1 + np.exp(-x))
    return result


_normal = np.frompyfunc(lambda x: 0.5 * math.erfc(-x / math.sqrt(2)), 1, 1)
"""The standard normal CDF, elementwise."""
