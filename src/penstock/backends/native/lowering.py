"""Translates a `Program` into the C++ engine's instructions, once, at load.

`fuse` groups operations that become one product. `_Emitter` adds each group to the engine. Before a product, it converts the
input to the number format that the weight needs. It pads heads if their width is not a multiple of 16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native._native import Engine, RowOp, RowOpKind, SourceFormat
from penstock.backends.native.footprint import can_fuse, first_lines, widths_of_latents
from penstock.backends.native.relative import add_relative
from penstock.models import program as prog
from penstock.models.adapter import site_of
from penstock.models.formats import WeightFormat
from penstock.models.packed_file import Form, PackedError, PackedFile
from penstock.models.program import Op, Program, features
from penstock.models.rope import key_centre
from penstock.models.weights import WeightTensor, weight_of
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import padded_head_dim, padded_latent

SOURCE_FORMATS: Mapping[WeightFormat, SourceFormat] = {
    fmt: SourceFormat[fmt.name] for fmt in WeightFormat if fmt is not WeightFormat.F8_E4M3
}
FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16, WeightFormat.F8_E4M3)
"""Formats that are packed as bf16, or as int8 with a scale per row."""
ACTIVATION_KINDS = {
    kind: number
    for number, kind in enumerate(
        ("silu", "gelu_tanh", "gelu", "gelu_quick", "relu", "relu2", "swiglu_clamped", "tanh", "sigmoid", "elu")
    )
}
"""Numbers of activations, as in native/kernels/kernels.h."""
_WITH_ZERO = ("gelu", "gelu_tanh", "gelu_quick", "silu", "relu")
"""Activations with hardly any negative results. When rounded, their range is divided into 256 steps."""
COMPUTED = frozenset(
    {
        *("Embed", "Embed.scale", "EmbedPositions", "EmbedPositions.first", "EmbedTypes", "EmbedTypes.num_types"),
        *("Linear", "Linear.bias", "Linear.residual"),
        *("RMSNorm", "RMSNorm.group", "RMSNorm.is_by_column", "RMSNorm without weight", "LayerNorm", "LayerNorm without bias"),
        *("Rope", "Rope.attention_factor", "Rope.growth", "Rope.growth_len"),
        *("KvWrite", "KvWrite.bias", "KvWrite.inv_freq", "KvWrite.attention_factor"),
        *("ShortConv", "ShortConv.bias", "CausalConv", "CausalConv.bias"),
        *("LinearAttention", "LinearAttention.scale", "LinearAttention.gates", "LinearAttention.skip"),
        *("LinearAttention.is_normalised", "LinearAttention.key_length", "LinearAttention.is_tiled"),
        *("LinearAttention.min_step", "LinearAttention.max_step"),
        *("Attention", "Attention.window", "Attention.softcap", "Attention.sinks", "Add", "Add.factor", "GatherRows"),
        *("HeadLinear", "HeadLinear.is_transposed", "LatentWrite", "LatentAttention"),
        *("Scale", "Scale.factor", "Scale.weight", "Columns", "Place"),
        *("TextAttention", "TextAttention.mask", "TextAttention.window", "FirstRows", "MeanRows", "SparseRows"),
        *("TextAttention.distances", "TextAttention.num_distances", "TextAttention.relative", "TextAttention.sinks"),
        *("States", "States.is_normalised"),
        *("Logits", "Logits.scale", "Logits.bias", "Logits.tokens", "Softcap", "Act", "GatedActivation"),
        *(f"{op} with {kind}" for op in ("GatedActivation", "Experts") for kind in ACTIVATION_KINDS),
        *(f"Act with {kind}" for kind in ACTIVATION_KINDS if kind != "swiglu_clamped"),
        *("Experts", "Experts without gate", "Experts.scoring", "Experts.is_renormalised", "Experts.share_factor"),
        *("Experts.router_bias", "Experts.selection_bias", "Experts.router_x", "Experts.share_scale"),
        *("Experts.gate_bias", "Experts.up_bias", "Experts.down_bias", "Experts.sum_bias"),
        *("Experts.num_groups", "Experts.num_chosen_groups", "Experts.num_group_scores"),
    }
)
"""The `features` that this backend computes."""
PANEL = 16  # rows that the engine packs together
MOST_TAPS = 8  # `kMostTaps` of native/kernels/kernels.h
APART = 4  # `kApart` there: columns that a rounded matrix multiplies apart
NONE = -1


class Lowered(NamedTuple):
    sites: Mapping[str, Sequence[int]]
    """The engine's site ids for each supported name of `models.adapter.sites`."""
    matrices: Mapping[str, tuple[Form, int]]
    """Form and id of each packed matrix by weight name; several names are joined with ` + `."""
    given: int
    """Ids of the buffers `Program.given` and `Program.kept`; -1: none."""
    kept: int


def lower(
    program: Program,
    weights: Mapping[str, WeightTensor],
    engine: Engine,
    *,
    num_positions: int,
    on_packed: Callable[[int], object] | None = None,
    rounds_floats: bool = False,
    has_adapters: bool = False,
    packed: PackedFile | None = None,
) -> Lowered:
    """Fill an empty engine with the program's weights and instructions, for requests of up to `num_positions`.

    - `rounds_floats`: floats of linear operations become int8 with a scale per row instead of bf16
    - `on_packed`: called after each part of a matrix is packed, with the part's bytes in the file
    - `has_adapters`: rows may have adapters; the engine must have them enabled
    - `packed`: a file that the engine has mapped; its matrices are used in place

    Raises ModelError, and PackedError if that file lacks a matrix.
    """
    check_program(program)
    known = _Weights(program, weights, engine, on_packed, rounds_floats, packed)
    emitter = _Emitter(program, known, engine, num_positions, has_adapters=has_adapters)
    for group in fuse(program.ops, known):
        emitter.emit(group)
    emitter.flush_all()
    given, kept = (emitter.buffer_id(name) for name in (program.given, program.kept))
    return Lowered(emitter.sites, known.matrices, given, kept)


def check_program(program: Program) -> None:
    """Raise ModelError with every operation and field that this backend can't compute."""
    missing = dict.fromkeys(feature for op in program.ops for feature in features(op) if feature not in COMPUTED)
    results = {op.out for op in program.ops if isinstance(op, prog.Logits)}
    for op in program.ops:
        if isinstance(op, prog.Rope) and op.growth and 2 * len(op.inv_freq) < op.head_dim:
            missing["Rope.growth of columns that do not turn"] = None
        elif isinstance(op, prog.Softcap) and op.x not in results:
            missing["Softcap of anything but logits"] = None
        elif isinstance(op, prog.CausalConv) and op.kernel > MOST_TAPS:
            missing[f"CausalConv over more than {MOST_TAPS} positions"] = None
    if missing:
        raise ModelError(
            f"the native backend can't compute {', '.join(missing)} yet.",
            remedy="Use --backend reference for this architecture.",
        )


# The first pass: group operations


class Products(NamedTuple):
    """Linear operations that read the same value and may run in any order."""

    ops: tuple[prog.Linear, ...]


class Gated(NamedTuple):
    """A gate, an up projection and their activation as one product."""

    gate: prog.Linear
    up: prog.Linear
    act: prog.GatedActivation


class ActivatedProduct(NamedTuple):
    """A linear operation and the GELU of its result."""

    op: prog.Linear
    act: prog.Act


class QuantisedNorm(NamedTuple):
    """A norm of whole rows. Only quantised products read its result."""

    op: prog.RMSNorm


class Attend(NamedTuple):
    op: prog.Attention | prog.LatentAttention
    of_samples: bool  # later operations read only rows that sample


Group = Products | Gated | ActivatedProduct | QuantisedNorm | Attend | Op


def fuse(ops: Sequence[Op], weights: _Weights) -> Iterator[Group]:
    """Yield all operations in order, grouped where one instruction can compute several."""
    at = 0
    while at < len(ops):
        op = ops[at]
        if isinstance(op, prog.Linear):
            activated = _activated_at(ops, at, weights)
            group = activated or _gated_at(ops, at, weights) or _products_at(ops, at, weights)
            yield group
            at += 2 if isinstance(group, ActivatedProduct) else 3 if isinstance(group, Gated) else len(group.ops)
            continue
        if isinstance(op, prog.Attention | prog.LatentAttention):
            yield Attend(op, _is_only_gathered(ops, op.out, at + 1))
        elif isinstance(op, prog.RMSNorm) and not op.group and _is_only_multiplied(ops, op.out, at + 1, weights):
            yield QuantisedNorm(op)
        else:
            yield op
        at += 1


def _products_at(ops: Sequence[Op], at: int, weights: _Weights) -> Products:
    first = ops[at]
    assert isinstance(first, prog.Linear)
    run = [first]
    for op in ops[at + 1 :]:
        if not isinstance(op, prog.Linear) or op.x != first.x or not _are_independent(op, run):
            break
        if _gated_at(ops, at + len(run), weights) is not None:
            break
        run.append(op)
    return Products(tuple(run))


def _activated_at(ops: Sequence[Op], at: int, weights: _Weights) -> ActivatedProduct | None:
    if at + 1 >= len(ops):
        return None
    op, act = ops[at : at + 2]
    if not (isinstance(op, prog.Linear) and isinstance(act, prog.Act)) or act.activation != "gelu":
        return None
    fits = act.x == op.out and op.residual is None and weights.is_rounded(op.weight)
    return ActivatedProduct(op, act) if fits and (act.out == op.out or not _is_read(ops, op.out, at + 2)) else None


def _gated_at(ops: Sequence[Op], at: int, weights: _Weights) -> Gated | None:
    if at + 2 >= len(ops):
        return None
    gate, up, act = ops[at : at + 3]
    if not (isinstance(gate, prog.Linear) and isinstance(up, prog.Linear) and isinstance(act, prog.GatedActivation)):
        return None
    same = weights.tensor(gate.weight).format is weights.tensor(up.weight).format and not weights.is_rounded(gate.weight)
    same = same and weights.order(gate.weight) == weights.order(up.weight)
    unread = all(not _is_read(ops, name, at + 3) for name in {gate.out, up.out} - {act.out})
    return Gated(gate, up, act) if can_fuse(gate, up, act) and same and unread else None


def _are_independent(op: prog.Linear, run: Sequence[prog.Linear]) -> bool:
    written = {other.out for other in run}
    return not written & {op.out, op.x, op.residual} and not any(other.reads(op.out) for other in run)


def _uses(ops: Sequence[Op], name: str, at: int) -> Iterator[Op]:
    """Yield the operations from index `at` on that read buffer `name` before it is overwritten."""
    for op in ops[at:]:
        if op.reads(name):
            yield op
        if getattr(op, "out", None) == name:
            return


def _is_read(ops: Sequence[Op], name: str, at: int) -> bool:
    return any(True for _ in _uses(ops, name, at))


def _is_only_gathered(ops: Sequence[Op], name: str, at: int) -> bool:
    return all(isinstance(op, prog.GatherRows) for op in _uses(ops, name, at))


def _is_only_multiplied(ops: Sequence[Op], name: str, at: int, weights: _Weights) -> bool:
    """Return whether only products read buffer `name` from index `at` on, all as `_Form.GROUPS` in the usual column order."""
    return all(
        isinstance(op, prog.Linear | prog.Logits)
        and weights.form(op.weight) is _Form.GROUPS
        and weights.order(op.weight) is None
        and not (isinstance(op, prog.Linear) and op.residual == name)
        for op in _uses(ops, name, at)
    )


# The second pass: instructions


class _Emitter:
    """Adds groups of operations to the engine as instructions, in order."""

    def __init__(self, program: Program, weights: _Weights, engine: Engine, num_positions: int, *, has_adapters: bool) -> None:
        self._widths = dict(program.buffers) | widths_of_latents(program)
        self._kv_shapes = program.kv_shapes
        self._num_positions = num_positions
        self._first_lines = first_lines(program.paged_state)
        self._vocab_size = program.vocab_size
        self._weights = weights
        self._engine = engine
        self._softcaps = {op.x: op.cap for op in program.ops if isinstance(op, prog.Softcap)}
        self._ropes: dict[tuple[tuple[float, ...], float, float, int, bool], int] = {}
        self._buffers: dict[str, int] = {}
        self._converted: dict[str, dict[tuple[_Form, bytes | None], int]] = {}
        """Buffer -> (form, column order) -> id of the converted copy, while the copy is current."""
        self._with_zero: set[str] = set()  # buffers with values that are hardly ever negative
        self._activations: dict[tuple[str, _Form, int], int] = {}
        """Ids of converted copies by buffer, form and number of the column order. Layers share the copies."""
        self._pending: list[RowOp] = []  # row operations that become one instruction
        self._later: list[RowOp] = []  # row operations of the next instruction
        self._on_samples = False
        self._has_adapters = has_adapters
        self.sites: dict[str, list[int]] = {}

    def emit(self, group: Group) -> None:
        match group:
            case Products():
                self._emit_products(group.ops)
            case Gated():
                self._emit_gated(group)
            case ActivatedProduct():
                self._emit_activated(group)
            case QuantisedNorm():
                self._emit_quantised_norm(group.op)
            case Attend():
                self._emit_attention(group)
            case prog.Experts():
                self._emit_experts(group)
            case prog.TextAttention():
                self._emit_text_attention(group)
            case prog.Logits():
                self._emit_logits(group)
            case prog.States():
                self._emit_states(group)
            case prog.Embed():
                self._emit_embed(group)
            case prog.RMSNorm():
                n, step = group.group or self._widths[group.x], group.group if group.is_by_column else 0
                weight = self._weights.of_norm(group.weight, n)
                self._map(RowOpKind.RMS_NORM, group, weight=weight, n=n, head_dim=step, value=group.eps)
            case prog.LayerNorm():
                vector, bias = self._weights.vector(group.weight), self._weights.vector(group.bias)
                self._map(RowOpKind.LAYER_NORM, group, y=bias, weight=vector, value=group.eps)
            case prog.EmbedPositions():
                self._emit_positions(group)
            case prog.EmbedTypes():
                self._map(RowOpKind.ADD_TYPE, group, weight=self._weights.vector(group.weight), n=group.num_types)
            case prog.Rope():
                rope = self._rope(group)
                self._row(RowOpKind.ROPE, x=self._written(group.x), weight=rope, n=group.num_heads, head_dim=group.head_dim)
            case prog.KvWrite():
                shape = self._kv_shapes[group.layer]
                k, v = (self._padded(name, shape.num_kv_heads, shape.head_dim) for name in (group.k, group.v))
                self._row(RowOpKind.KV_WRITE, x=k, y=v, n=group.layer, weight=self._key_centre(group))
            case prog.HeadLinear():
                self._emit_heads(group)
            case prog.LatentWrite():
                self._emit_latent_write(group)
            case prog.ShortConv():
                self._emit_short_conv(group)
            case prog.CausalConv():
                self._emit_causal_conv(group)
            case prog.LinearAttention():
                self._emit_linear_attention(group)
            case prog.GatedActivation():
                gate, up = self._buffer(group.gate), self._buffer(group.up)
                kind = ACTIVATION_KINDS[group.activation]
                self._row(RowOpKind.GATED, out=self._written(group.out), x=gate, y=up, n=kind)
            case prog.Act():
                self._map(RowOpKind.ACTIVATE, group, n=ACTIVATION_KINDS[group.activation])
                if group.activation in _WITH_ZERO:
                    self._with_zero.add(group.out)
            case prog.Add():
                a, b = self._buffer(group.a), self._buffer(group.b)
                self._row(RowOpKind.ADD, out=self._written(group.out), x=a, y=b, value=group.factor)
            case prog.Scale():
                factor = np.float32(group.factor) * self._weights.number(group.weight)
                self._map(RowOpKind.SCALE, group, value=float(factor))
            case prog.Columns():
                self._map(RowOpKind.COLUMNS, group, n=group.first)
            case prog.Place():
                self._map(RowOpKind.PLACE_HEADS, group, n=1, head_dim=group.first)
            case prog.Softcap():
                pass  # `set_logits` gets the cap
            case prog.GatherRows() | prog.FirstRows() | prog.MeanRows() | prog.SparseRows():
                if not self._on_samples:
                    self.flush_all()
                self._on_samples = True
                self._map(_GATHERINGS[type(group)], group)
            case _:
                raise AssertionError(f"{type(group).__name__} is in COMPUTED without a case")

    def buffer_id(self, name: str) -> int:
        return self._buffers[name] if name else NONE

    def flush(self) -> None:
        if self._pending:
            self._engine.add_rows(self._pending, self._on_samples)
        self._pending, self._later = self._later, []

    def flush_all(self) -> None:
        while self._pending:
            self.flush()

    def _emit_quantised_norm(self, op: prog.RMSNorm) -> None:
        x, vector = self._buffer(op.x), self._weights.of_norm(op.weight, self._widths[op.x])
        self._forget(op.out)
        activation = self._new_activation(op.out, _Form.GROUPS, 0)
        self._row(RowOpKind.QUANTIZE, out=activation, x=x, weight=vector, value=op.eps)
        self._converted[op.out] = {(_Form.GROUPS, None): activation}

    def _emit_embed(self, op: prog.Embed) -> None:
        if self._weights.is_multiplied(op.weight):
            self._row(RowOpKind.EMBED, out=self._written(op.out), weight=self._weights.matrix(op.weight), value=op.scale)
        else:
            self._row(RowOpKind.LOOKUP, out=self._written(op.out), weight=self._weights.table(op.weight), value=op.scale)
        if self._has_adapters:
            site = self._engine.add_embedding_site(self._widths[op.out], self._vocab_size)
            self.sites.setdefault(site_of(op), []).append(site)
            self._row(RowOpKind.ADAPT_EMBEDDING, out=self._buffer(op.out), weight=site, value=op.scale)

    def _emit_positions(self, op: prog.EmbedPositions) -> None:
        if self._num_positions > op.num_positions:
            raise ModelError(
                f"texts of {self._num_positions} tokens have more positions than the {op.num_positions} that were learned.",
                remedy=f"Set --max-model-len to {op.num_positions} or less.",
            )
        added = f"{op.out}, of its position"
        self._widths[added] = self._widths[op.x]
        table = self._weights.table(op.weight)
        self._row(RowOpKind.LOOKUP_POSITION, out=self._buffer(added), weight=table, n=op.first, value=1.0)
        x = self._buffer(op.x)
        self._row(RowOpKind.ADD, out=self._written(op.out), x=x, y=self._buffer(added), value=1.0)

    def _emit_short_conv(self, op: prog.ShortConv) -> None:
        """Save the new state one instruction later: tokens of this step still read the old state."""
        self.flush()  # reads x of other tokens, so all rows of x must be written
        bias = self._weights.vector(op.bias)
        taps = self._engine.add_vector(np.ascontiguousarray(self._weights.tensor(op.weight).dequantize().T).reshape(-1))
        self._map(RowOpKind.SHORT_CONV, op, y=bias, weight=taps, n=op.layer)
        self._later.append(RowOp(RowOpKind.KEEP_STATE, x=self._buffer(op.x), n=op.layer))

    def _emit_causal_conv(self, op: prog.CausalConv) -> None:
        self.flush()
        x, bias = self._buffer(op.x), self._weights.vector(op.bias)
        taps = self._engine.add_vector(np.ascontiguousarray(self._weights.tensor(op.weight).dequantize().T).reshape(-1))
        self._engine.add_causal_conv(
            x=x,
            out=self._written(op.out),
            weight=taps,
            bias=bias,
            taps=op.kernel,
            width=self._widths[op.out],
            first_line=self._first_lines[op.index],
        )

    def _emit_linear_attention(self, op: prog.LinearAttention) -> None:
        assert op.out != op.x, "values are read while others are written"
        prepared = f"{op.x}, prepared"
        self._widths[prepared] = 2 * op.num_key_heads * op.key_dim + 2 * op.num_heads
        factors = [NONE, NONE]
        if op.is_normalised:  # computed as an RMS norm
            each = np.full(op.key_dim, op.key_dim**-0.5, np.float32)
            factors = [self._engine.add_vector(each * np.float32(factor)) for factor in (op.scale, op.key_length)]
        layer = self._engine.define_linear_attention(
            x=self._buffer(op.x),
            steps=self._buffer(op.steps),
            gates=NONE if op.gates is None else self._buffer(op.gates),
            out=self._written(op.out),
            prepared=self._buffer(prepared),
            step_bias=self._weights.vector(op.step_bias),
            decay=self._weights.vector(op.decay),
            skip=self._weights.vector(op.skip),
            num_heads=op.num_heads,
            num_key_heads=op.num_key_heads,
            key_dim=op.key_dim,
            value_dim=op.value_dim,
            q_at=op.q_at,
            k_at=op.k_at,
            v_at=op.v_at,
            scale=op.scale,
            q_factor=factors[0],
            k_factor=factors[1],
            min_step=op.min_step,
            max_step=op.max_step,
            first_line=self._first_lines[op.index],
            is_tiled=op.is_tiled,
        )
        self._row(RowOpKind.PREPARE_STATE, weight=layer)
        self.flush()
        self._engine.add_linear_attention(layer)

    def _row(self, kind: RowOpKind, **fields: Any) -> None:
        self._pending.append(RowOp(kind, **fields))

    def _map(self, kind: RowOpKind, op: prog.Map, **fields: Any) -> None:
        x = self._buffer(op.x)
        self._row(kind, out=self._written(op.out), x=x, **fields)

    def _emit_products(self, ops: Sequence[prog.Linear]) -> None:
        inputs = [self._activation(op.x, op.weight) for op in ops]
        sites = self._add_sites(ops, inputs)
        self.flush()
        linears = [self._linear(op, x) for op, x in zip(ops, inputs, strict=True)]
        self._engine.add_linear(linears, self._on_samples, sites=sites)

    def _emit_activated(self, group: ActivatedProduct) -> None:
        op, act = group.op, group.act
        x = self._activation(op.x, op.weight)
        self.flush()
        weight, bias = self._weights.matrix(op.weight), self._weights.vector(op.bias)
        out = self._written(act.out)
        self._engine.add_linear([(weight, x, out, bias, NONE)], self._on_samples, has_gelu=True)
        self._with_zero.add(act.out)

    def _add_sites(self, ops: Sequence[prog.Linear | prog.Logits], inputs: Sequence[int]) -> list[int]:
        """Return site ids, one for each operation of a product, where adapters add to its result.

        A row operation multiplies by factor A. The product itself then multiplies by factor B.
        """
        found: list[int] = []
        if not self._has_adapters:
            return found
        for slot, (op, x) in enumerate(zip(ops, inputs, strict=True)):
            order = self._weights.order(op.weight)
            order_id = NONE if order is None else self._weights.order_id(order)
            matrix = self._weights.matrix(op.weight, is_ordered=True)
            found.append(self._engine.add_adapter_site(matrix, order_id, self._on_samples, slot))
            self.sites.setdefault(site_of(op), []).append(found[-1])
            self._row(RowOpKind.SHRINK, x=x, weight=found[-1])
        return found

    def _linear(self, op: prog.Linear, activation: int) -> tuple[int, int, int, int, int]:
        bias = self._weights.vector(op.bias)
        residual = NONE if op.residual is None else self._buffer(op.residual)
        return self._weights.matrix(op.weight, is_ordered=True), activation, self._written(op.out), bias, residual

    def _emit_logits(self, op: prog.Logits) -> None:
        activation = self._activation(op.x, op.weight)
        sites = self._add_sites((op,), (activation,))
        self.flush()
        out = self._written(op.out)
        matrix = self._weights.matrix(op.weight, is_ordered=True)
        bias = self._weights.vector(op.bias)
        self._engine.add_linear([(matrix, activation, out, bias, NONE)], self._on_samples, sites=sites)
        self._engine.set_logits(out, op.scale, self._softcaps.get(op.out, 0.0))
        if op.tokens is not None:
            self._engine.name_logits(self._weights.tensor(op.tokens).dequantize()[0].astype(np.int32))

    def _emit_states(self, op: prog.States) -> None:
        x = self._buffer(op.x)
        if op.is_normalised:
            self._row(RowOpKind.NORMALISE, out=self._written(op.x), x=x)
        self.flush_all()
        self._engine.set_states(x, self._on_samples)

    def _emit_gated(self, group: Gated) -> None:
        gate, up, act = group.gate, group.up, group.act
        activation = self._activation(gate.x, gate.weight)
        sites = self._add_sites((gate, up), (activation, activation)) or (NONE, NONE)
        self.flush()
        out = self._written(act.out)
        matrix, other = (self._weights.matrix(op.weight, is_ordered=True) for op in (gate, up))
        self._engine.add_gated(matrix, other, activation, out, ACTIVATION_KINDS[act.activation], self._on_samples, *sites)

    def _emit_experts(self, op: prog.Experts) -> None:
        weights, num_experts = self._weights, op.num_experts
        x, activation = self._buffer(op.router_x or op.x), self._activation(op.x, op.up)
        inner, biases = ((op.up,), (op.up_bias,)) if op.gate is None else ((op.gate, op.up), (op.gate_bias, op.up_bias))
        self.flush()
        layer = self._engine.add_experts(
            num_experts=num_experts,
            num_chosen=op.num_experts_per_token,
            width=op.intermediate_size,
            x=x,
            input=activation,
            router=weights.vector(op.router),
            router_bias=weights.vector(op.router_bias),
            selection_bias=weights.vector(op.selection_bias),
            inner=weights.experts(inner, num_experts),
            outer=weights.experts((op.down,), num_experts),
            inner_bias=weights.expert_biases(biases, num_experts),
            outer_bias=weights.expert_biases((op.down_bias,), num_experts),
            activation=ACTIVATION_KINDS[op.activation],
            is_sigmoid=op.scoring == "sigmoid",
            is_renormalised=op.is_renormalised,
            share_factor=op.share_factor,
            share_scale=weights.vector(op.share_scale),
            samples=self._on_samples,
            num_groups=op.num_groups,
            num_chosen_groups=op.num_chosen_groups,
            num_group_scores=op.num_group_scores,
        )
        out = self._written(op.out)
        self._row(RowOpKind.SUM_EXPERTS, out=out, weight=layer)
        if op.sum_bias is not None:  # a table of token types with one row
            self._row(RowOpKind.ADD_TYPE, out=out, x=out, weight=weights.vector(op.sum_bias), n=1)

    def _emit_heads(self, op: prog.HeadLinear) -> None:
        """Emit a product for each head. Buffers of latent attention have columns of a rotated key behind each latent."""
        forms = self._converted.setdefault(op.x, {})
        key = _Form.BF16, None
        if key not in forms:
            forms[key] = self._new_activation(op.x, _Form.BF16, 0)
            self._row(RowOpKind.TO_BF16, out=forms[key], x=self._buffer(op.x))
        self.flush()
        matrix, rows = self._weights.heads(op)
        columns = max(rows, self._widths[op.out] // op.num_heads)
        out = self._written(op.out)
        target = out if columns * op.num_heads == self._widths[op.out] else self._wide_buffer(op.out, columns * op.num_heads)
        self._engine.add_heads(
            weight=matrix,
            activation=forms[key],
            out=target,
            num_heads=op.num_heads,
            x_columns=self._widths[op.x] // op.num_heads,
            out_columns=columns,
            samples=self._on_samples,
        )
        if target != out:
            self._row(RowOpKind.RESIZE_HEADS, out=out, x=target, n=op.num_heads)

    def _emit_latent_write(self, op: prog.LatentWrite) -> None:
        joint, shape = f"{op.latent}, {op.k}", self._kv_shapes[op.layer].padded()
        self._widths[joint] = shape.head_dim
        self._row(RowOpKind.RESIZE_HEADS, out=self._buffer(joint), x=self._buffer(op.latent), n=1)
        self._row(RowOpKind.PLACE_HEADS, out=self._buffer(joint), x=self._buffer(op.k), n=1, head_dim=shape.num_latent)
        self._row(RowOpKind.KV_WRITE, x=self._buffer(joint), y=self._buffer(joint), n=op.layer)

    def _emit_latent_attention(self, op: prog.LatentAttention, *, of_samples: bool) -> None:
        first = self._kv_shapes[op.layer].padded().num_latent
        q, out = self._buffer(op.q_latent), self._written(op.out)
        self._row(RowOpKind.PLACE_HEADS, out=q, x=self._buffer(op.q), n=op.num_heads, head_dim=first)
        self.flush()
        self._engine.add_attention(q, out, op.layer, op.num_heads, op.scale, 0, 0.0, NONE, of_samples, self._on_samples)

    def _emit_attention(self, group: Attend) -> None:
        op = group.op
        if isinstance(op, prog.LatentAttention):
            self._emit_latent_attention(op, of_samples=group.of_samples)
            return
        heads = op.num_heads, op.head_dim
        q, out, sinks = self._padded(op.q, *heads), self._written(op.out), self._weights.vector(op.sinks)
        self.flush()
        attended = self._padded_buffer(op.out, *heads)
        self._engine.add_attention(
            q, attended, op.layer, op.num_heads, op.scale, op.window, op.softcap, sinks, group.of_samples, self._on_samples
        )
        if attended != out:
            self._row(RowOpKind.RESIZE_HEADS, out=out, x=attended, n=op.num_heads)

    def _emit_text_attention(self, op: prog.TextAttention) -> None:
        q, k, v, out = self._buffer(op.q), self._buffer(op.k), self._buffer(op.v), self._written(op.out)
        self.flush()
        self._engine.add_text_attention(
            q=q,
            k=k,
            v=v,
            out=out,
            num_heads=op.num_heads,
            num_kv_heads=op.num_kv_heads,
            head_dim=op.head_dim,
            scale=op.scale,
            is_causal=op.mask == "causal",
            window=op.window,
            distances=self._weights.vector(op.distances),
            num_distances=op.num_distances,
            relative=add_relative(self._engine, op, self._num_positions, lambda name: self._weights.tensor(name).dequantize()),
            sinks=self._weights.vector(op.sinks),
        )

    def _padded_buffer(self, name: str, num_heads: int, head_dim: int) -> int:
        """Return a buffer for the heads of buffer `name`, padded. It is the same buffer if they need no padding."""
        width = num_heads * padded_head_dim(head_dim)
        return self._buffer(name) if width == num_heads * head_dim else self._wide_buffer(name, width)

    def _wide_buffer(self, name: str, width: int) -> int:
        wide = f"{name}, padded to {width}"
        self._widths[wide] = width
        return self._buffer(wide)

    def _padded(self, name: str, num_heads: int, head_dim: int) -> int:
        x, wide = self._buffer(name), self._padded_buffer(name, num_heads, head_dim)
        if wide != x:
            self._row(RowOpKind.RESIZE_HEADS, out=wide, x=x, n=num_heads)
        return wide

    def _key_centre(self, op: prog.KvWrite) -> int:
        if op.bias is None:
            return NONE
        bias = self._weights.tensor(op.bias).dequantize().reshape(-1)
        head_dim = self._kv_shapes[op.layer].head_dim
        heads = key_centre(op, bias, head_dim, self._num_positions).reshape(-1, head_dim)
        missing = padded_head_dim(head_dim) - head_dim
        return self._engine.add_vector(np.pad(heads, ((0, 0), (0, missing))).reshape(-1))

    def _rope(self, op: prog.Rope) -> int:
        key = (op.inv_freq, op.attention_factor, op.growth, op.growth_len, self._on_samples)
        if key not in self._ropes:
            self._ropes[key] = self._engine.add_rope(np.array(op.inv_freq, np.float32), *key[1:])
            # Angles depend only on positions: compute them once per step, before their first use.
            self._row(RowOpKind.ANGLES, weight=self._ropes[key])
        return self._ropes[key]

    def _buffer(self, name: str) -> int:
        if name not in self._buffers:
            self._buffers[name] = self._engine.add_buffer(self._widths[name], self._on_samples)
        return self._buffers[name]

    def _written(self, name: str) -> int:
        """Return the id of a buffer about to be written, and drop its converted copies."""
        self._forget(name)
        return self._buffer(name)

    def _forget(self, name: str) -> None:
        self._converted.pop(name, None)
        self._with_zero.discard(name)

    def _activation(self, name: str, weight: str) -> int:
        """Return the id of a buffer in the number format that `weight` multiplies. Convert it unless a copy is current."""
        form, order = key = self._weights.form(weight), self._weights.order(weight)
        forms = self._converted.setdefault(name, {})
        if key not in forms:
            x, number = self._buffer(name), 0
            if order is not None:
                x, number = self._in_order(name, order), sum(other is not None for _, other in forms) + 1
            forms[key] = self._new_activation(name, form, number)
            matrix = self._weights.matrix(weight) if self._weights.has_apart(weight) else NONE
            has_zero = form is _Form.ROWS and name in self._with_zero
            self._row(_CONVERSIONS[form], out=forms[key], x=x, weight=matrix, n=int(has_zero))
        return forms[key]

    def _new_activation(self, name: str, form: _Form, number: int) -> int:
        key = (name, form, number)
        if key not in self._activations:
            width, is_quantised = self._widths[name], form is not _Form.BF16
            by_row = {"by_row": True} if form is _Form.ROWS else {}
            self._activations[key] = self._engine.add_activation(width, is_quantised, self._on_samples, **by_row)
        return self._activations[key]

    def _in_order(self, name: str, order: bytes) -> int:
        ordered = f"{name}, in order"
        self._widths[ordered] = self._widths[name]
        x, out = self._buffer(name), self._buffer(ordered)
        self._row(RowOpKind.GATHER_COLUMNS, out=out, x=x, weight=self._weights.order_id(order))
        return out


# Weights


class _Form(Enum):
    """A number format for the input of a product."""

    GROUPS = "int8 with a scale per group of 32 columns"
    ROWS = "int8 with a scale per row"
    BF16 = "bf16"


_GATHERINGS: Mapping[type[Op], RowOpKind] = {
    prog.GatherRows: RowOpKind.GATHER,
    prog.FirstRows: RowOpKind.GATHER_FIRST,
    prog.MeanRows: RowOpKind.MEAN,
    prog.SparseRows: RowOpKind.SPARSE,
}
_CONVERSIONS = {_Form.GROUPS: RowOpKind.QUANTIZE, _Form.ROWS: RowOpKind.ROUND, _Form.BF16: RowOpKind.TO_BF16}


def _behind_activations(ops: Sequence[Op]) -> set[str]:
    """Return the weights that multiply nothing but results of activations, each alone."""
    alone: Counter[str] = Counter()
    for at, op in enumerate(ops):
        if isinstance(op, prog.Act | prog.GatedActivation):
            readers = [use for use in _uses(ops, op.out, at + 1) if isinstance(use, prog.Linear) and use.x == op.out]
            alone.update(reader.weight for reader in readers if len(readers) == 1)
    everywhere = Counter(op.weight for op in ops if isinstance(op, prog.Linear))
    return {weight for weight, count in alone.items() if count == everywhere[weight]}


def _apart(tensor: WeightTensor) -> list[int]:
    """Return the columns with the largest weights, in order.

    Behind an activation, models have a column or two with weights many times the others', which meet large values. They would
    make all other weights of a row coarse.
    """
    largest = np.zeros(tensor.num_cols, np.float32)
    for begin, end in tensor.parts(PANEL):
        np.maximum(largest, np.abs(tensor.dequantize(begin, end)).max(axis=0), out=largest)
    return sorted(np.argpartition(largest, -APART)[-APART:].tolist())


class _Weights:
    def __init__(
        self,
        program: Program,
        weights: Mapping[str, WeightTensor],
        engine: Engine,
        on_packed: Callable[[int], object] | None,
        rounds_floats: bool,
        packed: PackedFile | None,
    ) -> None:
        self._weights = weights
        self._file = packed
        self._engine = engine
        self._on_packed = on_packed
        self._multiplied = {op.weight for op in program.ops if isinstance(op, prog.Linear | prog.Logits)}
        self._rounded = {op.weight for op in program.ops if isinstance(op, prog.Linear)} if rounds_floats else set()
        self._rounded -= {op.weight for op in program.ops if isinstance(op, prog.Embed | prog.Logits)}
        self._behind = _behind_activations(program.ops) if rounds_floats else set()
        self.matrices: dict[str, tuple[Form, int]] = {}
        self._vectors: dict[str, int] = {}
        self._orders: dict[bytes, int] = {}

    def tensor(self, name: str) -> WeightTensor:
        return weight_of(self._weights, name)

    def is_rounded(self, name: str) -> bool:
        """Return whether the weight becomes int8 with a scale per row."""
        tensor = self.tensor(name)
        has_form = tensor.num_cols % 32 == 0 and tensor.num_cols <= 8192  # `kMostRow8Cols` of native/kernels/kernels.h
        return name in self._rounded and tensor.format in FLOATS and has_form

    def has_apart(self, name: str) -> bool:
        """Return whether the weight is rounded but for a few columns, which stay floats."""
        return name in self._behind and self.is_rounded(name)

    def form(self, name: str) -> _Form:
        if self.is_rounded(name):
            return _Form.ROWS
        is_quantised = self.tensor(name).format not in FLOATS
        return _Form.GROUPS if is_quantised and not self._engine.has_tiles else _Form.BF16

    def is_multiplied(self, name: str) -> bool:
        return name in self._multiplied

    def order(self, name: str) -> bytes | None:
        order = self.tensor(name).column_order
        return None if order is None else order.astype(np.int32).tobytes()

    def order_id(self, order: bytes) -> int:
        if order not in self._orders:
            self._orders[order] = self._engine.add_order(np.frombuffer(order, np.int32))
        return self._orders[order]

    def matrix(self, name: str, *, is_ordered: bool = False) -> int:
        """Return the id of a packed matrix. Raises ModelError if its columns are reordered, unless `is_ordered`."""
        if not is_ordered and self.order(name) is not None:
            raise ModelError(
                f"the columns of {name!r} are in another order (act-order), which is not supported for this matrix.",
                remedy="Use a checkpoint without act-order (desc_act), or the bf16 original.",
            )
        if name not in self.matrices:
            tensor = self.tensor(name)
            shape = (_source_format(tensor).name, tensor.num_rows, tensor.num_cols)
            form = Form(*shape, self.is_rounded(name), self.has_apart(name))
            matrix = self._mapped(name, form)
            self.matrices[name] = form, self._packed(tensor, form) if matrix is None else matrix
        return self.matrices[name][1]

    def _mapped(self, name: str, form: Form) -> int | None:
        """Return the id of a matrix in the file of packed weights, or None without such a file."""
        if self._file is None or name == prog.HEAD_FC:  # the file was made for the model alone
            return None
        place, (fmt, num_rows, num_cols, by_row, has_apart) = self._file.place(name, form), form
        try:
            return self._engine.map_matrix(
                SourceFormat[fmt], num_rows, num_cols, place.offset, place.num_bytes, by_row, has_apart
            )
        except ValueError as error:
            raise PackedError(f"{self._file.path}: {name}: {error}.") from error

    def _packed(self, tensor: WeightTensor, form: Form) -> int:
        with _naming(tensor):
            shape = (_source_format(tensor), tensor.num_rows, tensor.num_cols)
            apart = _apart(tensor) if form.has_apart else ()
            matrix = (
                self._engine.add_matrix(*shape, by_row=True, apart=apart) if form.by_row else self._engine.add_matrix(*shape)
            )
            for begin, end in tensor.parts(PANEL):
                self._engine.pack_rows(matrix, begin, _bytes(tensor, begin, end, is_ordered=True))
                self._taken_over(tensor, begin, end)
        return matrix

    def _taken_over(self, tensor: WeightTensor, begin: int, end: int) -> None:
        tensor.forget(begin, end)
        if self._on_packed is not None:
            self._on_packed(tensor.num_bytes // tensor.num_rows * (end - begin))

    def experts(self, names: Sequence[str], num_experts: int) -> int:
        """Return the id of one matrix: for each expert, its rows of each weight, padded to whole panels of rows."""
        tensors = [self.tensor(name) for name in names]
        first, sizes = tensors[0], [tensor.num_rows // num_experts for tensor in tensors]
        if any(tensor.format is not first.format for tensor in tensors):
            formats = " and ".join(tensor.format.name for tensor in tensors)
            raise ModelError(
                f"{' and '.join(names)} have the formats {formats}: the native backend needs one format for both.",
                remedy="Use a file with both in the same format, or --backend reference.",
            )
        num_rows = num_experts * sum(_in_panels(size) for size in sizes)
        name, form = " + ".join(names), Form(_source_format(first).name, num_rows, first.num_cols)
        if (mapped := self._mapped(name, form)) is not None:
            self.matrices[name] = form, mapped
            return mapped
        is_partly_read = num_experts > 1  # a single expert is shared by all tokens
        matrix = self._engine.add_matrix(_source_format(first), num_rows, first.num_cols, is_partly_read=is_partly_read)
        at = 0
        for expert in range(num_experts):
            for tensor, size in zip(tensors, sizes, strict=True):
                with _naming(tensor):
                    for begin, end in tensor.parts(PANEL, expert * size, (expert + 1) * size):
                        rows = _bytes(tensor, begin, end)
                        missing = _in_panels(len(rows)) - len(rows)
                        self._engine.pack_rows(matrix, at, np.pad(rows, ((0, missing), (0, 0))) if missing else rows)
                        self._taken_over(tensor, begin, end)
                        at += len(rows) + missing
        self.matrices[name] = form, matrix
        return matrix

    def heads(self, op: prog.HeadLinear) -> tuple[int, int]:
        """Return the id of one bf16 matrix for all heads, and the rows per head, padded like a stored latent."""
        tensor, num_heads = self.tensor(op.weight), op.num_heads
        size = tensor.num_rows // num_heads
        num_rows, num_cols = (tensor.num_cols, size) if op.is_transposed else (size, tensor.num_cols)
        padded = padded_latent(num_rows)
        form = Form(SourceFormat.F32.name, num_heads * padded, num_cols)
        if (mapped := self._mapped(op.weight, form)) is not None:
            self.matrices[op.weight] = form, mapped
            return mapped, padded
        matrix = self._engine.add_matrix(SourceFormat.F32, num_heads * padded, num_cols)
        for head in range(num_heads):
            rows = tensor.dequantize(head * size, (head + 1) * size)
            if not np.isfinite(rows).all():
                raise ModelError(f"the matrix {op.weight!r} has a weight that is not finite.", remedy="Fetch the model again.")
            rows = np.ascontiguousarray(np.pad(rows.T if op.is_transposed else rows, ((0, padded - num_rows), (0, 0))))
            self._engine.pack_rows(matrix, head * padded, rows.view(np.uint8))
            self._taken_over(tensor, head * size, (head + 1) * size)
        self.matrices[op.weight] = form, matrix
        return matrix, padded

    def expert_biases(self, names: Sequence[str | None], num_experts: int) -> int:
        if None in names:
            return NONE
        biases = [self.tensor(name).dequantize().reshape(num_experts, -1) for name in names if name is not None]
        in_panels = [np.pad(bias, ((0, 0), (0, _in_panels(bias.shape[1]) - bias.shape[1]))) for bias in biases]
        return self._engine.add_vector(np.concatenate(in_panels, axis=1).reshape(-1))

    def table(self, name: str) -> int:
        """Return the id of a matrix for row lookups. It is not packed; a mapped file serves the rows."""
        tensor = self.tensor(name)
        with _naming(tensor):
            data = _bytes(tensor, 0, tensor.num_rows)
            if not tensor.is_mapped:
                tensor.forget()
            return self._engine.add_table(_source_format(tensor), tensor.num_rows, tensor.num_cols, data)

    def number(self, name: str | None) -> np.float32:
        """Return a weight's single number, or 1 for no weight."""
        return np.float32(1) if name is None else np.float32(self.tensor(name).dequantize()[0, 0])

    def of_norm(self, weight: str | None, width: int) -> int:
        """Return the id of a norm's vector. It has ones if the norm has no weight."""
        if weight is not None:
            return self.vector(weight)
        name = f"ones, {width}"
        if name not in self._vectors:
            self._vectors[name] = self._engine.add_vector(np.ones(width, np.float32))
        return self._vectors[name]

    def vector(self, name: str | None) -> int:
        if name is None:
            return NONE
        if name not in self._vectors:
            self._vectors[name] = self._engine.add_vector(self.tensor(name).dequantize().reshape(-1))
        return self._vectors[name]


def _in_panels(num_rows: int) -> int:
    return -(-num_rows // PANEL) * PANEL


def _source_format(tensor: WeightTensor) -> SourceFormat:
    return SourceFormat.F32 if tensor.format is WeightFormat.F8_E4M3 else SOURCE_FORMATS[tensor.format]


def _bytes(tensor: WeightTensor, begin: int, end: int, *, is_ordered: bool = False) -> NDArray[np.uint8]:
    if tensor.format is not WeightFormat.F8_E4M3:
        return np.ascontiguousarray((tensor.ordered_rows if is_ordered else tensor.rows)(begin, end)).view(np.uint8)
    values = tensor.dequantize(begin, end)
    if not np.isfinite(values).all():  # the engine does not check floats
        raise ModelError(f"the matrix {tensor.name!r} has a weight that is not finite.", remedy="Fetch the model again.")
    return values.view(np.uint8)


@contextmanager
def _naming(tensor: WeightTensor) -> Iterator[None]:
    """Turn a ValueError of the engine into a ModelError that names this matrix."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"the matrix {tensor.name!r}: {error}.", remedy="Fetch the model again.") from error
