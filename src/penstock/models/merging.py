"""Merges an adapter into a model's weights (--merge-lora): W + B A, a few rows at a time when a backend reads them.

Quantised matrices become Q8_0: rounding to four bits again would lose most of the adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.models import architectures
from penstock.models.adapter import OUTPUT_SITE, AdapterFactors
from penstock.models.formats import WeightFormat
from penstock.models.load import load_adapter
from penstock.models.packed import GROUP
from penstock.models.peft import read_peft
from penstock.models.weights import LoadedModel, Stacked, WeightTensor, convert_rows
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


def with_adapter(model: LoadedModel, path: Path) -> LoadedModel:
    """Return the model with the adapter at `path` added to its weights. Raises ModelError.

    The model's path stays the same, so keys of caches must add the adapter's fingerprint.
    """
    program = architectures.describe(model.spec)
    if path.suffix == ".gguf":
        return merged(model, load_adapter(path, model.spec, program, max_rank=1024))
    whole: dict[str, WeightTensor] = {}
    return merged(model, read_peft(path, model.spec, program, max_rank=1024, whole=whole), whole)


def merged(
    model: LoadedModel, factors: AdapterFactors, whole: Mapping[str, WeightTensor] = MappingProxyType({})
) -> LoadedModel:
    """Return the model with these factors added to its weights. `whole` has matrices that replace the model's.

    If output and embedding are one matrix and the adapter changes either, the output becomes a matrix of its own.
    """
    weights, spec = dict(model.weights), model.spec
    if spec.tie_word_embeddings and (factors.by_weight.keys() | whole.keys()) & {"embed", OUTPUT_SITE}:
        weights[OUTPUT_SITE] = replace(weights["embed"], name=OUTPUT_SITE)
        spec = replace(spec, tie_word_embeddings=False)
    weights |= whole
    for site, (a, b) in factors.by_weight.items():
        left, right = (np.ascontiguousarray(a.T), np.ascontiguousarray(b.T)) if site in ("embed", "layer_embed") else (b, a)
        weights[site] = _merged(weights[site], left, right)
    return replace(model, spec=spec, weights=weights)


def _merged(base: WeightTensor, left: F32, right: F32) -> WeightTensor:
    fmt = _FORMATS.get(base.format, WeightFormat.Q8_0 if base.num_cols % GROUP == 0 else WeightFormat.BF16)
    return WeightTensor(base.name, base.num_rows, base.num_cols, fmt, MergedRows(base, left, right, fmt))


@dataclass(frozen=True, slots=True, eq=False)
class MergedRows:
    base: WeightTensor
    left: F32
    right: F32
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
        values += self.left[begin:end:step] @ self.right
        if not np.isfinite(values).all():
            raise ModelError(f"{self.base.name} has numbers that are not finite.", remedy="Use the model without this adapter.")
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
        raise ModelError(f"{name} has numbers that Q8_0 can't hold.", remedy="Merge the adapter into the bf16 original.")
    halves = scales.astype(np.float16)
    used = halves.astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        integers = np.where(used > 0, np.rint(groups / used), 0).clip(-127, 127).astype(np.int8)
    blocks = np.concatenate([halves.view(np.uint8), integers.view(np.uint8)], axis=-1)
    return blocks.reshape(len(values), -1)
