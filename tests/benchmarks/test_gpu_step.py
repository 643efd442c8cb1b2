"""The benchmark of steps on a GPU: what it counts, that it runs, and what it says without a GPU."""

import subprocess
import sys
from pathlib import Path

import pytest
from gpu_shapes import SHAPES
from gpu_work import ModelWork
from step_shape import parse_step

from penstock.models.formats import WeightFormat
from support.interpreted import HAS_DEVICE

ROOT = Path(__file__).parents[2]


def run(*words):
    command = [sys.executable, "benchmarks/gpu_step.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


def test_a_decode_reads_the_weights_and_the_kv():
    """Llama-3.1-8B in bf16: 7.5e9 weights that multiply, and 131072 bytes of KV for a position."""
    work = ModelWork(SHAPES["8b"], WeightFormat.BF16)
    num_bytes = work.of_step(parse_step("64x1@1023")).num_bytes
    assert num_bytes == pytest.approx(2 * 7.5e9 + 64 * 1024 * 131072, rel=0.01)


def test_a_prompt_multiplies_with_every_weight_but_the_last_matrix_and_attends_to_what_came_before():
    shape = SHAPES["8b"]
    work = ModelWork(shape, WeightFormat.BF16)
    head = shape.vocab_size * shape.hidden_size
    alone = 2 * (shape.num_weights - head) * 2048 + 2 * head
    attention = 4 * (2048 * 2049 / 2) * 32 * 4096
    assert work.of_step(parse_step("1x2048@0")).operations == pytest.approx(alone + attention)
    assert work.of_step(parse_step("1x2048@1000")).operations == pytest.approx(alone + attention + 4 * 2048 * 1000 * 32 * 4096)


@pytest.mark.skipif(HAS_DEVICE, reason="there is a GPU")
def test_without_a_gpu_it_says_why_and_ends_with_one():
    done = run()
    assert done.returncode == 1
    assert "NVIDIA GPU" in done.stderr


def test_a_decode_in_fp8_reads_a_byte_for_a_weight_but_of_the_logits():
    shape = SHAPES["8b"]
    table = shape.vocab_size * shape.hidden_size
    step = parse_step("1x1@0")
    narrow, wide = (ModelWork(shape, fmt).of_step(step).num_bytes for fmt in (WeightFormat.F8_E4M3, WeightFormat.BF16))
    assert wide - narrow == shape.num_weights - table


@pytest.mark.parametrize("fmt", ["BF16", "F8_E4M3"])
def test_it_runs_on_a_tiny_shape(fmt, self_tested):
    found = self_tested("gpu_step") if fmt == "BF16" else self_tested("gpu_step", "--depths", "2", "--format", fmt)
    assert {(step["step"], step["format"]) for step in found["steps"]} == {("2x1@3", fmt), ("1x4@0", fmt)}
    assert all(0 < step["device_ms"] <= step["step_ms"] * 1.05 for step in found["steps"])


def test_it_runs_with_masks_that_come_after_each_step(self_tested):
    found = self_tested("gpu_step", "--sampling", "masks")
    assert {(step["sampling"], step["depth"]) for step in found["steps"]} == {("masks", 1), ("masks", 2)}
