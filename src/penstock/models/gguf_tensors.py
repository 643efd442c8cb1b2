"""GGML tensors made into weights of a run-time format. Called by `models.gguf`; reads no metadata.

A tensor that has a `WeightFormat` stays as it is, memory-mapped; vectors become F32. Every other quantised type that can be
decoded, by `codebooks` or the `gguf` package, becomes Q8_0 when a backend reads it: its error is far below that of 1 to 3 bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.models import codebooks
from penstock.models.formats import BLOCKS, Floats, WeightFormat, dequantize, held_bytes, stored_bytes
from penstock.models.gguf_file import FORMATS, GgufFile, TensorEntry
from penstock.models.weights import WeightTensor
from penstock.types.errors import ModelError, counted

_Decode = Callable[[NDArray[np.generic]], NDArray[np.float32]]
_FLOATS: Mapping[WeightFormat | None, type[np.generic]] = {
    WeightFormat.F32: np.float32,
    WeightFormat.F16: np.float16,
    WeightFormat.BF16: np.uint16,
}


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """(num_rows, num_cols); a vector is one row. Leading dimensions of 1 are dropped, others count as rows."""
    return math.prod(entry.shape[:-1]), entry.shape[-1]


def loaded_bytes(entry: TensorEntry, floats: Floats = Floats.BF16) -> int:
    """Bytes of the weight that `load_tensor` makes of it, as the native backend holds it, but for its `floats`."""
    return held_bytes(_format(entry), *matrix_shape(entry), floats)


def looked_up_bytes(entry: TensorEntry) -> int:
    """The same of a matrix of which only rows are read: 0 if they are read in the file."""
    return stored_bytes(_format(entry), *matrix_shape(entry)) if _is_converted(entry) else 0


def load_tensor(file: GgufFile, entry: TensorEntry, name: str, rope_heads: int = 0) -> WeightTensor:
    """The weight called `name`. With `rope_heads` its rows leave the interleaved rope layout of llama-type GGUF files.

    A matrix is converted when it is read. Raises ModelError for a type that can't be decoded.
    """
    num_rows, num_cols = matrix_shape(entry)
    raw = file.tensor_bytes(entry)
    kept = FORMATS.get(entry.type_id)
    stored = raw.view(_FLOATS.get(kept, np.uint8)).reshape(num_rows, -1)
    fmt, decode = _format(entry), _decoder(file, entry)
    if len(entry.shape) == 1:
        values = decode(stored) if kept is None else dequantize(stored, kept, num_cols)
        order = None if not rope_heads else _half_split(num_cols, rope_heads)
        return WeightTensor(name, num_rows, num_cols, fmt, values if order is None else values[:, order])
    convert = None
    if _is_converted(entry):
        decode(stored[:1])  # or refuse it: before other matrices are taken over

        def convert(rows: NDArray[np.generic]) -> NDArray[np.uint8]:
            return round_to_q8_0(decode(rows))

    order = _half_split(num_rows, rope_heads) if rope_heads else None
    return WeightTensor(name, num_rows, num_cols, fmt, stored, order=order, convert=convert)


def conversion_notes(entries: Iterable[TensorEntry]) -> tuple[str, ...]:
    """Says in words which of these tensors `load_tensor` changes."""
    changed = Counter(entry.type_id for entry in entries if len(entry.shape) > 1 and _is_converted(entry))
    return tuple(_note(type_id, num) for type_id, num in sorted(changed.items()))


def _note(type_id: int, num: int) -> str:
    matrices = counted(num, f"{_type_name(type_id)} matrix is", f"{_type_name(type_id)} matrices are")
    return f"{matrices} converted to Q8_0 (8.5 bits per weight)"


def _is_converted(entry: TensorEntry) -> bool:
    return entry.type_id not in FORMATS


def _format(entry: TensorEntry) -> WeightFormat:
    if len(entry.shape) == 1:
        return WeightFormat.F32
    return FORMATS.get(entry.type_id, WeightFormat.Q8_0)


def _half_split(num_rows: int, num_heads: int) -> NDArray[np.intp]:
    """Where the file has each row: of a head, half * head_dim / 2 + i at 2 i + half, as llama.cpp's converter put it."""
    return np.arange(num_rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)


def _decoder(file: GgufFile, entry: TensorEntry) -> _Decode:
    """The function that decodes rows of a quantised type. It raises ModelError for a type that can't be decoded."""

    def decode(rows: NDArray[np.generic]) -> NDArray[np.float32]:
        from gguf import quants  # not at the top: 0.1 s that most files don't need
        from gguf.constants import GGMLQuantizationType

        raw = np.ascontiguousarray(rows, dtype=np.uint8)
        try:
            with np.errstate(all="ignore"):  # infinite scales of a corrupt file
                if _type_name(entry.type_id) in codebooks.TYPES:
                    return codebooks.decode(_type_name(entry.type_id), raw)
                values: NDArray[np.float32] = quants.dequantize(raw, GGMLQuantizationType(entry.type_id))
        except NotImplementedError as error:
            raise ModelError(
                f"{file.path}: the tensor {entry.name!r} is of the type {_type_name(entry.type_id)}, which can't be decoded.",
                remedy="Use a file in BF16, Q8_0, Q6_K, Q5_K, Q4_K or Q4_0.",
            ) from error
        return values

    return decode


def round_to_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Rows as GGML quantises them, to the bit: halves are rounded away from zero. [num_rows, bytes]"""
    cols, num_bytes = BLOCKS[WeightFormat.Q8_0]
    groups = np.ascontiguousarray(values).reshape(-1, cols)
    with np.errstate(all="ignore"):  # as in `_decoder`
        sizes = groups.view(np.int32) & 0x7FFFFFFF  # as integers they have the same order, and their largest is found sooner
        scales = sizes.max(axis=1, keepdims=True).view(np.float32) / np.float32(127)
        twice_inverse = np.divide(np.float32(2), scales, out=np.zeros_like(scales), where=scales != 0)
        halves = (groups * twice_inverse).astype(np.int16)  # towards zero: of 2.5 five, of -2.5 minus five
        halves += halves >= 0
        halves >>= 1
        blocks = np.empty((len(groups), num_bytes), np.uint8)
        blocks[:, :2] = scales.astype(np.float16).view(np.uint8)
    blocks[:, 2:] = halves.astype(np.int8).view(np.uint8)
    return blocks.reshape(len(values), -1)


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(type_id).name)
