"""Owns the translation of a `Program` into the C++ engine's instructions; runs once, at load, and never computes.

Four things are decided here. Which weights are packed how: see `native/blocks.h`. What a linear operation
reads: quantised weights read int8 activations with a scale per group of 32, bf16 weights read bf16; the conversion is
inserted where the value is produced. How wide heads are: where 16 does not divide them they are padded before they are stored
or attend, and what comes out loses the padding, so that no weight and no other operation sees it. And what is fused:
neighbouring operations on single rows become one instruction, linear operations that read the same value become one, and so do
a gate, an up projection and their activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from penstock.backends.native._native import Engine, RowOp, RowOpKind, SourceFormat
from penstock.models.formats import WeightFormat
from penstock.models.program import (
    Add,
    Attention,
    Embed,
    GatedActivation,
    GatherRows,
    KvWrite,
    Linear,
    Logits,
    Op,
    Program,
    RMSNorm,
    Rope,
    States,
)
from penstock.models.rope import key_centre
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError
from penstock.types.kv_dtype import padded_head_dim

SOURCE_FORMATS: Mapping[WeightFormat, SourceFormat] = {
    fmt: SourceFormat[fmt.name] for fmt in WeightFormat if fmt is not WeightFormat.F8_E4M3
}
FLOATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16, WeightFormat.F8_E4M3)
"""Packed as bf16."""
ACTIVATION_KINDS = {"silu": 0, "gelu_tanh": 1}
PANEL = 16
"""Rows that the engine packs together."""
NONE = -1


def lower(program: Program, weights: Mapping[str, WeightTensor], engine: Engine, *, num_positions: int) -> None:
    """Fill an empty engine with the program's weights and instructions. No request will be longer than `num_positions`.

    Raises `ModelError` for an operation or a weight format that this backend can't compute.
    """
    _Lowering(program, weights, engine, num_positions).run()


class _Lowering:
    """One translation; holds what was already given an id."""

    def __init__(self, program: Program, weights: Mapping[str, WeightTensor], engine: Engine, num_positions: int) -> None:
        self._ops = program.ops
        self._widths = dict(program.buffers)
        self._num_kv_heads, self._head_dim = program.num_kv_heads, program.head_dim
        self._num_positions = num_positions
        self._weights = weights
        self._engine = engine
        self._multiplied = {op.weight for op in program.ops if isinstance(op, Linear | Logits)}
        """Weights of products."""
        self._matrices: dict[str, int] = {}
        self._vectors: dict[str, int] = {}
        self._ropes: dict[tuple[tuple[float, ...], float], int] = {}
        self._buffers: dict[str, int] = {}
        self._converted: dict[tuple[str, bool], int] = {}
        """(buffer, quantised) -> the activation that holds its present value."""
        self._activations: dict[tuple[str, bool], int] = {}
        self._pending: list[RowOp] = []
        """Row operations not yet given out, to be one instruction."""
        self._on_samples = False

    def run(self) -> None:
        at = 0
        while at < len(self._ops):
            at += self._emit(at)
        self._flush()

    def _emit(self, at: int) -> int:
        """Translate the operation at `at`, and those that go with it; how many that were."""
        op = self._ops[at]
        if isinstance(op, Linear):
            return self._emit_gated(at) or self._emit_linears(at)
        if isinstance(op, Logits):
            self._emit_logits(op)
        elif isinstance(op, Attention):
            self._emit_attention(op, at)
        elif not (isinstance(op, RMSNorm) and self._emit_quantised_norm(op, at)):
            self._emit_row(op)
        return 1

    # Row operations

    def _emit_row(self, op: Op) -> None:
        match op:
            case Embed():
                self._emit_embed(op)
            case RMSNorm():
                width = self._widths[op.x]
                x, vector = self._buffer(op.x), self._vector(op.weight)
                self._row(RowOpKind.RMS_NORM, out=self._written(op.out), x=x, weight=vector, n=op.group or width, value=op.eps)
            case Rope():
                rope = self._rope(op)
                self._row(RowOpKind.ROPE, x=self._written(op.x), weight=rope, n=op.num_heads, head_dim=op.head_dim)
            case KvWrite():
                k, v = self._padded(op.k, self._num_kv_heads), self._padded(op.v, self._num_kv_heads)
                self._row(RowOpKind.KV_WRITE, x=k, y=v, n=op.layer, weight=self._key_centre(op))
            case GatedActivation():
                gate, up = self._buffer(op.gate), self._buffer(op.up)
                self._row(RowOpKind.GATED, out=self._written(op.out), x=gate, y=up, n=ACTIVATION_KINDS[op.activation])
            case Add():
                a, b = self._buffer(op.a), self._buffer(op.b)
                self._row(RowOpKind.ADD, out=self._written(op.out), x=a, y=b)
            case GatherRows():
                if not self._on_samples:
                    self._flush()
                self._on_samples = True
                self._row(RowOpKind.GATHER, x=self._buffer(op.x), out=self._written(op.out))
            case States():
                raise ModelError(
                    "the native backend can't end a program in States yet: it computes logits.",
                    remedy="Compute such a model with `penstock.backends.reference.interpreter.Interpreter`.",
                )
            case _:
                raise ModelError(
                    f"the native backend can't compute {type(op).__name__} yet.",
                    remedy="Use --backend reference for this architecture.",
                )

    def _emit_quantised_norm(self, op: RMSNorm, at: int) -> bool:
        """A norm of whole rows that only quantised products read is quantised at once and not kept otherwise."""
        if op.group or not self._is_only_multiplied(op.out, at + 1):
            return False
        x, vector = self._buffer(op.x), self._vector(op.weight)
        self._forget(op.out)
        activation = self._new_activation(op.out, quantised=True)
        self._row(RowOpKind.QUANTIZE, out=activation, x=x, weight=vector, value=op.eps)
        self._converted[op.out, True] = activation
        return True

    def _is_only_multiplied(self, name: str, at: int) -> bool:
        """Whether all that reads a value from `at` on, before it is written again, are products with quantised weights."""
        for op in self._ops[at:]:
            multiplied = isinstance(op, Linear | Logits) and op.x == name and self._is_quantised(op.weight)
            residual = op.residual if isinstance(op, Linear) else None
            if (name in _read_by(op) and not multiplied) or name == residual:
                return False
            if _written_by(op) == name:
                break
        return True

    def _emit_embed(self, op: Embed) -> None:
        """From the packed matrix if products need it, too; else from the file, of which few rows are ever read."""
        if op.weight in self._multiplied:
            self._row(RowOpKind.EMBED, out=self._written(op.out), weight=self._matrix(op.weight), value=op.scale)
        else:
            self._row(RowOpKind.LOOKUP, out=self._written(op.out), weight=self._table(op.weight), value=op.scale)

    def _row(
        self,
        kind: RowOpKind,
        *,
        out: int = NONE,
        x: int = NONE,
        y: int = NONE,
        weight: int = NONE,
        n: int = 0,
        head_dim: int = 0,
        value: float = 0.0,
    ) -> None:
        self._pending.append(RowOp(kind, out=out, x=x, y=y, weight=weight, n=n, head_dim=head_dim, value=value))

    def _flush(self) -> None:
        if self._pending:
            self._engine.add_rows(self._pending, self._on_samples)
            self._pending = []

    # Linear operations

    def _emit_linears(self, at: int) -> int:
        """A run of linear operations on the same value, as one instruction."""
        first = self._ops[at]
        assert isinstance(first, Linear)
        run = [first]
        for op in self._ops[at + 1 :]:
            if not isinstance(op, Linear) or op.x != first.x or not _are_independent(op, run):
                break
            if self._gated_at(at + len(run)) is not None:
                break
            run.append(op)
        inputs = [self._activation(op.x, self._is_quantised(op.weight)) for op in run]
        self._flush()
        self._engine.add_linear([self._linear(op, x) for op, x in zip(run, inputs, strict=True)], self._on_samples)
        return len(run)

    def _linear(self, op: Linear, activation: int) -> tuple[int, int, int, int, int]:
        bias = NONE if op.bias is None else self._vector(op.bias)
        residual = NONE if op.residual is None else self._buffer(op.residual)
        return self._matrix(op.weight), activation, self._written(op.out), bias, residual

    def _emit_logits(self, op: Logits) -> None:
        activation = self._activation(op.x, self._is_quantised(op.weight))
        self._flush()
        out = self._written(op.out)
        self._engine.add_linear([(self._matrix(op.weight), activation, out, NONE, NONE)], self._on_samples)
        self._engine.set_logits(out)

    # Gate, up and their activation

    def _gated_at(self, at: int) -> tuple[Linear, Linear, GatedActivation] | None:
        """The three operations from `at` on, if they are a gate, an up projection and their activation that can be one."""
        if at + 2 >= len(self._ops):
            return None
        gate, up, act = self._ops[at : at + 3]
        if not (isinstance(gate, Linear) and isinstance(up, Linear) and isinstance(act, GatedActivation)):
            return None
        plain = all(op.bias is None and op.residual is None for op in (gate, up))
        fits = plain and gate.x == up.x and (act.gate, act.up) == (gate.out, up.out) and gate.out not in {gate.x, up.out}
        same = self._tensor(gate.weight).format is self._tensor(up.weight).format
        unread = all(not self._is_read(name, at + 3) for name in {gate.out, up.out} - {act.out})
        return (gate, up, act) if fits and same and unread else None

    def _emit_gated(self, at: int) -> int:
        found = self._gated_at(at)
        if found is None:
            return 0
        gate, up, act = found
        activation = self._activation(gate.x, self._is_quantised(gate.weight))
        self._flush()
        out = self._written(act.out)
        self._engine.add_gated(
            self._matrix(gate.weight),
            self._matrix(up.weight),
            activation,
            out,
            ACTIVATION_KINDS[act.activation],
            self._on_samples,
        )
        return 3

    def _is_read(self, name: str, at: int) -> bool:
        """Whether a value is read from `at` on, before it is written again."""
        for op in self._ops[at:]:
            if name in _read_by(op):
                return True
            if _written_by(op) == name:
                return False
        return False

    # Attention

    def _emit_attention(self, op: Attention, at: int) -> None:
        q, out = self._padded(op.q, op.num_heads), self._written(op.out)
        self._flush()
        attended = out if self._is_whole else self._padded_buffer(op.out, op.num_heads)
        of_samples = self._is_only_gathered(op.out, at + 1)  # of a prompt's last layer hardly anything
        self._engine.add_attention(q, attended, op.layer, op.num_heads, op.scale, op.window, op.softcap, of_samples)
        if not self._is_whole:
            self._row(RowOpKind.RESIZE_HEADS, out=out, x=attended, n=op.num_heads)

    @property
    def _is_whole(self) -> bool:
        """Whether heads are as wide as the engine wants them."""
        return self._head_dim == padded_head_dim(self._head_dim)

    def _padded_buffer(self, name: str, num_heads: int) -> int:
        """For the heads of a buffer, as wide as the engine wants them."""
        wide = f"{name}, padded"
        self._widths[wide] = num_heads * padded_head_dim(self._head_dim)
        return self._buffer(wide)

    def _padded(self, name: str, num_heads: int) -> int:
        """The heads that a buffer holds now, as wide as the engine wants them: zeros change no score and no other column."""
        if self._is_whole:
            return self._buffer(name)
        wide = self._padded_buffer(name, num_heads)
        self._row(RowOpKind.RESIZE_HEADS, out=wide, x=self._buffer(name), n=num_heads)
        return wide

    def _is_only_gathered(self, name: str, at: int) -> bool:
        """Whether of a value only rows that sample are read from `at` on, before it is written again."""
        for op in self._ops[at:]:
            if name in _read_by(op) and not isinstance(op, GatherRows):
                return False
            if _written_by(op) == name:
                break
        return True

    # What has an id

    def _tensor(self, name: str) -> WeightTensor:
        if name not in self._weights:
            raise ModelError(f"the weight {name!r} is missing.", remedy="Fetch the model again, or use another one.")
        return self._weights[name]

    def _is_quantised(self, weight: str) -> bool:
        return self._tensor(weight).format not in FLOATS

    def _matrix(self, name: str) -> int:
        if name not in self._matrices:
            self._matrices[name] = self._packed(self._tensor(name))
        return self._matrices[name]

    def _packed(self, tensor: WeightTensor) -> int:
        """A part at a time, so that neither what is converted nor the file's pages are ever those of a whole model."""
        with _told_of(tensor):
            matrix = self._engine.add_matrix(_source_format(tensor), tensor.num_rows, tensor.num_cols)
            for begin, end in tensor.parts(PANEL):
                self._engine.pack_rows(matrix, begin, _bytes(tensor, begin, end))
                tensor.forget(begin, end)
        return matrix

    def _table(self, name: str) -> int:
        tensor = self._tensor(name)
        with _told_of(tensor):
            data = _bytes(tensor, 0, tensor.num_rows)
            if tensor.convert is not None:
                tensor.forget()
            return self._engine.add_table(_source_format(tensor), tensor.num_rows, tensor.num_cols, data)

    def _vector(self, name: str) -> int:
        if name not in self._vectors:
            self._vectors[name] = self._engine.add_vector(self._tensor(name).dequantize().reshape(-1))
        return self._vectors[name]

    def _key_centre(self, op: KvWrite) -> int:
        if op.bias is None:
            return NONE
        bias = self._tensor(op.bias).dequantize().reshape(-1)
        heads = key_centre(op, bias, self._head_dim, self._num_positions).reshape(-1, self._head_dim)
        missing = padded_head_dim(self._head_dim) - self._head_dim
        return self._engine.add_vector(np.pad(heads, ((0, 0), (0, missing))).reshape(-1))

    def _rope(self, op: Rope) -> int:
        key = (op.inv_freq, op.attention_factor)
        if key not in self._ropes:
            self._ropes[key] = self._engine.add_rope(np.array(op.inv_freq, np.float32), op.attention_factor)
            # Angles belong to the step's positions: computed once per step, where they are first used.
            self._row(RowOpKind.ANGLES, weight=self._ropes[key])
        return self._ropes[key]

    def _buffer(self, name: str) -> int:
        if name not in self._buffers:
            self._buffers[name] = self._engine.add_buffer(self._widths[name], self._on_samples)
        return self._buffers[name]

    def _written(self, name: str) -> int:
        """The buffer of a value about to change: its converted forms are stale from here on."""
        self._forget(name)
        return self._buffer(name)

    def _forget(self, name: str) -> None:
        for quantised in (True, False):
            self._converted.pop((name, quantised), None)

    def _activation(self, name: str, quantised: bool) -> int:
        """The converted form of a value, converting it now if need be."""
        if (name, quantised) not in self._converted:
            activation = self._new_activation(name, quantised=quantised)
            kind = RowOpKind.QUANTIZE if quantised else RowOpKind.TO_BF16
            self._row(kind, out=activation, x=self._buffer(name))
            self._converted[name, quantised] = activation
        return self._converted[name, quantised]

    def _new_activation(self, name: str, *, quantised: bool) -> int:
        key = (name, quantised)
        if key not in self._activations:
            self._activations[key] = self._engine.add_activation(self._widths[name], quantised, self._on_samples)
        return self._activations[key]


def _source_format(tensor: WeightTensor) -> SourceFormat:
    """In which the engine is given its rows."""
    return SourceFormat.F32 if tensor.format is WeightFormat.F8_E4M3 else SOURCE_FORMATS[tensor.format]


def _bytes(tensor: WeightTensor, begin: int, end: int) -> NDArray[np.uint8]:
    """Some rows as the engine takes them. uint8 [end - begin, bytes]"""
    if tensor.format is not WeightFormat.F8_E4M3:
        return np.ascontiguousarray(tensor.rows(begin, end)).view(np.uint8)
    values = tensor.dequantize(begin, end)
    if not np.isfinite(values).all():  # what the engine is given as floats it takes as they are
        raise ModelError(f"the matrix {tensor.name!r} has a weight that is no finite number.", remedy="Fetch the model again.")
    return values.view(np.uint8)


@contextmanager
def _told_of(tensor: WeightTensor) -> Iterator[None]:
    """What the engine refuses is of this matrix."""
    try:
        yield
    except ValueError as error:
        raise ModelError(f"the matrix {tensor.name!r}: {error}.", remedy="Fetch the model again.") from error


def _are_independent(op: Linear, run: list[Linear]) -> bool:
    """Whether `op` may run at the same time as a run before it: neither writes what the other reads or writes."""
    written = {other.out for other in run}
    read = {name for other in run for name in _read_by(other)}
    return not written & {op.out, op.x, op.residual} and op.out not in read


def _written_by(op: Op) -> str | None:
    """The buffer that an operation replaces."""
    return None if isinstance(op, KvWrite | Rope) else getattr(op, "out", None)


def _read_by(op: Op) -> set[str | None]:
    """The buffers that an operation reads."""
    match op:
        case Linear():
            return {op.x, op.residual}
        case Embed():
            return set()
        case KvWrite():
            return {op.k, op.v}
        case Attention():
            return {op.q}
        case GatedActivation():
            return {op.gate, op.up}
        case Add():
            return {op.a, op.b}
        case _:
            return {op.x}
