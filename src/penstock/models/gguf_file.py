"""The GGUF container: memory-mapped metadata and tensors. Versions 2 and 3, little-endian.

Every count and length is checked against the bytes that are left before anything is read or allocated.
Specification: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from penstock.models.catalog import split_files
from penstock.models.checks import map_file
from penstock.models.formats import GGML_TYPES, WeightFormat, block
from penstock.types.errors import ModelError, damaged

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS: Mapping[int, struct.Struct] = {
    code: struct.Struct(f"<{letter}")
    for code, letter in {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}.items()
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

_MAX_ITEMS = 1 << 22
"""Most items of all metadata arrays of a file together. A large vocabulary has about one million."""

T = TypeVar("T")


_UNSUPPORTED = "Use another file of this model, or convert it again with llama.cpp's current tools."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """The name, format, shape and place of a tensor in the file. The last axis of `shape` is contiguous."""

    name: str
    format: WeightFormat
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int
    part: int = 0  # number of its file in a split model
    scale: TensorEntry | None = None  # a tensor with a factor for the whole matrix, or one for each expert's


def matrix_shape(entry: TensorEntry) -> tuple[int, int]:
    """Return a tensor's (num_rows, num_cols) as a matrix. A vector is one row; all axes but the last count as rows."""
    return math.prod(entry.shape[:-1]), entry.shape[-1]


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """An open GGUF model: the metadata of its first file, and the tensors of all files.

    Files stay mapped into memory while an array made from them exists.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    _parts: tuple[NDArray[np.uint8], ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def tensor_bytes(self, entry: TensorEntry) -> NDArray[np.uint8]:
        """Return the tensor's bytes, not copied."""
        return self._parts[entry.part][entry.offset : entry.offset + entry.num_bytes]

    @property
    def architecture(self) -> str:
        """`general.architecture`, which begins the keys of the model's own settings."""
        return self.require("general.architecture", str)

    def get(self, key: str, kind: type[T], default: T | None = None) -> T | None:
        """Return a metadata value or `default`. Raises ModelError if it has another type."""
        value = self.metadata.get(key)
        if value is None:
            return default
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise self.error(f"{key} is of type {type(value).__name__}, not {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        """Return a metadata value. Raises ModelError if it is missing or has another type."""
        value = self.get(key, kind)
        if value is None:
            raise self.error(f"the metadata has no {key}")
        return value

    def get_list(self, key: str, kind: type[T]) -> list[T]:
        """Return a metadata array, empty if missing. Raises ModelError."""
        values = self.get(key, list) or []
        if values and type(values[0]) is not kind:
            raise self.error(f"{key} is an array of {type(values[0]).__name__}, not of {kind.__name__}")
        return values

    def numbers_by_layer(self, key: str, num_layers: int) -> list[int]:
        """Return a key's number for each layer. The file has one for all, or a list. Raises ModelError."""
        if not isinstance(self.metadata.get(key), list):
            return [self.require(key, int)] * num_layers
        numbers = self.get_list(key, int)
        if len(numbers) != num_layers:
            raise self.error(f"{key} has {len(numbers)} values for {num_layers} layers")
        return numbers

    def error(self, cause: str) -> ModelError:
        return damaged(self.path, cause)


def open_gguf(path: Path) -> GgufFile:
    """Map a GGUF file into memory, or all files of a split model by the first one. Raises ModelError."""
    first = _open_part(path)
    count, number = first.get("split.count", int) or 1, first.get("split.no", int) or 0
    if count == 1:
        return first
    files = split_files(path)
    if number != 0 or len(files) != count:
        raise ModelError(
            f"{path}: this is part {number + 1} of a model that is split into {count}.",
            remedy=f"Name the first part, whose name ends in -00001-of-{count:05}.gguf, with the others beside it; "
            "or merge them with `llama-gguf-split --merge`.",
        )
    return _joined([first, *(_open_part(file) for file in files[1:])])


def _joined(parts: list[GgufFile]) -> GgufFile:
    tensors: dict[str, TensorEntry] = {}
    for number, part in enumerate(parts):
        if (part.get("split.no", int), part.get("split.count", int)) != (number, len(parts)):
            raise part.error(f"this is not part {number + 1} of {len(parts)}, as its name says")
        for name, entry in part.tensors.items():
            if name in tensors:
                raise part.error(f"the tensor {name!r} is in part {tensors[name].part + 1} as well")
            tensors[name] = replace(entry, part=number)
    first = parts[0]
    if first.get("split.tensors.count", int, len(tensors)) != len(tensors):
        raise first.error(f"the parts have {len(tensors)} tensors, not {first.metadata['split.tensors.count']}")
    return GgufFile(first.path, first.metadata, tensors, tuple(part._parts[0] for part in parts))


def _open_part(path: Path) -> GgufFile:
    data = map_file(path)
    parsed = parse_gguf(path, data)
    data.madvise(mmap.MADV_DONTNEED)  # the pages of the header are not read again
    return parsed


def parse_gguf(path: Path, data: mmap.mmap | bytes) -> GgufFile:
    """Parse a GGUF file's content: mapped, or read because the file may change or vanish. Raises ModelError."""
    if data[:4] != b"GGUF":
        raise damaged(path, "this is not a GGUF file (its first bytes are not 'GGUF')")
    cursor = _Cursor(path, data, 4)
    version = cursor.u32()
    if version & 0xFFFF == 0:
        raise ModelError(f"{path}: this GGUF file is big-endian, which is not supported.", remedy=_UNSUPPORTED)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are).", remedy=_UNSUPPORTED)
    num_tensors = cursor.count("tensors", 1 << 18, min_bytes=24)
    num_metadata = cursor.count("metadata entries", 1 << 16, min_bytes=13)
    metadata: dict[str, Any] = {}
    for _ in range(num_metadata):
        key = cursor.string()
        if key in metadata:
            raise damaged(path, f"the metadata key {key!r} appears twice")
        metadata[key] = cursor.value(cursor.u32())
    entries = [_read_entry(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise damaged(path, f"general.alignment is {alignment!r}, not a power of two from 8")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, TensorEntry] = {}
    for entry in entries:
        if entry.name in tensors:
            raise damaged(path, f"the tensor {entry.name!r} appears twice")
        if entry.offset % alignment:
            raise damaged(path, f"the tensor {entry.name!r} is not aligned to {alignment} bytes")
        end = start + entry.offset + entry.num_bytes
        if end > len(data):
            raise damaged(path, f"the tensor {entry.name!r} ends at byte {end}, but the file has only {len(data)}")
        tensors[entry.name] = replace(entry, offset=start + entry.offset)
    return GgufFile(path, metadata, tensors, (np.frombuffer(data, dtype=np.uint8),))


def _read_entry(path: Path, cursor: _Cursor) -> TensorEntry:
    name = cursor.string()
    num_dims = cursor.u32()
    if not 1 <= num_dims <= 4:
        raise damaged(path, f"the tensor {name!r} has {num_dims} dimensions")
    shape = tuple(reversed([cursor.u64() for _ in range(num_dims)]))
    fmt = GGML_TYPES.get(type_id := cursor.u32())
    if fmt is None:
        cause = f"the tensor {name!r} is of type number {type_id}, which is not a known type of weights"
        raise ModelError(f"{path}: {cause}.", remedy=_UNSUPPORTED)
    block_cols, block_bytes = block(fmt)
    if shape[-1] % block_cols:
        raise damaged(path, f"the tensor {name!r} has {shape[-1]} columns, not a multiple of the {block_cols} of its type")
    return TensorEntry(name, fmt, shape, cursor.u64(), math.prod(shape) // block_cols * block_bytes)


class _Cursor:
    """Reads values in order, never past the end of the data."""

    def __init__(self, path: Path, data: mmap.mmap | bytes, position: int) -> None:
        self._path = path
        self._data = data
        self._end = len(data)
        self._items_left = _MAX_ITEMS
        self.position = position

    def u32(self) -> int:
        return int(self._scalar(_U32))

    def u64(self) -> int:
        return int(self._scalar(_U64))

    def count(self, what: str, limit: int, *, min_bytes: int) -> int:
        count = self.u64()
        if count > limit or count * min_bytes > self._end - self.position:
            raise damaged(self._path, f"the header promises {count} {what}, more than this file can have")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, num: int) -> list[str]:
        """Read `num` strings. Opening a file spends most of its time here, so the loop calls no function of ours."""
        data, end, position = self._data, self._end, self.position
        unpack = _U64.unpack_from
        out: list[str] = []
        try:
            for _ in range(num):
                begin = position + 8
                position = begin + unpack(data, position)[0]
                if position > end:
                    raise damaged(self._path, f"a string at byte {begin} reaches beyond the end of the file")
                out.append(data[begin:position].decode())
        except struct.error as error:
            raise damaged(self._path, "the file ends in the middle of its header") from error
        except UnicodeDecodeError as error:
            raise damaged(self._path, f"the string at byte {begin} is not UTF-8") from error
        self.position = position
        return out

    def value(self, type_id: int, nesting: int = 0) -> Any:
        if type_id == _STRING:
            return self.string()
        if type_id == _ARRAY:
            return self._array(nesting)
        if type_id == _BOOL:
            return bool(self._scalar(_SCALARS[0]))
        if type_id not in _SCALARS:
            raise damaged(self._path, f"a metadata value is of the unknown type {type_id}")
        return self._scalar(_SCALARS[type_id])

    def _array(self, nesting: int) -> list[Any]:
        if nesting >= 2:
            raise damaged(self._path, "metadata arrays are nested too deeply")
        item_type = self.u32()
        if item_type == _STRING:
            return self.strings(self._items("strings", min_bytes=8))
        if item_type == _ARRAY:
            return [self._array(nesting + 1) for _ in range(self._items("arrays", min_bytes=12))]
        if item_type != _BOOL and item_type not in _SCALARS:
            raise damaged(self._path, f"a metadata array is of the unknown type {item_type}")
        packer = _SCALARS[0 if item_type == _BOOL else item_type]
        num = self._items("numbers", min_bytes=packer.size)
        values = struct.unpack_from(f"<{num}{packer.format[-1]}", self._data, self.position)
        self.position += num * packer.size
        return [bool(value) for value in values] if item_type == _BOOL else list(values)

    def _items(self, what: str, *, min_bytes: int) -> int:
        num = self.count(what, self._items_left, min_bytes=min_bytes)
        self._items_left -= num
        return num

    def _scalar(self, packer: struct.Struct) -> Any:
        if self.position + packer.size > self._end:
            raise damaged(self._path, "the file ends in the middle of its header")
        value = packer.unpack_from(self._data, self.position)[0]
        self.position += packer.size
        return value
