"""`gpu_all.sh` measures each part once, and goes on where it was cut off."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import gpu_attention
import gpu_gemm
import gpu_serve
import gpu_step
import pytest

ROOT = Path(__file__).parents[2]
ECHO = '#!/bin/sh\necho "$@"\ncase "$*" in *"$FAILING"*) test -z "$FAILING" ;; esac\n'
"""Stands in for Python: says what it was asked for, and fails if that is FAILING."""
READERS = {
    "gpu_gemm.py": gpu_gemm.read_arguments,
    "gpu_attention.py": gpu_attention.read_arguments,
    "gpu_step.py": gpu_step.parse_options,
    "gpu_serve.py": gpu_serve.read_arguments,
}


@pytest.fixture
def gpu_all(tmp_path):
    """Runs the script; each command that it would run is printed."""
    echo = tmp_path / "echo"
    echo.write_text(ECHO)
    echo.chmod(0o755)

    def run(**settings):
        environment = os.environ | {"PYTHON": str(echo), "FAILING": "", "ARGS": "", "ONLY": ""} | settings
        command = ["benchmarks/gpu_all.sh", str(tmp_path / "results")]
        return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280)

    return run


def measured_parts(text):
    """(name, script, arguments) of what was begun."""
    return [(name, *rest.split()) for name, rest in re.findall(r"^== (\S+): (gpu_.*)$", text, re.MULTILINE)]


def test_the_benchmarks_take_what_the_parts_give_them(gpu_all, monkeypatch):
    parts = measured_parts(gpu_all().stdout)
    assert len(parts) == len({name for name, *_ in parts}) > 10
    for _, script, *words in parts:
        monkeypatch.setattr(sys, "argv", [script, *words])
        READERS.get(script, lambda: None)()
    assert {script for _, script, *_ in parts} == {*READERS, "gpu_peaks.py"}


def test_arguments_for_all_parts_are_those_that_each_of_them_takes(gpu_all, monkeypatch):
    """As they are in the documentation and the script's own, with the parts that are named beside them."""
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("docs/gpu.md", "benchmarks/gpu_all.sh")]
    words = r"""(?:'([^']*)'|"([^"]*)"|([^\s'"]+))"""
    asked = [found for text in texts for found in re.findall(rf"ARGS={words} ONLY={words}", text)]
    assert len(asked) > 2
    for found in asked:
        for _, script, *arguments in measured_parts(gpu_all(ARGS="".join(found[:3]), ONLY="".join(found[3:])).stdout):
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            READERS[script]()


def test_what_is_there_is_not_measured_again(gpu_all, tmp_path):
    first = gpu_all(ONLY="step-8b*")
    names = [name for name, *_ in measured_parts(first.stdout)]
    assert names == ["step-8b", "step-8b-fp8", "step-8b-int4", "step-8b-int8", "step-8b-deterministic", "step-8b-sampling"]
    (tmp_path / "results" / "step-8b-int4.txt").unlink()
    assert [name for name, *_ in measured_parts(gpu_all(ONLY="step-8b*").stdout)] == ["step-8b-int4"]
    assert [name for name, *_ in measured_parts(gpu_all(ONLY="step-8b*", AGAIN="1").stdout)] == names


def test_what_a_self_test_left_there_is_measured(gpu_all, tmp_path):
    results = tmp_path / "results"
    results.mkdir()
    for name, is_self_test in (("peaks", True), ("step-8b", False)):
        (results / f"{name}.txt").write_text(json.dumps({"benchmark": "gpu", "is_self_test": is_self_test}) + "\n")
    names = [name for pattern in ("peaks", "step-8b") for name, *_ in measured_parts(gpu_all(ONLY=pattern).stdout)]
    assert names == ["peaks"]


def test_after_so_many_minutes_no_part_is_begun(gpu_all, tmp_path):
    done = gpu_all(MINUTES="0", ONLY="gemm-*")
    assert "left for the next call: gemm-8b gemm-1.5b gemm-135m gemm-8b-deterministic" in done.stdout
    assert done.returncode == 0
    assert not list((tmp_path / "results").iterdir())


def test_a_part_that_fails_has_no_result_and_is_named(gpu_all, tmp_path):
    done = gpu_all(ONLY="*-135m", FAILING="gpu_serve")
    assert done.returncode == 1
    assert "failed: serve-135m" in done.stderr
    assert sorted(path.name for path in (tmp_path / "results").glob("*.txt")) == [
        "attention-135m.txt",
        "gemm-135m.txt",
        "step-135m.txt",
    ]


def test_the_documentation_names_parts_that_there_are(gpu_all):
    text = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("gpu.md", "performance.md"))
    asked = re.findall(r"""ONLY=(?:'([^']*)'|"([^"]*)"|(\S+))\s+benchmarks/gpu_all\.sh""", text)
    assert len(asked) > 5
    for pattern in map("".join, asked):
        assert measured_parts(gpu_all(ONLY=pattern, AGAIN="1").stdout), f"no part is called {pattern}"
