"""The files of an adapter, opened while a server runs: what is opened at all, and what reading takes."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from penstock.models import adapter_files, architectures
from penstock.models.adapter_files import READ_BYTES, AdapterFiles
from penstock.models.catalog import resolve
from penstock.models.load import load_adapter, load_model
from penstock.models.weights import LoadedModel
from penstock.types.errors import ModelError
from support.tiny_adapters import factors_of_llama, write_adapter, write_gguf_adapter
from support.tiny_models import TinyLlama, write_hf

WIDE = TinyLlama(hidden_size=512, intermediate_size=1024)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("wide")
    write_hf(folder / "tiny", WIDE)
    return load_model(resolve(str(folder / "tiny"), folder))


def test_regular_files_alone_are_opened_and_nobody_waits_for_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for odd in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(ModelError, match="not a regular file"):
            AdapterFiles().read(odd, 100)
    with pytest.raises(ModelError, match="there is no such file"):
        AdapterFiles().read(tmp_path / "none", 100)
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(ModelError, match="can't be read"):
        AdapterFiles().read(tmp_path / "loop", 100)


def test_no_file_outside_of_the_folders_is_opened_whatever_links_there_are(tmp_path: Path) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a").write_bytes(b"secret")
    (inside / "link").symlink_to(outside / "a")
    (inside / "folder").symlink_to(outside)
    (inside / "own").symlink_to(inside / "a")
    files = AdapterFiles(roots=[inside, tmp_path / "inside-not"])
    for path in (inside / "a", inside / "own", inside / ".." / "inside" / "a"):
        files.check(path)
        assert files.read(path, 100) == b"secret"
    told = set()
    for path in (inside / "link", inside / "folder" / "a", inside / ".." / "outside" / "a", outside / "a"):
        with pytest.raises(ModelError, match="--lora-dir"):
            files.read(path, 100)
    for path in (outside / "a", outside / "none", Path("/"), Path("a\0b")):
        with pytest.raises(ModelError, match="--lora-dir") as caught:
            files.check(path)
        told.add(str(caught.value).removeprefix(repr(str(path))))
    assert len(told) == 1, "they say nothing of what is there"


def test_the_digest_is_that_of_what_was_read(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", factors_of_llama(WIDE, ends=("q_proj",)))
    digests = []
    for change in (lambda: None, lambda: None, lambda: flip(path / "adapter_model.safetensors")):
        change()
        files = AdapterFiles()
        files.read(path / "adapter_config.json", 1 << 20)
        files.read(path / "adapter_model.safetensors", 1 << 30)
        digests.append(files.digest)
    assert digests[0] == digests[1] != digests[2]
    assert len(digests[0]) == 16


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_slow_disk_has_so_much_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    monkeypatch.setattr(adapter_files, "_PIECE_BYTES", 10)
    assert AdapterFiles(timeout_s=60.0).read(tmp_path / "a", 100) == bytes(100)
    with pytest.raises(ModelError, match="reading took more than 0 s"):
        AdapterFiles(timeout_s=0.0).read(tmp_path / "a", 100)


@pytest.mark.parametrize("dtype", ["bf16", "f32", "gguf F16", "gguf F32"])
def test_reading_takes_no_more_memory_than_is_asked_for(tmp_path: Path, model: LoadedModel, dtype: str) -> None:
    factors = factors_of_llama(WIDE, rank=32)
    if dtype.startswith("gguf"):
        names = {name: gguf_name(name) for name in factors}
        path = write_gguf_adapter(tmp_path / "a.gguf", factors, names, dtype=dtype.removeprefix("gguf "))
    else:
        path = write_adapter(tmp_path / "a", factors, dtype=dtype)
    taken: list[int] = []
    program = architectures.describe(model.spec)
    load_adapter(path, model.spec, program, tables=model.weights, max_rank=32)  # imports, and what NumPy keeps
    tracemalloc.start()
    try:
        found = load_adapter(
            path, model.spec, program, tables=model.weights, max_rank=32, files=AdapterFiles(take=taken.append)
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    num_values = sum(a.size + b.size for a, b in found.by_weight.values())
    packed_bytes = 4 * num_values  # by the reference backend; the native one takes half
    assert taken[-1] == READ_BYTES * num_values
    assert peak + packed_bytes < taken[-1], f"{peak / num_values:.1f} bytes for each number"
    assert np.isfinite(found.by_weight["layers.0.q"][0]).all()


def gguf_name(module: str) -> str:
    """The tensor of a GGUF file that is a module's of a Llama."""
    _, _, layer, _, end = module.split(".")
    ends = {"gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down", "o_proj": "attn_output"}
    return f"blk.{layer}.{ends.get(end, f'attn_{end[0]}')}.weight"
