"""Merges adapters into a model's weights (--merge-lora): W + B A, a few rows at a time when a backend reads them.

DoRA then rescales each row to its magnitude. Quantised matrices become Q8_0: rounding to four bits again would lose most of
the adapter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures
from penstock.models.adapter import OUTPUT_SITE, AdapterFactors, expert_sites
from penstock.models.formats import WeightFormat
from penstock.models.load import load_adapter
from penstock.models.packed import GROUP
from penstock.models.program import Experts
from penstock.models.weights import Cut, LoadedModel, Stacked, WeightTensor, convert_rows, stacked
from penstock.types.adapter import MergedAdapter
from penstock.types.errors import ModelError

F32 = NDArray[np.float32]

_MAX_SCALE = float(np.finfo(np.float16).max)
_FORMATS: Mapping[WeightFormat, WeightFormat] = {
    WeightFormat.F32: WeightFormat.F32,
    WeightFormat.F16: WeightFormat.BF16,
    WeightFormat.BF16: WeightFormat.BF16,
    WeightFormat.F8_E4M3: WeightFormat.BF16,
}
"""Format of a matrix -> format once merged. Others become Q8_0, or BF16 unless 32 divides the columns."""


def with_adapters(model: LoadedModel, adapters: Iterable[MergedAdapter]) -> LoadedModel:
    """Return the model with these adapters added to its weights, one after the other. Raises ModelError.

    The model's path stays the same, so keys of caches must add the adapters' fingerprints.
    """
    program = architectures.describe(model.spec)
    found = []
    for adapter in adapters:
        factors = load_adapter(Path(adapter.path), model.spec, program, max_rank=1024, is_merged=True)
        if adapter.weight != 1 and (factors.magnitudes or factors.whole):
            raise ModelError(
                f"{adapter.path} sets rows' magnitudes (DoRA) or has whole matrices, which a weight of {adapter.weight:g} "
                "can't scale.",
                remedy="Merge it with its weight left out.",
            )
        scaled = {site: (a, b * np.float32(adapter.weight)) for site, (a, b) in factors.by_weight.items()}
        found.append(replace(factors, by_weight=scaled))
    return merged(model, *found)


def merged(model: LoadedModel, *adapters: AdapterFactors) -> LoadedModel:
    """Return the model with these adapters' factors added to its weights, in this order.

    If output and embedding are one matrix and an adapter changes either, the output becomes a matrix of its own.
    """
    whole: dict[str, WeightTensor] = {}
    changes: dict[str, list[_Change]] = {}
    for factors in adapters:
        if twice := sorted(factors.whole.keys() & whole.keys()):
            raise ModelError(f"Two adapters replace the whole {twice[0]}.", remedy="Leave one of them out.")
        whole |= factors.whole
        for site, (a, b) in factors.by_weight.items():
            left, right = (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) if site in ("embed", "layer_embed") else (b, a)
            changes.setdefault(site, []).append(_Change(left, right, factors.magnitudes.get(site)))
    weights, spec = {**model.weights, **whole}, model.spec
    if spec.tie_word_embeddings and (changes.keys() | whole.keys()) & {"embed", OUTPUT_SITE}:
        weights.setdefault(OUTPUT_SITE, replace(model.weights["embed"], name=OUTPUT_SITE))
        spec = replace(spec, tie_word_embeddings=False)
    program = architectures.describe(model.spec)
    for name, (num, *_) in expert_sites(program).items():
        of_experts = [changes.pop(f"{name}.{expert}", []) for expert in range(num)]
        if any(of_experts):
            weights[name] = _merged_experts(weights[name], of_experts)
    weights |= {site: _merged(weights[site], found) for site, found in changes.items()}
    for op in program.ops:
        if isinstance(op, Experts) and op.gate is not None and weights[op.gate].format is not weights[op.up].format:
            unchanged = [name for name in (op.gate, op.up) if weights[name] is model.weights[name]]
            if len(unchanged) == 1:  # the native backend multiplies by both at once
                weights[unchanged[0]] = _merged(weights[unchanged[0]], ())
    return replace(model, spec=spec, weights=weights)


@dataclass(frozen=True, slots=True, eq=False)
class _Change:
    left: F32  # [rows, r]
    right: F32  # [r, columns]
    magnitude: F32 | None  # [rows]

    def apply(self, values: F32, rows: slice) -> F32:
        """Return rows of a matrix with their change. `values` has the unchanged rows and is overwritten."""
        values += self.left[rows] @ self.right
        if self.magnitude is not None:
            values *= self.magnitude[rows, None] / np.linalg.norm(values, axis=1, keepdims=True)
        return values


def _merged(base: WeightTensor, changes: Sequence[_Change]) -> WeightTensor:
    fmt = _FORMATS.get(base.format, WeightFormat.Q8_0 if base.num_cols % GROUP == 0 else WeightFormat.BF16)
    return WeightTensor(base.name, base.num_rows, base.num_cols, fmt, MergedRows(base, tuple(changes), fmt))


def in_8_bits(base: WeightTensor) -> WeightTensor:
    """Return a matrix in Q8_0, or as it is if 32 does not divide its columns."""
    if base.num_cols % GROUP:
        return base
    rows = MergedRows(base, (), WeightFormat.Q8_0)
    return WeightTensor(base.name, base.num_rows, base.num_cols, rows.format, rows)


def _merged_experts(base: WeightTensor, changes: Sequence[Sequence[_Change]]) -> WeightTensor:
    """Return a stack of matrices, each with its own changes. Unchanged ones are converted to the same format."""
    num_rows = base.num_rows // len(changes)
    one = [stacked(base.name, [Cut(base, num_rows * expert, num_rows)]) for expert in range(len(changes))]
    return stacked(base.name, [Cut(_merged(*pair), 0, num_rows) for pair in zip(one, changes, strict=True)])


@dataclass(frozen=True, slots=True, eq=False)
class MergedRows:
    base: WeightTensor
    changes: tuple[_Change, ...]
    format: WeightFormat

    @property
    def packed(self) -> NDArray[np.generic]:
        """The base matrix's array in the file, or an empty one if it is stacked from several."""
        stored = self.base.stored
        if isinstance(stored, Stacked):
            return np.empty(0, np.uint8)
        return stored if isinstance(stored, np.ndarray) else stored.packed

    def __getitem__(self, rows: slice | NDArray[np.intp], /) -> NDArray[np.generic]:
        """Return some merged rows, encoded in `format`. Raises ModelError for a number that it can't hold."""
        if not isinstance(rows, slice):
            return np.concatenate([self[int(row) : int(row) + 1] for row in rows])
        begin, end, step = rows.indices(self.base.num_rows)
        values = self.base.dequantize(begin, max(begin, end))[::step]
        with np.errstate(all="ignore"):  # checked below
            for change in self.changes:
                values = change.apply(values, slice(begin, end, step))
        if not np.isfinite(values).all():
            raise ModelError(
                f"{self.base.name} has numbers that are not finite.",
                remedy="Leave out the adapter or draft head that brings them.",
            )
        if self.format is WeightFormat.F32:
            return values
        if self.format is WeightFormat.BF16:
            return _to_bf16(values)
        num_cols = self.base.num_cols
        out = np.empty((len(values), num_cols // GROUP * (2 + GROUP)), np.uint8)
        return convert_rows(lambda part: _to_q8_0(values[part], self.base.name), out, num_cols)


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
