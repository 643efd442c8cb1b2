"""Weights as files store them: raw rows and their format, converted only when a backend reads them, a few rows at a time."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.models.formats import Floats, WeightFormat, dequantize, held_bytes, held_table_bytes, stored_bytes
from penstock.models.program import Program
from penstock.types.encoder import EncoderInfo
from penstock.types.errors import ModelError
from penstock.types.model_spec import ModelSpec
from penstock.types.sampling import SamplingDefaults
from penstock.types.vocab import GgufVocab, SpecialTokens

_Array = TypeVar("_Array", bound=NDArray[np.generic])
_PART_VALUES = 1 << 23  # values of one of `WeightTensor.parts`: 32 MiB of float32


def row_slices(num_rows: int, num_cols: int) -> Iterator[slice]:
    """Yield slices that cover all rows, each small enough for NumPy's temporaries to fit into the second-level cache."""
    step = max(1, (1 << 17) // max(1, num_cols))
    for begin in range(0, num_rows, step):
        yield slice(begin, min(begin + step, num_rows))


def convert_rows(convert: Callable[[slice], _Array], out: _Array, num_cols: int) -> _Array:
    """Fill `out` slice by slice, in several threads, and return it. `convert` returns the rows of a slice."""
    slices = list(row_slices(len(out), num_cols))

    def fill(rows: slice) -> None:
        out[rows] = convert(rows)

    if len(slices) == 1:
        fill(slices[0])
        return out
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        for _ in threads.map(fill, slices):
            pass
    return out


@dataclass(frozen=True, slots=True, eq=False)
class BlockScales:
    """Scales of an F8_E4M3 matrix. An element's scale is values[row // block_rows, column // block_cols]."""

    values: NDArray[np.float32]
    """Finite. [blocks of rows, blocks of columns]"""
    block_rows: int
    block_cols: int

    def of_rows(self, begin: int, end: int) -> NDArray[np.float32]:
        return self.values[np.arange(begin, end) // self.block_rows]


class Rows(Protocol):
    """Rows of a matrix that are computed from a file's array when they are read."""

    @property
    def packed(self) -> NDArray[np.generic]:
        """The array in the file from which rows are computed."""

    def __getitem__(self, rows: slice | NDArray[np.intp], /) -> NDArray[np.generic]:
        """Return some rows in the format of `WeightTensor.stored`."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightTensor:
    """A weight as files store it: a matrix [num_rows, num_cols]; a vector is [1, n]. A row is one output channel."""

    name: str
    num_rows: int
    num_cols: int
    format: WeightFormat
    stored: NDArray[np.generic] | Rows | Stacked
    """Rows in this format: float32, float16, uint16 (BF16) or uint8 (F8_E4M3) values, or uint8 blocks."""
    scales: BlockScales | None = None  # set if and only if the format is F8_E4M3
    order: NDArray[np.intp] | None = None  # row i is `stored[order[i]]`; None: `stored[i]`
    column_order: NDArray[np.intp] | None = None
    """Column j of `ordered_rows` is column `column_order[j]` of the matrix (act-order of GPTQ)."""

    @property
    def data(self) -> NDArray[np.generic]:
        return self.rows(0, self.num_rows)

    def rows(self, begin: int, end: int) -> NDArray[np.generic]:
        """Return rows [begin, end), as a view if possible. Raises ModelError for a weight with a `column_order`."""
        if self.column_order is not None:
            raise ModelError(
                f"the columns of {self.name} are in another order (act-order), which is not supported here.",
                remedy="Use a checkpoint without act-order (desc_act), or the bf16 original.",
            )
        return self.ordered_rows(begin, end)

    def ordered_rows(self, begin: int, end: int, step: int = 1) -> NDArray[np.generic]:
        """Return every `step`-th row of [begin, end), columns as stored. The caller must apply the `column_order`."""
        if isinstance(self.stored, Stacked):
            return self.stored.rows(begin, end)[::step]
        return self.stored[begin:end:step] if self.order is None else self.stored[self.order[begin:end:step]]

    def parts(self, multiple: int, first: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
        """Divide rows [first, end) into ranges of at most 32 MiB as float32; all but the last are multiples of `multiple`."""
        step = max(1, _PART_VALUES // (self.num_cols * multiple)) * multiple
        stop = self.num_rows if end is None else end
        for begin in range(first, stop, step):
            yield begin, min(begin + step, stop)

    @property
    def num_bytes(self) -> int:
        return stored_bytes(self.format, self.num_rows, self.num_cols)

    def forget(self, begin: int = 0, end: int | None = None) -> None:
        """Let the system drop the mapped file's pages with rows [begin, end) of `stored`, before `order` is applied."""
        if isinstance(self.stored, Stacked):
            self.stored.forget(begin, self.num_rows if end is None else end)
        elif (owner := self._file()) is not None:
            rows = self.stored[begin:end] if isinstance(self.stored, np.ndarray) else self.stored.packed
            if isinstance(self.stored, np.ndarray) and not rows.flags.c_contiguous:
                return  # rows of a transposed matrix are scattered
            first = rows.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
            page = first // mmap.PAGESIZE * mmap.PAGESIZE
            owner.madvise(mmap.MADV_DONTNEED, page, first + rows.nbytes - page)

    @property
    def is_mapped(self) -> bool:
        is_as_stored = self.order is None and isinstance(self.stored, np.ndarray)
        return is_as_stored and self._file() is not None

    def _file(self) -> mmap.mmap | None:
        if isinstance(self.stored, Stacked):
            return None
        owner: object = self.stored if isinstance(self.stored, np.ndarray) else self.stored.packed
        while isinstance(owner, np.ndarray):
            owner = owner.base
        if isinstance(owner, memoryview):
            owner = owner.obj
        return owner if isinstance(owner, mmap.mmap) else None

    def dequantize(self, begin: int = 0, end: int | None = None) -> NDArray[np.float32]:
        """Return rows [begin, end) as float32 [rows, num_cols]."""
        stop = self.num_rows if end is None else end
        data = self.ordered_rows(begin, stop)

        def values(part: slice) -> NDArray[np.float32]:
            found = dequantize(data[part], self.format, self.num_cols)
            if self.scales is not None:
                scales = self.scales.of_rows(begin + part.start, begin + part.stop)
                if scales.shape[1] > 1:
                    scales = np.repeat(scales, self.scales.block_cols, axis=1)[:, : self.num_cols]
                with np.errstate(over="ignore"):  # large scales of a corrupt file
                    found *= scales
            return found

        found = convert_rows(values, np.empty((stop - begin, self.num_cols), np.float32), self.num_cols)
        if self.column_order is None:
            return found
        whole = np.empty_like(found)
        whole[:, self.column_order] = found
        return whole


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Some rows of a matrix: every `step`-th from row `first` on."""

    tensor: WeightTensor
    first: int
    num_rows: int
    step: int = 1

    def rows(self, begin: int, end: int) -> NDArray[np.generic]:
        first = self.first + begin * self.step
        return self.tensor.ordered_rows(first, first + (end - begin - 1) * self.step + 1, self.step)

    def scales(self) -> NDArray[np.float32]:
        """Return the scales of the cut's rows. [num_rows, blocks of columns]"""
        assert self.tensor.scales is not None
        return self.tensor.scales.of_rows(self.first, self.first + (self.num_rows - 1) * self.step + 1)[:: self.step]


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """A matrix made by stacking rows of other matrices."""

    cuts: tuple[Cut, ...]

    def rows(self, begin: int, end: int) -> NDArray[np.generic]:
        found = [cut.rows(first, last) for cut, first, last in self._within(begin, end)]
        return np.concatenate(found) if len(found) > 1 else np.ascontiguousarray(found[0])

    def forget(self, begin: int, end: int) -> None:
        for cut, first, last in self._within(begin, end):
            cut.tensor.forget(cut.first + first * cut.step, cut.first + (last - 1) * cut.step + 1)

    def _within(self, begin: int, end: int) -> Iterator[tuple[Cut, int, int]]:
        at = 0
        for cut in self.cuts:
            first, last = max(begin - at, 0), min(end - at, cut.num_rows)
            if first < last:
                yield cut, first, last
            at += cut.num_rows


def stacked(name: str, cuts: Sequence[Cut]) -> WeightTensor:
    """Return the matrix `name`, made by stacking the rows of all cuts. Raises ModelError if their formats differ."""
    first = cuts[0].tensor
    kinds = {(cut.tensor.format, cut.tensor.num_cols, cut.tensor.scales and cut.tensor.scales.block_cols) for cut in cuts}
    if len(kinds) > 1 or not all(np.array_equal(_columns(cut.tensor), _columns(first)) for cut in cuts):
        raise ModelError(f"the parts of {name} are stored in different ways.", remedy="Use the bf16 original.")
    scales = None
    if first.scales is not None:
        scales = BlockScales(np.concatenate([cut.scales() for cut in cuts]), 1, first.scales.block_cols)
    num_rows = sum(cut.num_rows for cut in cuts)
    whole = Stacked(tuple(cuts))
    return WeightTensor(name, num_rows, first.num_cols, first.format, whole, scales, column_order=first.column_order)


def _columns(tensor: WeightTensor) -> NDArray[np.intp]:
    return np.arange(tensor.num_cols) if tensor.column_order is None else tensor.column_order


def held_weight_bytes(
    name: str, fmt: WeightFormat, shape: tuple[int, int], floats: Floats, scales: BlockScales | None = None
) -> int:
    """Return the bytes that a weight takes in a backend's memory. Per-head matrices of latent attention are held as floats."""
    if name.rpartition(".")[2] in ("key_heads", "value_heads"):
        fmt = WeightFormat.BF16
    if floats is Floats.FP8 and name in ("embed", "output"):  # these are not rounded to fp8
        floats = Floats.AS_STORED
    return held_bytes(fmt, *shape, floats, has_blocks=scales is not None and scales.values.shape[1] > 1)


def weight_of(weights: Mapping[str, WeightTensor], name: str) -> WeightTensor:
    """Return a weight by its name. Raises ModelError if it is missing."""
    if name not in weights:
        raise ModelError(f"the weight {name!r} is missing.", remedy="Fetch the model again, or use another one.")
    return weights[name]


def is_of_experts(name: str) -> bool:
    return name.rpartition(".")[2] in ("expert_gate", "expert_up", "expert_down")


@dataclass(frozen=True, slots=True)
class Generation:
    """The sampling defaults in a model's file, as read, or of its authors."""

    source: str
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    name: str
    spec: ModelSpec
    weights: Mapping[str, WeightTensor]
    """By our name: `embed`, `norm`, `output` (unless tied), `layers.{i}.{q,k,v,o,gate,up,down}` and so on.

    The rows of q and k are half-split: `rope.half_split_rows`.
    """
    tokenizer_source: Path | GgufVocab
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a reply, if files name them by id. `Tokenizer.eos_token_ids` has all."""
    path: Path
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    """`default` is used unless a request names another one."""
    special_tokens: SpecialTokens = field(default_factory=dict)
    generation: Generation | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    """The settings that apply: `models.generation.with_sampling_defaults` sets them."""
    encoder: EncoderInfo | None = None  # None: the model writes text
    program: Program | None = None
    """The operations of a step, if they do not follow from the spec."""

    @property
    def num_weight_bytes(self) -> int:
        """Bytes of all weights in the native backend. An embedding takes none if its rows are read from the file."""
        held = self.held_bytes(Floats.BF16)
        for name in self.spec.looked_up:
            tensor = self.weights[name]
            widened = held_table_bytes(tensor.format, tensor.num_rows, tensor.num_cols)
            held[name] = widened + (0 if tensor.is_mapped else tensor.num_bytes)
        return sum(held.values())

    @property
    def num_expert_bytes(self) -> int:
        return sum(size for name, size in self.held_bytes(Floats.BF16).items() if is_of_experts(name))

    def held_bytes(self, floats: Floats) -> dict[str, int]:
        """Return the bytes that each weight takes in a backend's memory, an embedding as if its rows were not in the file."""
        return {
            name: held_weight_bytes(name, tensor.format, (tensor.num_rows, tensor.num_cols), floats, tensor.scales)
            for name, tensor in self.weights.items()
        }
