"""The safetensors container: the tensors of a file by name, memory-mapped or read.

An adapter's file is read: if a mapped file is truncated while a server runs, the process dies. The `safetensors` package has no
bf16 for NumPy, and copies. Specification: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from penstock.models.checks import json_object, map_file
from penstock.types.errors import ModelError, damaged

MAX_HEADER_BYTES = 100_000_000  # as in the reference implementation
FLOAT8 = "F8_E4M3"
FLOATS: Mapping[str, type[np.generic]] = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, FLOAT8: np.uint8}
"""Types of weights, and the NumPy type of their bits."""
_INTEGERS: Mapping[str, type[np.generic]] = {"I8": np.int8, "U8": np.uint8, "I32": np.int32, "I64": np.int64}
_DTYPES: Mapping[str, type[np.generic]] = {**FLOATS, **_INTEGERS}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The type, shape and place of a tensor, in bytes from the start of its file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a safetensors file, mapped or read into memory."""

    path: Path
    dtype: str  # safetensors' name, such as `BF16`
    shape: tuple[int, ...]
    _raw: NDArray[np.uint8]

    @property
    def num_bytes(self) -> int:
        return self._raw.nbytes

    def array(self) -> NDArray[np.generic]:
        """Return a float tensor's values (bf16, e4m3: bits), copied only if not aligned. Raises ModelError for other types."""
        if self.dtype not in FLOATS:
            raise ModelError(
                f"{self.path}: tensors of type {self.dtype} are not supported.",
                remedy="Use a checkpoint in bfloat16, float16, float32 or fp8 (e4m3).",
            )
        return self._view(FLOATS[self.dtype])

    def integers(self, *dtypes: str) -> NDArray[np.generic]:
        """Return an integer tensor's values. Raises ModelError unless it has one of these types."""
        if self.dtype not in dtypes:
            raise ModelError(
                f"{self.path}: a tensor of packed integers is of type {self.dtype}, not {' or '.join(dtypes)}.",
                remedy="This variant is not supported: use the bf16 original.",
            )
        return self._view(_INTEGERS[self.dtype])

    def _view(self, dtype: type[np.generic]) -> NDArray[np.generic]:
        is_aligned = self._raw.ctypes.data % np.dtype(dtype).itemsize == 0
        return (self._raw if is_aligned else self._raw.copy()).view(dtype).reshape(self.shape)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Map a file and return its tensors by name. Raises ModelError."""
    data = map_file(path)
    header_bytes = _header_bytes(data[:8], len(data), path, MAX_HEADER_BYTES, "Fetch it again.")
    entries = _entries(data[8 : 8 + header_bytes], len(data), path)
    body = np.frombuffer(data, dtype=np.uint8)
    return {name: StoredTensor(path, one.dtype, one.shape, body[one.begin : one.end]) for name, one in entries.items()}


def read_entries(file: BinaryIO, path: Path, *, max_header_bytes: int, remedy: str) -> dict[str, TensorEntry]:
    """Read the header of an open file and return its tensors by name. Raises ModelError, with `remedy` for a longer header."""
    num_bytes = os.fstat(file.fileno()).st_size
    header_bytes = _header_bytes(file.read(8), num_bytes, path, max_header_bytes, remedy)
    return _entries(file.read(header_bytes), num_bytes, path)


def read_tensor(file: BinaryIO, entry: TensorEntry, path: Path) -> StoredTensor:
    """Read a tensor of an open file. Raises ModelError if the file has become shorter."""
    file.seek(entry.begin)
    raw = np.frombuffer(file.read(entry.end - entry.begin), dtype=np.uint8)
    if raw.nbytes != entry.end - entry.begin:
        raise damaged(path, "it ends in the middle of a tensor")
    return StoredTensor(path, entry.dtype, entry.shape, raw)


def _header_bytes(first: bytes, num_bytes: int, path: Path, max_bytes: int, remedy: str) -> int:
    header_bytes = int.from_bytes(first, "little")
    if len(first) < 8 or header_bytes > num_bytes - 8:
        raise damaged(path, "its header is longer than the file")
    if header_bytes > max_bytes:
        cause = f"its header has {header_bytes} bytes, more than the {max_bytes} that are accepted"
        raise ModelError(f"{path}: {cause}.", remedy=remedy)
    return header_bytes


def _entries(text: bytes, num_bytes: int, path: Path) -> dict[str, TensorEntry]:
    try:
        header = json_object(text)
    except ValueError as error:
        raise damaged(path, f"its header can't be read as a JSON object: {error}") from error
    start = 8 + len(text)
    entries = {name: _entry(name, item, start, num_bytes, path) for name, item in header.items() if name != "__metadata__"}
    _check_cover(sorted((entry.begin - start, entry.end - start) for entry in entries.values()), num_bytes - start, path)
    return entries


def _check_cover(ranges: Iterable[tuple[int, int]], num_bytes: int, path: Path) -> None:
    """Raise ModelError unless tensors follow each other without gaps, as the format requires."""
    at = 0
    for begin, end in ranges:
        if begin != at:
            raise damaged(path, f"a tensor begins at byte {begin}, and the one before it ends at {at}")
        at = end
    if at != num_bytes:
        raise damaged(path, f"the last tensor ends at byte {at} of {num_bytes}")


def _entry(name: str, item: Any, start: int, num_bytes: int, path: Path) -> TensorEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise damaged(path, f"its entry of {name!r} is malformed") from error
    numbers = (*shape, begin, end)
    if type(dtype) is not str or not all(type(number) is int and number >= 0 for number in numbers):
        raise damaged(path, f"its entry of {name!r} is malformed")
    if len(shape) > 8 or math.prod(max(1, size) for size in shape) > 1 << 48:
        raise damaged(path, f"the tensor {name!r} has the shape {shape}")
    if not begin <= end <= num_bytes - start:
        raise damaged(path, f"the tensor {name!r} ends at byte {end} of {num_bytes - start}")
    if dtype in _DTYPES and math.prod(shape) * np.dtype(_DTYPES[dtype]).itemsize != end - begin:
        raise damaged(path, f"the tensor {name!r} has {end - begin} bytes, which does not fit its shape {shape}")
    return TensorEntry(dtype, shape, start + begin, start + end)
