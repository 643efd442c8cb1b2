"""GGML tensors made into weights of a run-time format. Called by `models.gguf`; reads no metadata.

What has a `WeightFormat` stays as it is, memory-mapped; vectors become F32. Every other quantised type that the `gguf` package
can decode becomes Q8_0, whose error is far below that of 1 to 3 bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from penstock.models.convert import convert_rows
from penstock.models.formats import BLOCKS, Floats, WeightFormat, held_bytes, stored_bytes
from penstock.models.gguf_file import (
    GGML_BF16,
    GGML_F16,
    GGML_F32,
    GGML_IQ4_NL,
    GGML_IQ4_XS,
    GGML_Q2_K,
    GGML_Q3_K,
    GGML_Q4_0,
    GGML_Q4_1,
    GGML_Q4_K,
    GGML_Q5_0,
    GGML_Q5_1,
    GGML_Q5_K,
    GGML_Q6_K,
    GGML_Q8_0,
    GgufFile,
    TensorEntry,
)
from penstock.models.weights import WeightTensor
from penstock.types.counted import counted
from penstock.types.errors import ModelError

_MATRIX_FORMATS: Mapping[int, WeightFormat] = {
    GGML_F32: WeightFormat.F32,
    GGML_F16: WeightFormat.F16,
    GGML_BF16: WeightFormat.BF16,
    GGML_Q4_0: WeightFormat.Q4_0,
    GGML_Q4_1: WeightFormat.Q4_1,
    GGML_Q5_0: WeightFormat.Q5_0,
    GGML_Q5_1: WeightFormat.Q5_1,
    GGML_Q8_0: WeightFormat.Q8_0,
    GGML_Q2_K: WeightFormat.Q2_K,
    GGML_Q3_K: WeightFormat.Q3_K,
    GGML_Q4_K: WeightFormat.Q4_K,
    GGML_Q5_K: WeightFormat.Q5_K,
    GGML_Q6_K: WeightFormat.Q6_K,
    GGML_IQ4_NL: WeightFormat.IQ4_NL,
    GGML_IQ4_XS: WeightFormat.IQ4_XS,
}
_FLOATS: Mapping[int, type[np.generic]] = {GGML_F32: np.float32, GGML_F16: np.float16, GGML_BF16: np.uint16}


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """(num_rows, num_cols); a vector is one row. Leading dimensions of 1 are dropped, others count as rows."""
    rows = 1
    for size in entry.shape[:-1]:
        rows *= size
    return rows, entry.shape[-1]


def loaded_bytes(entry: TensorEntry, floats: Floats = Floats.BF16) -> int:
    """Bytes of the weight that `load_tensor` makes of it, as the native backend holds it, but for its `floats`."""
    return held_bytes(_format(entry), *matrix_shape(entry), floats)


def looked_up_bytes(entry: TensorEntry) -> int:
    """The same of a matrix of which only rows are read: 0 if they are read in the file."""
    return stored_bytes(_format(entry), *matrix_shape(entry)) if _is_converted(entry) else 0


def load_tensor(file: GgufFile, entry: TensorEntry, name: str, rope_heads: int = 0) -> WeightTensor:
    """The weight called `name`. With `rope_heads` its rows leave the interleaved rope layout of llama-type GGUF files.

    Raises ModelError for a type that can't be decoded.
    """
    num_rows, num_cols = matrix_shape(entry)
    raw = file.tensor_bytes(entry)
    if entry.type_id in _FLOATS:
        data = raw.view(_FLOATS[entry.type_id]).reshape(num_rows, num_cols)
    else:
        data = raw.reshape(num_rows, -1)
    fmt = _format(entry)
    if rope_heads:
        data = _unpermute(data, rope_heads) if num_rows > 1 else _unpermute(data.reshape(-1, 1), rope_heads).reshape(1, -1)
    return WeightTensor(name, num_rows, num_cols, fmt, _convert(data, entry, fmt, file))


def conversion_notes(entries: Iterable[TensorEntry]) -> tuple[str, ...]:
    """What `load_tensor` changes in these, in words."""
    changed = Counter(entry.type_id for entry in entries if len(entry.shape) > 1 and _is_converted(entry))
    return tuple(_note(type_id, num) for type_id, num in sorted(changed.items()))


def _note(type_id: int, num: int) -> str:
    matrices = counted(num, f"{_type_name(type_id)} matrix is", f"{_type_name(type_id)} matrices are")
    return f"{matrices} converted to Q8_0 (8.5 bits per weight)"


def _is_converted(entry: TensorEntry) -> bool:
    return entry.type_id not in _MATRIX_FORMATS


def _format(entry: TensorEntry) -> WeightFormat:
    if len(entry.shape) == 1:
        return WeightFormat.F32
    return _MATRIX_FORMATS.get(entry.type_id, WeightFormat.Q8_0)


def _unpermute(data: NDArray[np.generic], num_heads: int) -> NDArray[np.generic]:
    """Row 2 i + half of each head goes to half * head_dim / 2 + i: the reverse of what llama.cpp's converter does."""
    num_rows, width = data.shape
    paired = data.reshape(num_heads, num_rows // num_heads // 2, 2, width)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(num_rows, width)


def _convert(data: NDArray[np.generic], entry: TensorEntry, fmt: WeightFormat, file: GgufFile) -> NDArray[np.generic]:
    if fmt is WeightFormat.F32:
        return _to_f32(data, entry, file)
    if entry.type_id in _MATRIX_FORMATS:
        return data
    return _to_q8_0(data, entry, file)


def _to_f32(data: NDArray[np.generic], entry: TensorEntry, file: GgufFile) -> NDArray[np.generic]:
    if entry.type_id == GGML_BF16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    if entry.type_id in _FLOATS:
        return np.ascontiguousarray(data, dtype=np.float32)
    return _decode(data, entry, file)


def _to_q8_0(data: NDArray[np.generic], entry: TensorEntry, file: GgufFile) -> NDArray[np.generic]:
    from gguf.constants import GGMLQuantizationType  # not at the top: 0.1 s that most files don't need
    from gguf.quants import quantize

    num_rows, num_cols = matrix_shape(entry)
    cols, num_bytes = BLOCKS[WeightFormat.Q8_0]

    def convert(rows: slice) -> NDArray[np.uint8]:
        with np.errstate(all="ignore"):  # as in _decode
            converted: NDArray[np.uint8] = quantize(_decode(data[rows], entry, file), GGMLQuantizationType.Q8_0)
        return converted

    return convert_rows(convert, num_rows, num_cols, num_cols // cols * num_bytes)


def _decode(raw: NDArray[np.generic], entry: TensorEntry, file: GgufFile) -> NDArray[np.float32]:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        with np.errstate(all="ignore"):  # infinite scales of a corrupt file
            values: NDArray[np.float32] = dequantize(np.ascontiguousarray(raw), GGMLQuantizationType(entry.type_id))
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: the tensor {entry.name!r} is of the type {_type_name(entry.type_id)}, which can't be decoded.",
            remedy="Use a file in BF16, Q8_0, Q6_K, Q5_K, Q4_K or Q4_0.",
        ) from error
    return values


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    return str(GGMLQuantizationType(type_id).name)
