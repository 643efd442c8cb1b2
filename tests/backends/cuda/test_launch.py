"""Our launches of kernels are Triton's: the same compiled kernels, grids and arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from penstock.backends.cuda.kernels.launch import _kind, cdiv, jit, next_power_of_2
from support.interpreted import compiling

PROGRAM = Path(__file__).with_name("launches.py")


def test_launches_are_those_of_triton() -> None:
    done = subprocess.run([sys.executable, PROGRAM], env=compiling(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    ours, tritons = map(json.loads, done.stdout.splitlines())
    assert len(ours) > 40
    assert ours == tritons


def test_sizes_are_those_of_triton() -> None:
    assert [cdiv(number, 7) for number in range(1, 60)] == [triton.cdiv(number, 7) for number in range(1, 60)]
    assert [next_power_of_2(number) for number in range(1, 600)] == [triton.next_power_of_2(number) for number in range(1, 600)]


def test_what_triton_compiles_another_kernel_for_is_of_another_kind() -> None:
    kinds = [_kind(value) for value in (1, 2, 16, 1 << 40, 1 << 63, 1.5, None, True)]
    words = torch.zeros(8, dtype=torch.int32)
    kinds += [_kind(part) for part in (words, words[1:], words.view(torch.float32))]
    assert len(set(kinds)) == len(kinds)
    assert _kind(32) == _kind(48)
    assert _kind(words[4:]) == _kind(words)


def test_what_triton_could_not_take_is_no_argument() -> None:
    with pytest.raises(TypeError, match="can't be an argument"):
        _kind("a word")


def test_an_argument_after_a_constant_is_an_error() -> None:
    with pytest.raises(TypeError, match="kernel: an argument comes after a constant"):

        @jit()
        def kernel(size: tl.constexpr, out_ptr):
            pass
