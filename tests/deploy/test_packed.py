"""Whether a start uses packed weights: only those of the same files and settings, and the log says which."""

from __future__ import annotations

import errno
import logging
import os
import weakref
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.config import BackendConfig, Config, KvConfig, LoraConfig, ModelConfig
from penstock.config.units import format_size
from penstock.deploy import executor as deploy_executor
from penstock.deploy import packed as deploy_packed
from penstock.deploy.factory import open_executor
from penstock.deploy.packed import make_with_packed
from penstock.deploy.resolve import packed_weights
from penstock.models.catalog import resolve
from penstock.models.packed_file import PackedError, PackedFile, write_packed
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama, write_gguf

TINY = TinyLlama()
IDS = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", TINY, matrix_type="Q4_1")


def config_of(
    model: Path, *, weight_dtype: str | None = None, merge_lora: tuple[str, ...] = (), on_disk: bool = False, task: str = "auto"
) -> Config:
    return Config(
        model=ModelConfig(model=str(model), cache_dir=str(model.parent / "cache"), experts_on_disk=on_disk, task=task),
        backend=BackendConfig(backend="native", threads=2, weight_dtype=weight_dtype),
        kv=KvConfig(kv_cache_memory_bytes=1 << 20) if model.suffix and task == "auto" else KvConfig(),
        lora=LoraConfig(merge_lora=merge_lora),
    )


def pack(config: Config) -> Path:
    source = resolve(config.model.model, Path())
    packed = packed_weights(config, source.path)
    _, _, executor = open_executor(config, source)
    with closing(executor):
        write_packed(packed.path, packed.identity(), executor.packed)  # type: ignore[attr-defined]
    return packed.path


def logits(config: Config) -> np.ndarray:
    _, _, executor = open_executor(config, resolve(config.model.model, Path()))
    with closing(executor):
        return executor.forward_logits(IDS)  # type: ignore[attr-defined, no-any-return]


def how(config: Config, caplog: pytest.LogCaptureFixture) -> str:
    """Return what the log of a start says about packed weights."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="penstock.deploy.packed"):
        open_executor(config, resolve(config.model.model, Path()))[2].close()
    return "\n".join(caplog.messages)


def test_a_start_maps_what_was_packed(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(model)
    assert how(config, caplog) == ""
    expected = logits(config)
    path = pack(config)
    assert how(config, caplog) == f"weights are mapped from {path}, {format_size(path.stat().st_size)}"
    assert np.array_equal(logits(config), expected)


def test_another_model_file_is_converted(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, status = config_of(model), model.stat()
    pack(config)
    os.utime(model, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert "packed weights are not used" in how(config, caplog)
    assert "the model's files changed" in caplog.text
    other = write_gguf(model, TinyLlama(seed=TINY.seed + 1), matrix_type="Q4_1")
    with_packed = logits(config)
    assert how(config, caplog)
    assert np.array_equal(logits(config_of(other.rename(model.parent / "other.gguf"))), with_packed)


def test_another_version_of_penstock_converts(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(config_of(model))
    monkeypatch.setattr(deploy_packed, "__version__", "9")
    assert "was made for version" in how(config_of(model), caplog)


def test_damage_is_converted_away(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(model)
    expected, path = logits(config), pack(config)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-100, os.SEEK_END)
        file.write(b"damaged")
    assert "is damaged" in how(config, caplog)
    assert len(caplog.messages) == 1
    assert np.array_equal(logits(config), expected)


def test_a_merged_adapter_has_a_file_of_its_own(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    adapter = model.parent / "one"
    write_adapter(adapter, factors_of_llama(TINY, seed=1))
    base, merged = config_of(model), config_of(model, merge_lora=(str(adapter),))
    path = pack(base)
    assert f"not used: {path} was packed with another --task, --weight-dtype or --merge-lora" in how(merged, caplog)
    write_gguf(model.parent / "tiny-2.gguf", TINY)
    assert how(config_of(model.parent / "tiny-2.gguf"), caplog) == "", "a file of another name is another model's"
    expected = logits(merged)
    assert pack(merged) != pack(base)
    assert "weights are mapped" in how(merged, caplog)
    assert np.array_equal(logits(merged), expected)
    assert not np.array_equal(logits(base), expected)
    write_adapter(adapter, factors_of_llama(TINY, seed=2))
    assert "the adapter's files changed" in how(merged, caplog)


def test_types_of_numbers_have_files_of_their_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_encoder(ENCODERS["bert"], tmp_path / "bert")
    assert pack(config_of(path)) != pack(config_of(path, weight_dtype="bf16"))
    for dtype in (None, "bf16"):
        assert "weights are mapped" in how(config_of(path, weight_dtype=dtype), caplog)


def test_a_file_with_fewer_matrices_is_not_used(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(model)
    source = resolve(config.model.model, Path())
    packed, (_, _, executor) = packed_weights(config, source.path), open_executor(config, source)
    with closing(executor):
        found = executor.packed  # type: ignore[attr-defined]
        write_packed(packed.path, packed.identity(), dict(list(found.items())[:-1]))
    assert "is missing" in how(config, caplog)


def test_experts_on_disk_have_another_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_case(CASES["mixtral_gguf"], tmp_path)
    pack(config_of(path))
    assert "weights are mapped" in how(config_of(path), caplog)
    assert "--experts-on-disk keeps experts in another" in how(config_of(path, on_disk=True), caplog)


def test_weights_that_are_spread_over_memory_nodes_are_converted(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(config_of(model))
    monkeypatch.setattr(deploy_executor, "memory_nodes", lambda _: (0,))
    assert "can't be spread" in how(config_of(model), caplog)


def test_another_task_has_a_file_of_its_own(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Models that read texts round more weights."""
    pack(config_of(model))
    config = config_of(model, task="embed")
    assert "was packed with another --task" in how(config, caplog)
    pack(config)
    assert "weights are mapped" in how(config, caplog)
    assert "weights are mapped" in how(config_of(model), caplog)


def test_a_long_name_of_wide_characters(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(model.rename(model.with_name("\u6a21" * 80 + ".gguf")))
    assert how(config, caplog) == ""
    pack(config)
    assert "weights are mapped" in how(config, caplog)


def test_a_folder_that_can_t_be_read_is_a_warning(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *args: object, **kwargs: object) -> object:
        if str(path).endswith(".packed"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real[0 if args else 1](path, *args, **kwargs)

    real = (os.open, os.stat)  # even of root, who can enter all folders
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "stat", refuse)
    assert "can't be opened: Permission denied" in how(config_of(model), caplog)
    assert len(caplog.messages) == 1


def test_a_model_file_that_can_t_be_read_is_a_warning(
    model: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **kwargs: bool) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied", str(path / "optimizer.pt"))

    pack(config_of(model))
    monkeypatch.setattr("penstock.models.load.fingerprint", refuse)
    assert "optimizer.pt can't be read: Permission denied" in how(config_of(model), caplog)
    assert len(caplog.messages) == 1


class Cache:
    """Stands for an executor's memory."""


def test_the_first_executor_is_gone_before_the_second_is_made(model: Path) -> None:
    config, alive, first = config_of(model), [], []
    pack(config)

    def make(file: PackedFile | None) -> None:
        if file is None:
            alive.extend(one() for one in first)
            return
        cache = Cache()
        first.append(weakref.ref(cache))
        raise PackedError("another form")

    make_with_packed(packed_weights(config, model), make, is_of_disk=False, nodes=())
    assert alive == [None]


def test_a_missing_file_of_the_executor_is_not_taken_for_the_packed_one(model: Path) -> None:
    config = config_of(model)
    pack(config)

    def make(file: PackedFile | None) -> None:
        raise FileNotFoundError("another") if file else AssertionError

    with pytest.raises(FileNotFoundError, match="another"):
        make_with_packed(packed_weights(config, model), make, is_of_disk=False, nodes=())
