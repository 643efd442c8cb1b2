"""The GGUF parser: agreement with the `gguf` package, and what corrupt bytes do to it."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from penstock.models.gguf_file import open_gguf
from penstock.types.errors import ModelError
from tiny_models import TinyLlama, write_gguf


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TinyLlama(), matrix_type="Q4_1")


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(
    *, metadata: bytes = b"", num_metadata: int = 0, tensors: bytes = b"", num_tensors: int = 0, version: int = 3
) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata) + metadata + tensors


def write(path: Path, data: bytes) -> Path:
    (path / "m.gguf").write_bytes(data)
    return path / "m.gguf"


def test_agrees_with_the_gguf_package(tiny):
    file, reference = open_gguf(tiny), GGUFReader(tiny)
    fields = {key: field.contents() for key, field in reference.fields.items() if not key.startswith("GGUF.")}
    assert file.metadata.keys() == fields.keys()
    for key, value in fields.items():
        assert file.metadata[key] == value, key
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    for tensor in reference.tensors:
        entry = file.tensors[tensor.name]
        assert entry.shape == tuple(reversed(tensor.shape.tolist()))
        assert np.array_equal(file.tensor_bytes(entry), tensor.data.reshape(-1).view(np.uint8))


def test_every_kind_of_metadata_value(tmp_path):
    values = {
        "u8": (struct.pack("<IB", 0, 200), 200),
        "i8": (struct.pack("<Ib", 1, -5), -5),
        "u16": (struct.pack("<IH", 2, 65535), 65535),
        "i16": (struct.pack("<Ih", 3, -2), -2),
        "u32": (struct.pack("<II", 4, 7), 7),
        "i32": (struct.pack("<Ii", 5, -7), -7),
        "f32": (struct.pack("<If", 6, 0.5), 0.5),
        "bool": (struct.pack("<IB", 7, 1), True),
        "text": (struct.pack("<I", 8) + text("ünï"), "ünï"),
        "u64": (struct.pack("<IQ", 10, 1 << 60), 1 << 60),
        "i64": (struct.pack("<Iq", 11, -1), -1),
        "f64": (struct.pack("<Id", 12, 0.25), 0.25),
        "flags": (struct.pack("<IIQ3B", 9, 7, 3, 1, 0, 1), [True, False, True]),
        "words": (struct.pack("<IIQ", 9, 8, 2) + text("a") + text(""), ["a", ""]),
        "nested": (struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ2h", 3, 2, 1, -1), [[1, -1]]),
    }
    data = b"".join(text(key) + encoded for key, (encoded, _) in values.items())
    file = open_gguf(write(tmp_path, gguf(metadata=data, num_metadata=len(values))))
    assert file.metadata == {key: value for key, (_, value) in values.items()}


ENTRY = text("t") + struct.pack("<IQQIQ", 2, 32, 2, 0, 0)

CORRUPT = {
    "empty": (b"", "can't be opened"),
    "magic": (b"GGML" + bytes(20), "no GGUF file"),
    "old version": (gguf(version=1), "version 1 is not supported"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensor count": (gguf(num_tensors=1 << 60), "promises"),
    "metadata count": (gguf(num_metadata=1 << 40), "promises"),
    "key length": (gguf(num_metadata=1, metadata=struct.pack("<Q", 1 << 63) + bytes(20)), "reaches beyond"),
    "key encoding": (gguf(num_metadata=1, metadata=struct.pack("<Q", 2) + b"\xff\xfe" + bytes(20)), "not UTF-8"),
    "value type": (gguf(num_metadata=1, metadata=text("k") + struct.pack("<IQ", 99, 0)), "unknown type 99"),
    "array length": (gguf(num_metadata=1, metadata=text("k") + struct.pack("<IIQ", 9, 8, 1 << 50)), "promises"),
    "array type": (gguf(num_metadata=1, metadata=text("k") + struct.pack("<IIQ", 9, 42, 0)), "unknown type 42"),
    "nesting": (gguf(num_metadata=1, metadata=text("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50), "nested"),
    "twice the same key": (gguf(num_metadata=2, metadata=(text("k") + struct.pack("<II", 4, 7)) * 2), "twice"),
    "alignment": (gguf(num_metadata=1, metadata=text("general.alignment") + struct.pack("<II", 4, 12)), "general.alignment"),
    "dimensions": (gguf(num_tensors=1, tensors=text("t") + struct.pack("<IQQQ", 7, 1, 1, 1)), "7 dimensions"),
    "tensor type": (
        gguf(num_tensors=1, tensors=text("t") + struct.pack("<IQIQ", 1, 32, 999, 0)),
        "type, number 999, that the installed version",
    ),
    "columns": (gguf(num_tensors=1, tensors=text("t") + struct.pack("<IQIQ", 1, 40, 2, 0)), "not a multiple of the 32"),
    "outside": (gguf(num_tensors=1, tensors=ENTRY), "but the file has only"),
    "huge": (
        gguf(num_tensors=1, tensors=text("t") + struct.pack("<IQQIQ", 2, 1 << 63, 1 << 63, 0, 0)),
        "but the file has only",
    ),
    "twice the same tensor": (gguf(num_tensors=2, tensors=ENTRY * 2) + bytes(1024), "twice"),
    "misaligned": (gguf(num_tensors=1, tensors=text("t") + struct.pack("<IQIQ", 1, 1, 0, 3)) + bytes(99), "not aligned"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_corrupt_file_is_refused_with_its_name_and_cause(tmp_path, case):
    data, cause = CORRUPT[case]
    with pytest.raises(ModelError, match=cause) as caught:
        open_gguf(write(tmp_path, data))
    assert "m.gguf" in caught.value.message
    assert caught.value.remedy


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ModelError, match="no such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelError, match="can't be opened"):
        open_gguf(tmp_path)


def test_values_are_checked_when_asked_for(tiny):
    file = open_gguf(tiny)
    assert file.get("absent", int, 5) == 5
    assert file.get("llama.block_count", float) == 2.0
    with pytest.raises(ModelError, match=r"general\.name is of type str, not int"):
        file.get("general.name", int)
    with pytest.raises(ModelError, match=r"no absent"):
        file.require("absent", str)
    with pytest.raises(ModelError, match="array of str, not of int"):
        file.get_list("tokenizer.ggml.tokens", int)
