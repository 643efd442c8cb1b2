"""`penstock pack`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from support.tiny_adapters import factors_of_llama, write_adapter
from support.tiny_models import TinyLlama

Penstock = Callable[..., subprocess.CompletedProcess[str]]


def test_a_packed_model_is_shown_and_checked(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "packed"
    assert "There are no packed weights of tiny" in penstock("pack", tiny_model, "--check").stderr
    assert "packed        no: `penstock pack` writes them" in penstock("show", tiny_model, "--no-speed").stdout
    result = penstock("pack", tiny_model)
    assert (result.returncode, result.stderr) == (0, "")
    [path] = folder.glob("*.packed")
    assert result.stdout.startswith(f"{path}: ")
    for words in (("pack", tiny_model), ("pack", tiny_model, "--check")):
        result = penstock(*words)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.endswith(": checksums are right\n")
    assert f" in {path}\n" in penstock("show", tiny_model, "--no-speed").stdout


def test_merged_adapters_are_packed_and_shown(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "two")):
        write_adapter(tmp_path / name, factors_of_llama(TinyLlama(), seed=seed))
    merge = ("--merge-lora", "one:0.7", "--merge-lora", "two:0.3")
    result = penstock("pack", tiny_model, *merge)
    assert (result.returncode, result.stderr) == (0, "")
    [path] = (tmp_path / "cache" / "packed").glob("*.packed")
    assert f" in {path}\n" in penstock("show", tiny_model, "--no-speed", *merge).stdout
    for words in ((), ("--merge-lora", "one"), (*merge, "--weight-dtype", "bf16")):
        assert "packed        no: " in penstock("show", tiny_model, "--no-speed", *words).stdout
    assert "merge_lora: the weight of one:0 is 0." in penstock("pack", tiny_model, "--merge-lora", "one:0").stderr
    assert "weights: " in penstock("show", tiny_model, "--no-speed", "--merge-lora", "three").stdout


def test_experts_that_starts_keep_on_disk_are_not_packed(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("experts_on_disk = true")
    result = penstock("pack", tiny_model, "--config", "config.toml")
    assert result.returncode == 1
    assert "experts_on_disk is set, and a start with it does not use packed weights" in result.stderr
    assert "packed        not used: --experts-on-disk" in penstock("show", tiny_model, "--no-speed", "--experts-on-disk").stdout


def test_damage_is_told_and_mended(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    penstock("pack", tiny_model)
    [path] = (tmp_path / "cache" / "packed").glob("*.packed")
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-70, os.SEEK_END)
        file.write(b"damage")
    result = penstock("pack", tiny_model, "--check")
    assert result.returncode == 1
    assert "is not what was written" in result.stderr
    assert "not used: " in penstock("show", tiny_model, "--no-speed").stdout
    result = penstock("pack", tiny_model)
    assert result.returncode == 0
    assert "is not what was written" in result.stderr
    assert penstock("pack", tiny_model, "--check").returncode == 0


def test_a_folder_that_can_t_be_made_is_an_error(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "packed").write_text("in the way")
    result = penstock("pack", tiny_model)
    assert result.returncode == 1
    assert f"error: The folder {tmp_path / 'cache' / 'packed'} can't be written." in result.stderr, "before it is converted"
    assert "Traceback" not in result.stderr


def test_damage_that_a_record_denies_is_mended(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    """A disk that loses bits changes no time."""
    penstock("pack", tiny_model)
    [path] = (tmp_path / "cache" / "packed").glob("*.packed")
    sound = path.read_bytes()
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(-70, os.SEEK_END)
        file.write(b"damage")
    status = path.stat()
    record = path.with_suffix(".checked")
    record.write_text(f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    assert penstock("pack", tiny_model).returncode == 0
    assert path.read_bytes() == sound


def test_a_folder_that_others_can_write_is_an_error(penstock: Penstock, tiny_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "packed"
    folder.mkdir(parents=True)
    folder.chmod(0o770)
    result = penstock("pack", tiny_model)
    assert result.returncode == 1
    assert f"chmod go-w {folder}" in result.stderr
    assert not list(folder.iterdir())
