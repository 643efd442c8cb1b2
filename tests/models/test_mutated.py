"""Model files that are broken, or made to break us: each loads, or is a ModelError with cause and remedy. Never another error.

Hypothesis changes one or two values of a JSON file, or some bytes, in a fixed order of examples. A file that loads is read to
its end, as by a backend. `HYPOTHESIS_PROFILE=thorough` tries more.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.models.gguf import load_gguf
from penstock.models.hf import load_hf_directory, read_hf_spec
from penstock.models.weights import LoadedModel
from penstock.text.tokenizer import load_tokenizer
from penstock.types.errors import ModelError
from support.fp8_models import write_fp8_hf
from support.models.mutated import (
    BROKEN,
    Changed,
    bounded,
    mutate,
    mutations,
    parts,
    refusal,
)
from support.packed_models import Packing, write_packed_hf
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf, write_hf

TINY = TinyLlama(num_layers=1, intermediate_size=64, is_tied=False)
MAX_WEIGHT_BYTES = 1 << 27
# Directories of all formats share most of what reads them, so each of them gets half of the examples.
in_each_directory = settings(bounded, max_examples=settings().max_examples // 2)


def loads_or_is_refused(load: Callable[[], LoadedModel]) -> None:
    """The law of this file."""

    def read() -> None:
        for weight in load().weights.values():
            weight.dequantize()
            weight.forget()

    error = refusal(read)
    if error is not None:
        assert error.message
        assert error.remedy
        assert len(str(error)) < 10_000
        str(error).encode()


def load_directory(directory: Path) -> Callable[[], LoadedModel]:
    return lambda: load_hf_directory(directory, max_weight_bytes=MAX_WEIGHT_BYTES)


WRITERS: dict[str, Callable[[Path], object]] = {
    "gptq": lambda path: write_packed_hf(path, TINY, Packing("gptq", is_symmetric=False, order="matrix")),
    "awq": lambda path: write_packed_hf(path, TINY, Packing("awq", is_symmetric=False)),
    "pack-quantized": lambda path: write_packed_hf(path, TINY, Packing("pack-quantized", is_symmetric=False)),
    "int-quantized": lambda path: write_packed_hf(path, TINY, Packing("int-quantized", bits=8)),
    "fp8 of rows": lambda path: write_fp8_hf(path, TINY, "row"),
    "fp8 of blocks": lambda path: write_fp8_hf(path, TINY, "block"),
    "mxfp4": lambda path: write_case(CASES["gpt_oss_mxfp4"], path),
}


@pytest.fixture(scope="module", params=WRITERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("mutated")
    WRITERS[request.param](path)
    return path


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of several files, with every JSON file that is read."""
    path = write_hf(tmp_path_factory.mktemp("shards"), TINY, num_shards=2)
    (path / "chat_template.jinja").unlink()
    tokens = {
        "chat_template": [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}],
        "bos_token": {"content": "<s>"},
        "eos_token": "<|im_end|>",
        "additional_special_tokens": ["a", {"content": "b"}],
        "extra_special_tokens": {"image_token": "c"},
        "added_tokens_decoder": {},
    }
    (path / "tokenizer_config.json").write_text(json.dumps(tokens))
    (path / "special_tokens_map.json").write_text(json.dumps({"pad_token": "p"}))
    return path


@in_each_directory
@given(data=st.data())
def test_config_json(directory: Path, data: st.DataObject) -> None:
    file = directory / "config.json"
    tree = json.loads(file.read_text())
    with Changed(file, mutate(tree, data.draw(mutations(tree)))):
        loads_or_is_refused(load_directory(directory))
        refused = refusal(lambda: read_hf_spec(directory))
        assert refused is None or refused.remedy


@in_each_directory
@given(data=st.data())
def test_header_of_safetensors(directory: Path, data: st.DataObject) -> None:
    """Types, shapes and offsets that are wrong, too large, overlapping or missing; of quantised matrices, too."""
    file = directory / "model.safetensors"
    header, body = parts(file.read_bytes())
    text = mutate(header, data.draw(mutations(header)))
    with Changed(file, len(text).to_bytes(8, "little") + text + body):
        loads_or_is_refused(load_directory(directory))


@in_each_directory
@given(data=st.data())
def test_bytes_of_safetensors(directory: Path, data: st.DataObject) -> None:
    """Cut, or overwritten in the header and in the body: NaN and infinite scales, groups that are none, other zero points."""
    file = directory / "model.safetensors"
    good = file.read_bytes()
    overwritten = bytearray(good[: data.draw(st.integers(0, len(good)) if data.draw(st.booleans()) else st.just(len(good)))])
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(good)))
        piece = data.draw(st.sampled_from((b"\xff" * 64, b"\0" * 64, b"\x7f\x80" * 32, b"\x7c" * 8, b'"', b"9", b"-", b"{")))
        overwritten[at : at + len(piece)] = piece[: max(0, len(overwritten) - at)]
    with Changed(file, bytes(overwritten)):
        loads_or_is_refused(load_directory(directory))


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model.safetensors.index.json",
    ],
)
@bounded
@given(data=st.data())
def test_other_json_files(shards: Path, name: str, data: st.DataObject) -> None:
    file = shards / name
    tree = json.loads(file.read_text())
    with Changed(file, mutate(tree, data.draw(mutations(tree)))):
        loads_or_is_refused(load_directory(shards))


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_files_that_are_no_json(shards: Path, text: bytes) -> None:
    for file in sorted(shards.glob("*.json")):
        if file.name != "tokenizer.json":  # the tokenizer reads it
            with Changed(file, text), pytest.raises(ModelError) as refused:
                load_directory(shards)()
            assert refused.value.remedy


@pytest.mark.parametrize(
    ("name", "key", "value"), [("config.json", "architectures", [[]]), ("tokenizer_config.json", "bos_token", "\ud800")]
)
def test_values_that_once_got_through(shards: Path, name: str, key: str, value: object) -> None:
    """A list where a name is looked up; half a surrogate pair, of which no text can be made."""
    file = shards / name
    with Changed(file, mutate(json.loads(file.read_text()), [((key,), value)])), pytest.raises(ModelError) as refused:
        load_directory(shards)()
    assert refused.value.remedy


def test_a_tokenizer_that_makes_its_library_panic(shards: Path) -> None:
    file = shards / "tokenizer.json"
    text = mutate(json.loads(file.read_text()), [(("model", "continuing_subword_prefix"), "longer than every merge")])
    with Changed(file, text), pytest.raises(ModelError, match="not a valid") as refused:
        load_tokenizer(file)
    assert refused.value.remedy


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", TINY, matrix_type="Q4_0")


@bounded
@given(data=st.data())
def test_bytes_of_gguf(gguf: Path, data: st.DataObject) -> None:
    """Counts, lengths, types and offsets that are wrong or huge, and files that end too soon."""
    good = gguf.read_bytes()
    end = good.rfind(b"weight") + 64  # of what is not weights
    overwritten = bytearray(good[: data.draw(st.integers(0, len(good)) if data.draw(st.booleans()) else st.just(len(good)))])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, end))
        piece = data.draw(st.sampled_from((2**62, 2**31, 2**32 - 1, 2**64 - 1, 0, 1, 255))).to_bytes(8, "little")
        piece = piece[: data.draw(st.sampled_from((1, 4, 8)))]
        overwritten[at : at + len(piece)] = piece[: max(0, len(overwritten) - at)]
    with Changed(gguf, bytes(overwritten)):
        loads_or_is_refused(lambda: load_gguf(gguf, max_weight_bytes=MAX_WEIGHT_BYTES))
