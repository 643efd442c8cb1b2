"""The attention of an 8B shape compiles for an H100 or H200, and what ptxas says of it is what it was tuned for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.interpreted import compiling

HERE = Path(__file__).parent
SHARED_BYTES_OF_A_PROGRAM = 227 << 10
Kernel = dict[str, Any]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    """In a process of its own: here, kernels are for the interpreter."""
    environment = compiling() | {"TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    command = [sys.executable, str(HERE / "attention_sm90.py")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: list[Kernel] = json.loads(done.stdout)
    return found


def test_matrix_instructions_do_not_wait_for_each_other(kernels: list[Kernel]) -> None:
    prefills = [kernel for kernel in kernels if kernel["name"] == "prefill_kernel"]
    assert all(kernel["num_matrix_instructions"] >= 24 for kernel in prefills)
    assert [kernel["case"] for kernel in kernels if kernel["is_serialised"]] == []


def test_three_decodes_share_a_multiprocessor(kernels: list[Kernel]) -> None:
    """They have 128 threads each, unless they are deterministic."""
    decodes = [k for k in kernels if k["name"] == "decode_kernel" and "deterministic" not in k["case"]]
    assert len(decodes) == 3 * 2
    for kernel in decodes:
        assert 3 * kernel["shared_bytes"] <= SHARED_BYTES_OF_A_PROGRAM
        assert kernel["registers"] <= 168 or "int8" in kernel["case"]
        assert kernel["spilled_bytes"] == 0


def test_nothing_to_speak_of_is_spilled(kernels: list[Kernel]) -> None:
    assert [kernel for kernel in kernels if kernel["spilled_bytes"] > (16 if "int8" in kernel["case"] else 0)] == []
