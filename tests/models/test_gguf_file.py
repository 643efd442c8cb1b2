"""The GGUF parser: agreement with the `gguf` package, and what corrupt bytes do to it."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from penstock.models.catalog import split_files
from penstock.models.gguf import load_gguf
from penstock.models.gguf_file import open_gguf
from penstock.models.load import fingerprint
from penstock.types.errors import ModelError
from support.tiny_models import TinyLlama, write_gguf


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
    "magic": (b"GGML" + bytes(20), "not a GGUF file"),
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
        "type number 999, which is not a known",
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


def split(whole: Path, num_parts: int, **changes: int) -> list[Path]:
    """The parts of a model as `llama-gguf-split` writes them. `changes`: other metadata of the second, such as split_no."""
    reader = GGUFReader(whole)
    parts = [whole.with_name(f"{whole.stem}-{number:05}-of-{num_parts:05}.gguf") for number in range(1, num_parts + 1)]
    for number, path in enumerate(parts):
        writer = GGUFWriter(path, "llama")
        if number:
            writer.kv_data[0].clear()
        for key, field in reader.fields.items() if number == 0 else ():
            if not key.startswith("GGUF.") and key != "general.architecture":
                writer.add_key_value(key, field.contents(), field.types[0], field.types[-1])
        said = {"split_no": number, "split_count": num_parts} | (changes if number == 1 else {})
        writer.add_uint16("split.no", said["split_no"])
        writer.add_uint16("split.count", said["split_count"])
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::num_parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return parts


@pytest.fixture
def parts(tmp_path) -> list[Path]:
    return split(write_gguf(tmp_path / "tiny.gguf", TinyLlama(), matrix_type="Q4_1"), 3)


def test_a_split_model_is_the_whole_one(parts, tiny):
    joined, whole = load_gguf(parts[0]), load_gguf(tiny)
    assert joined.spec == whole.spec
    assert joined.tokenizer_source.tokens == whole.tokenizer_source.tokens
    assert joined.weights.keys() == whole.weights.keys()
    for name, weight in joined.weights.items():
        assert np.array_equal(weight.data, whole.weights[name].data), name
    assert joined.weights["layers.0.up"].is_mapped
    before = fingerprint(parts[0])
    parts[2].write_bytes(parts[2].read_bytes()[:-1] + b"\x07")
    assert fingerprint(parts[0]) != before


def test_a_split_model_is_named_by_its_first_part_with_the_others_beside_it(parts, tmp_path):
    with pytest.raises(ModelError, match=r"part 2 of a model that is split into 3.*-00001-of-00003\.gguf"):
        open_gguf(parts[1])
    renamed = parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ModelError, match=r"part 1 of a model that is split into 3.*-00001-of-00003\.gguf"):
        open_gguf(renamed)
    renamed.rename(parts[0])
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"tiny-00003-of-00003\.gguf: there is no such file.*all its files"):
        open_gguf(parts[0])


@pytest.mark.parametrize("changes", [{"split_no": 2}, {"split_count": 2}, {"split_count": 65535}])
def test_a_part_of_another_split_is_refused(tmp_path, changes):
    first, *_ = split(write_gguf(tmp_path / "tiny.gguf", TinyLlama(), matrix_type="Q4_1"), 3, **changes)
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: this is not part 2 of 3"):
        open_gguf(first)


def test_parts_that_do_not_make_a_whole_are_refused(parts, tmp_path):
    whole = parts[1].read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    parts[1].write_bytes(split(write_gguf(other / "tiny.gguf", TinyLlama(num_layers=1), matrix_type="Q4_1"), 3)[1].read_bytes())
    with pytest.raises(ModelError, match=r"the tensor 'blk.* is in part 1 as well|the parts have \d+ tensors, not 20"):
        open_gguf(parts[0])
    parts[1].write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"tiny-00002-of-00003\.gguf: .*but the file has only"):
        open_gguf(parts[0])


def test_names_of_split_files():
    assert [path.name for path in split_files(Path("a/m-00001-of-00002.gguf"))] == [
        "m-00001-of-00002.gguf",
        "m-00002-of-00002.gguf",
    ]
    for name in ("m-00002-of-00002.gguf", "m-00001-of-00000.gguf", "m-1-of-2.gguf", "m.gguf"):
        assert split_files(Path(name)) == (Path(name),)


CHANGES = (b"\0", b"\xff", b"\x7f", b"\x01")


@pytest.mark.parametrize("seed", range(8))
def test_a_mutated_file_is_a_model_or_refused(tiny, tmp_path, seed):
    """Bytes of the header are changed, or the file is cut, in 25 ways: a ModelError, if it is no model of that size."""
    rng, whole = np.random.default_rng(seed), tiny.read_bytes()
    header = whole.index(b"token_embd.weight") + 2000
    for _ in range(25):
        raw = bytearray(whole)
        for _ in range(rng.integers(1, 5)):
            at, width = rng.integers(0, header), rng.choice([1, 4, 8])
            raw[at : at + width] = CHANGES[rng.integers(4)] * width
        if rng.random() < 0.3:
            del raw[rng.integers(1, len(raw)) :]
        try:
            model = load_gguf(write(tmp_path, bytes(raw)))
        except ModelError:
            continue
        assert sum(weight.num_bytes for weight in model.weights.values()) < 2 * len(raw)


def test_arrays_have_a_common_limit(tmp_path):
    array = struct.pack("<IIQ", 9, 0, 3 << 20) + bytes(3 << 20)
    one = gguf(num_metadata=1, metadata=text("a") + array)
    two = gguf(num_metadata=2, metadata=text("a") + array + text("b") + array)
    nested = gguf(num_metadata=1, metadata=text("a") + struct.pack("<IIQ", 9, 9, 2) + array[4:] * 2)
    assert len(open_gguf(write(tmp_path, one)).metadata["a"]) == 3 << 20
    for data in (two, nested):
        with pytest.raises(ModelError, match=f"promises {3 << 20} numbers"):
            open_gguf(write(tmp_path, data))


def test_promises_of_a_corrupt_file_take_no_memory(tmp_path):
    tracemalloc.start()
    try:
        for data, _ in CORRUPT.values():
            with pytest.raises(ModelError):
                open_gguf(write(tmp_path, data))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
