"""Adapters that are broken, or made to break us: each is read, or is a ModelError with cause and remedy, as models are.

Those that are read have finite factors of the model's shapes: the serving process runs on after any of them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.models import architectures, catalog
from penstock.models.load import load_adapter, load_model
from penstock.models.weights import LoadedModel
from support.models.mutated import BROKEN, Changed, bounded, mutate, mutations, parts, refusal
from support.tiny_adapters import config_of, factors_of_llama, write_adapter, write_gguf_adapter
from support.tiny_models import TinyLlama, write_hf

TINY = TinyLlama(num_layers=1, is_tied=False)
FACTORS = factors_of_llama(TINY, rank=2, ends=("q_proj", "v_proj", "embed_tokens", "lm_head"))
NAMES = {"q_proj": "blk.0.attn_q", "v_proj": "blk.0.attn_v", "embed_tokens": "token_embd", "lm_head": "output"}
PIECES = (b"\xff" * 64, b"\0" * 64, b"\x7f\x80" * 32, b"\x7c" * 8, b'"', b"9", b"-", b"{")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = write_hf(tmp_path_factory.mktemp("model") / "tiny", TINY)
    return load_model(catalog.resolve(str(path), path))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    patterns = {"rank_pattern": {r"^model\.layers.[0-9]+.*q_proj": 2}, "alpha_pattern": {"v_proj": 3}}
    path: Path = tmp_path_factory.mktemp("adapter")
    return write_adapter(path, FACTORS, **patterns)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {module: f"{NAMES[module.rpartition('.')[2]]}.weight" for module in FACTORS}
    path: Path = tmp_path_factory.mktemp("adapter") / "a.gguf"
    return write_gguf_adapter(path, FACTORS, names, heads={"q_proj": TINY.num_heads})


def reads_or_is_refused(path: Path, model: LoadedModel) -> None:
    """The law of this file."""
    program = architectures.describe(model.spec)

    def read() -> None:
        factors = load_adapter(path, model.spec, program, tables=model.weights, max_rank=4)
        assert factors.fits(program, 4)
        assert all(np.isfinite(half).all() for pair in factors.by_weight.values() for half in pair)

    error = refusal(read)
    if error is not None:
        assert error.message
        assert error.remedy
        assert len(str(error)) < 10_000
        str(error).encode()


@bounded
@given(data=st.data())
def test_settings(folder: Path, model: LoadedModel, data: st.DataObject) -> None:
    file = folder / "adapter_config.json"
    tree = json.loads(file.read_text())
    with Changed(file, mutate(tree, data.draw(mutations(tree)))):
        reads_or_is_refused(folder, model)


@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
@bounded
@given(pattern=st.text(alphabet=r"a.*+\d[]()|^$-q_proj{}?:", max_size=40))
def test_patterns(folder: Path, model: LoadedModel, key: str, pattern: str) -> None:
    """None takes longer than hypothesis allows an example."""
    with Changed(folder / "adapter_config.json", json.dumps(config_of(2, **{key: {pattern: 2}})).encode()):
        reads_or_is_refused(folder, model)


@pytest.mark.parametrize("text", BROKEN, ids=range(len(BROKEN)))
def test_settings_that_are_no_json(folder: Path, model: LoadedModel, text: bytes) -> None:
    with Changed(folder / "adapter_config.json", text):
        reads_or_is_refused(folder, model)


@bounded
@given(data=st.data())
def test_header_of_safetensors(folder: Path, model: LoadedModel, data: st.DataObject) -> None:
    file = folder / "adapter_model.safetensors"
    header, body = parts(file.read_bytes())
    text = mutate(header, data.draw(mutations(header)))
    with Changed(file, len(text).to_bytes(8, "little") + text + body):
        reads_or_is_refused(folder, model)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
@bounded
@given(data=st.data())
def test_bytes(folder: Path, gguf: Path, model: LoadedModel, kind: str, data: st.DataObject) -> None:
    """Cut, or overwritten in the header and in the body."""
    file = gguf if kind == "gguf" else folder / "adapter_model.safetensors"
    good = file.read_bytes()
    overwritten = bytearray(good[: data.draw(st.integers(0, len(good)) if data.draw(st.booleans()) else st.just(len(good)))])
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(st.integers(0, len(good)))
        piece = data.draw(st.sampled_from(PIECES))
        overwritten[at : at + len(piece)] = piece[: max(0, len(overwritten) - at)]
    with Changed(file, bytes(overwritten)):
        reads_or_is_refused(gguf if kind == "gguf" else folder, model)
