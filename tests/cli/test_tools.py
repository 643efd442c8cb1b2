"""`penstock pull`, `models` and `env`."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock import __version__
from penstock.cli.env import _facts, env
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import DEFAULT_MODEL, resolve
from support.fake_machine import fake_kernels

Penstock = Callable[..., subprocess.CompletedProcess[str]]


def test_models_lists_the_catalogue_and_what_is_here(penstock: Penstock, tmp_path: Path, tiny_model: Path) -> None:
    result = penstock("models")
    assert result.returncode == 0
    assert result.stdout.splitlines()[0].startswith("smollm2:135m")
    assert "not fetched" in result.stdout
    other = tmp_path / "elsewhere" / "models"
    other.mkdir(parents=True)
    (other / "mine.gguf").write_bytes(tiny_model.read_bytes())
    assert "mine.gguf" in penstock("models", "--cache", other.parent).stdout


def test_env_names_the_machine_the_versions_and_what_is_missing(penstock: Penstock, tmp_path: Path) -> None:
    result = penstock("env")
    assert result.returncode == 0, result.stderr
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert facts["penstock"] == __version__
    assert re.fullmatch(r"\d+ by default: \d+ usable CPUs?.*", facts["threads"])
    assert re.match(r"node \d+ with \d+ core", facts["nodes"])
    assert "portable" in facts["kernels"]
    assert "not usable: " in facts["gpu"] or "compute capability" in facts["gpu"]
    assert "numpy" in facts["libraries"]
    assert facts["cache"].startswith(str(tmp_path))
    assert DEFAULT_MODEL in facts["missing"]


def test_env_says_that_pip_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip, which fetches models: `python -m ensurepip`" in dict(_facts(None, None, None))["missing"]


def test_one_cpu_is_told_in_the_singular(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.machine.usable_cpus", lambda: 1)
    assert next(value for name, value in _facts(None, None, None) if name == "processor").endswith(", 1 CPU usable")


def test_env_tells_what_serve_would_take_here_and_who_set_it(penstock: Penstock, tmp_path: Path) -> None:
    def told(*arguments: str, env: dict[str, str]) -> dict[str, str]:
        result = penstock("env", *arguments, env=env)
        assert result.returncode == 0, result.stderr
        return dict(line.split(maxsplit=1) for line in result.stdout.splitlines())

    file = tmp_path / "penstock.toml"
    file.write_text('threads = 5\nkernels = "portable"\n')
    facts = told(env={"PENSTOCK_THREADS": "7", "PENSTOCK_CONFIG": str(file)})
    assert re.fullmatch(r"7, set by PENSTOCK_THREADS; \d+ by default: \d+ usable CPUs?.*", facts["threads"])
    assert facts["kernels"].startswith("portable, set by the settings file; usable: ")
    assert told(env={"PENSTOCK_CONFIG": str(file)})["threads"].startswith("5, set by the settings file; ")
    assert told("--threads", "3", env={"PENSTOCK_THREADS": "7"})["threads"].startswith("3, set by --threads; ")


def test_env_tells_a_wrong_value_beside_the_other_facts(penstock: Penstock) -> None:
    """They are for a report of what goes wrong."""
    result = penstock("env", env={"PENSTOCK_THREADS": "0", "PENSTOCK_KERNELS": "mmx"})
    assert result.returncode == 0, result.stderr
    facts = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert re.match(r"Invalid value for 'PENSTOCK_THREADS': 0 is less than 1: serve refuses it; \d+ by ", facts["threads"])
    assert re.match(r"Invalid value for 'PENSTOCK_KERNELS': 'mmx' .*portable: serve refuses it; usable: ", facts["kernels"])
    assert "can't run" not in facts["kernels"]
    assert facts["penstock"] == __version__


def test_env_tells_the_kernels_that_the_settings_file_sets_for_one_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_kernels(monkeypatch, "avx2", "portable")
    file = tmp_path / "penstock.toml"
    file.write_text('[[models]]\nmodel = "a"\nkernels = "portable"\n[[models]]\nmodel = "b"\nkernels = "avx512"\n')
    kernels = next(line for line in CliRunner().invoke(env, ["--config", str(file)]).output.splitlines() if "kernels" in line)
    assert "avx2; portable for a, set by the settings file; avx512 for b, set by the settings file, which" in kernels
    assert kernels.endswith("; usable: avx2, portable")


def test_env_tells_kernels_that_serve_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels(monkeypatch, "avx2", "portable")
    result = CliRunner().invoke(env, env={"PENSTOCK_KERNELS": "avx512"})
    assert "avx512, set by PENSTOCK_KERNELS, which this machine can't run; usable: avx2, portable" in result.output


@pytest.mark.parametrize("reason", ["", "the system refuses them (arch_prctl: Operation not permitted)"])
def test_env_says_why_the_processors_tiles_are_not_used(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_kernels(monkeypatch, "avx512", "portable", why_no_tiles=reason)
    kernels = next(value for name, value in _facts(None, None, None) if name == "kernels")
    assert kernels == "avx512; usable: avx512, portable" + (f"; not the processor's tiles (AMX): {reason}" if reason else "")


def test_the_settings_file_names_the_cache_for_all(penstock: Penstock, tmp_path: Path, tiny_model: Path) -> None:
    """The file that `pull` fetches is the one that `serve` looks for."""
    folder = tmp_path / "elsewhere"
    (folder / "models").mkdir(parents=True)
    (folder / "models" / "mine.gguf").write_bytes(tiny_model.read_bytes())
    file = tmp_path / "penstock.toml"
    file.write_text(f'cache = "{folder}"\nmodel = "qwen2.5-coder"\nport = 8080\n')
    settings = {"PENSTOCK_CONFIG": str(file), "PENSTOCK_CACHE": ""}
    assert "mine.gguf" in penstock("models", env=settings).stdout
    assert f"cache {folder} (" in " ".join(penstock("env", env=settings).stdout.split())
    assert "mine.gguf" in penstock("models", "--config", file, env={"PENSTOCK_CACHE": ""}).stdout
    no_index = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"}
    pulled = penstock("pull", env={**settings, **no_index})
    assert f"put the file at {folder}/models/Qwen2.5" in pulled.stderr
    assert "cannot be read" in penstock("models", env={"PENSTOCK_CONFIG": "/absent.toml"}).stderr


@pytest.mark.parametrize("command", ["pull .", "models", "env", "top ftp://nowhere"])
def test_unknown_variables_are_warned_of_and_those_of_other_commands_are_not(penstock: Penstock, command: str) -> None:
    result = penstock(*command.split(), env={"PENSTOCK_MAX_NUM_SEQ": "32", "PENSTOCK_PORT": "8080", "PENSTOCK_SEED": "1"})
    warnings = [line for line in result.stderr.splitlines() if "environment variable" in line]
    assert warnings == [
        "The environment variable PENSTOCK_MAX_NUM_SEQ is unknown and has no effect. Did you mean PENSTOCK_MAX_NUM_SEQS?"
    ]


def test_a_folder_of_nobody_is_told(penstock: Penstock) -> None:
    result = penstock("models", "--cache", "~nobody-of-that-name/cache")
    assert result.returncode == 1
    assert result.stderr.startswith("error: '~nobody-of-that-name/cache': there is no such home folder")


def test_pull_of_a_path_says_that_there_is_nothing_to_fetch(penstock: Penstock, tiny_model: Path) -> None:
    result = penstock("pull", tiny_model)
    assert result.returncode == 1
    assert "nothing to fetch" in result.stderr


def test_pull_without_an_index_says_what_to_do(penstock: Penstock, tmp_path: Path) -> None:
    result = penstock("pull", env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"})
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("error: ")
    assert str(tmp_path / "cache") in result.stderr


@pytest.mark.model
def test_the_default_model_answers_from_the_command_line(penstock: Penstock) -> None:
    source = resolve(DEFAULT_MODEL, default_cache_dir())
    if not source.is_present:
        pytest.skip(f"{source.path} is not there: run `penstock pull`")
    result = penstock(
        "run", "Name the capital of France.", "--temperature", "0", "--cache", default_cache_dir(), "--max-tokens", "16"
    )
    assert result.returncode == 0, result.stderr
    assert "Paris" in result.stdout
