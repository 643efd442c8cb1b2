"""Matrices whose rows are changed when a backend reads them, a few at a time: merged with an adapter, scaled or rounded.

Quantised ones become Q8_0: rounding to four bits again would lose most of an adapter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import WeightFormat, stored_bytes
from penstock.models.packed import GROUP
from penstock.models.weights import Stacked, WeightTensor, convert_rows
from penstock.types.errors import ModelError

F32 = NDArray[np.float32]

_MAX_SCALE = float(np.finfo(np.float16).max)
_FORMATS: Mapping[WeightFormat, WeightFormat] = {
    WeightFormat.F32: WeightFormat.F32,
    WeightFormat.F16: WeightFormat.BF16,
    WeightFormat.BF16: WeightFormat.BF16,
    WeightFormat.F8_E4M3: WeightFormat.BF16,
}
"""Format of a matrix -> format once changed. Others become Q8_0, or BF16 unless 32 divides the columns."""
_DTYPES: Mapping[WeightFormat, type[np.generic]] = {WeightFormat.F32: np.float32, WeightFormat.BF16: np.uint16}


class Change(Protocol):
    def apply(self, values: F32, rows: slice) -> F32:
        """Return rows of a matrix with their change. `values` has the unchanged rows and is overwritten."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """Multiplies rows."""

    values: F32  # [rows]

    def apply(self, values: F32, rows: slice) -> F32:
        values *= self.values[rows, None]
        return values


def changed(base: WeightTensor, changes: Sequence[Change]) -> WeightTensor:
    """Return a matrix with these changes, one after the other."""
    fmt = _FORMATS.get(base.format, WeightFormat.Q8_0 if base.num_cols % GROUP == 0 else WeightFormat.BF16)
    return WeightTensor(base.name, base.num_rows, base.num_cols, fmt, ChangedRows(base, tuple(changes), fmt))


def in_8_bits(base: WeightTensor) -> WeightTensor:
    """Return a matrix in Q8_0, or as it is if 32 does not divide its columns."""
    if base.num_cols % GROUP:
        return base
    rows = ChangedRows(base, (), WeightFormat.Q8_0)
    return WeightTensor(base.name, base.num_rows, base.num_cols, rows.format, rows)


@dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    base: WeightTensor
    changes: tuple[Change, ...]
    format: WeightFormat

    @property
    def packed(self) -> NDArray[np.generic]:
        """The base matrix's array in the file, or an empty one if it is stacked from several."""
        stored = self.base.stored
        if isinstance(stored, Stacked):
            return np.empty(0, np.uint8)
        return stored if isinstance(stored, np.ndarray) else stored.packed

    def __getitem__(self, rows: slice | NDArray[np.intp], /) -> NDArray[np.generic]:
        """Return some rows, encoded in `format`. Raises ModelError for a number that it can't hold."""
        if not isinstance(rows, slice):
            return np.concatenate([self[int(row) : int(row) + 1] for row in rows])
        wanted = range(*rows.indices(self.base.num_rows))
        out = np.empty((len(wanted), stored_bytes(self.format, 1, self.base.num_cols)), np.uint8)
        out = out.view(_DTYPES.get(self.format, np.uint8))
        for begin, end in self.base.parts(1, 0, len(wanted)):
            self._encode(wanted[begin:end], out[begin:end])
        return out

    def _encode(self, rows: range, out: NDArray[np.generic]) -> None:
        end = min(rows.stop, self.base.num_rows)
        values = self.base.dequantize(rows.start, end)[:: rows.step]
        with np.errstate(all="ignore"):  # checked below
            for change in self.changes:
                values = change.apply(values, slice(rows.start, end, rows.step))
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.base.name} has numbers that are not finite.",
                remedy="Use another file of the model, or leave out the adapter or draft head that brings them.",
            )
        if self.format is WeightFormat.Q8_0:
            convert_rows(lambda part: _to_q8_0(values[part], self.base.name), out, self.base.num_cols)
        else:
            out[:] = values if self.format is WeightFormat.F32 else _to_bf16(values)


def _to_bf16(values: F32) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint16] = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype(np.uint16)
    return rounded


def _to_q8_0(values: F32, name: str) -> NDArray[np.uint8]:
    groups = values.reshape(len(values), -1, GROUP)
    scales = np.abs(groups).max(axis=-1, keepdims=True) / np.float32(127)
    if scales.size and float(scales.max()) > _MAX_SCALE:
        raise ModelError(
            f"{name} has numbers that Q8_0 can't hold.", remedy="Use the bf16 original, or leave out the adapter or draft head."
        )
    halves = scales.astype(np.float16)
    used = halves.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        integers = np.where(used > 0, np.rint(groups / used), 0).clip(-127, 127).astype(np.int8)
    blocks = np.concatenate([halves.view(np.uint8), integers.view(np.uint8)], axis=-1)
    return blocks.reshape(len(values), -1)
