"""A tiny model and the command line as a process of its own, with a cache and a home that are nobody's."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from penstock.backends.native import probe_peaks
from penstock.cli.main import main
from support.cli.serve import Served
from support.cli.serve import serving as serve
from support.tiny_models import TinyLlama, write_gguf

Result = subprocess.CompletedProcess[str]
Penstock = Callable[..., Result]
Serving = Callable[..., AbstractContextManager[Served]]

_probe_once = functools.cache(probe_peaks)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Long enough for a conversation, short enough for a test of what is too long."""
    return write_gguf(tmp_path_factory.mktemp("models") / "tiny.gguf", TinyLlama(max_model_len=512))


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The test's own, without settings of the machine it runs on."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "XDG_"))}
    kept |= {"CUDA_VISIBLE_DEVICES": ""}  # what is expected here is what the CPU does
    return {**kept, "HOME": str(tmp_path), "PENSTOCK_CACHE": str(tmp_path / "cache"), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def penstock(environment: dict[str, str], tmp_path: Path) -> Penstock:
    """Runs `penstock ARGUMENTS` to its end; `stdin` is what comes through the pipe."""

    def run(*arguments: str | Path, stdin: str = "", env: Mapping[str, str] | None = None) -> Result:
        return subprocess.run(
            [sys.executable, "-m", "penstock", *map(str, arguments)],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
            cwd=tmp_path,
            env={**environment, **(env or {})},
        )

    return run


@pytest.fixture
def penstock_here(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Penstock:
    """Runs `penstock ARGUMENTS` in this process, for commands that start nothing: a process takes half a second to start."""
    for name in os.environ.keys() - environment.keys():
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Result:
        words = [*map(str, arguments)]
        with pytest.raises(SystemExit) as ended:
            main(words)
        out, err = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return Result(words, ended.value.code, out, err)

    return run


@pytest.fixture
def serving(environment: dict[str, str], tmp_path: Path) -> Serving:
    """Runs `penstock serve ARGUMENTS` with the reference backend while a block runs."""

    def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> AbstractContextManager[Served]:
        return serve({**environment, **(env or {})}, *arguments, cwd=tmp_path)

    return run


@pytest.fixture
def probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands in this process share one probe of the machine's peaks, which takes a second or more."""
    monkeypatch.setattr("penstock.backends.native.probe_peaks", _probe_once)
