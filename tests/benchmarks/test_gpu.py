"""The parts of the GPU backend's benchmarks, and their messages without a GPU."""

import subprocess
import sys
from pathlib import Path

import gpu_serve
import numpy as np
import pytest
from gpu_shapes import SHAPES, prompts, random_model, sharegpt_lengths

from penstock.models.architectures import describe
from penstock.models.formats import WeightFormat
from support.interpreted import HAS_DEVICE

ROOT = Path(__file__).parents[2]


def run(*words):
    command = [sys.executable, "benchmarks/gpu_serve.py", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)


@pytest.mark.parametrize("fmt", [WeightFormat.BF16, WeightFormat.Q8_0, WeightFormat.Q4_0])
def test_random_weights_are_as_large_as_those_of_models(fmt):
    model = random_model(SHAPES["tiny"], fmt)
    describe(model.spec)
    for name in ("embed", "layers.1.down"):
        values = model.weights[name].dequantize()
        assert values.std() == pytest.approx(0.02, rel=0.3)
        assert np.abs(values.mean()) < 0.01


@pytest.mark.parametrize(("name", "num_weights"), [("135m", 134e6), ("1.5b", 1.54e9), ("8b", 7.5e9)])
def test_shapes_are_those_of_the_models(name, num_weights):
    """Without a table of embeddings that is not the output matrix, too."""
    assert SHAPES[name].num_weights == pytest.approx(num_weights, rel=0.01)


def test_lengths_are_those_of_sharegpt_and_begin_again():
    lengths = sharegpt_lengths(513)
    assert lengths[512] == lengths[0] == (33, 200)
    assert max(num_prompt for num_prompt, _ in lengths) <= 512
    assert max(num_reply for _, num_reply in lengths) <= 200


def test_no_two_prompts_begin_alike():
    made = prompts(sharegpt_lengths(100), vocab_size=49152)
    assert len({prompt[:4] for prompt in made}) == 100


@pytest.mark.skipif(HAS_DEVICE, reason="there is a GPU")
def test_without_a_gpu_it_says_why_and_ends_with_one():
    done = run()
    assert done.returncode == 1
    assert done.stderr.startswith("This benchmark measures an NVIDIA GPU, and there is none to use: ")


def test_it_runs_on_a_tiny_shape(self_tested):
    found = self_tested("gpu_serve")["shapes"]["tiny"]
    assert found["penstock"]["output_tokens_per_s"] > 0
    assert found["penstock"]["first"]["output_tokens_per_s"] > 0
    assert found["bound"]["operations"] > 0


def test_the_first_run_after_a_start_is_told_apart():
    class Engine:
        attention = "its own"
        num_replays = 0

        def replay(self, jobs):
            self.num_replays += 1
            return gpu_serve.Run(self.num_replays, len(jobs), [])

        def close(self):
            pass

    attention, first, runs = gpu_serve.measure(Engine, [((1,), 1)] * 100, 3)
    assert (attention, first["seconds"]) == ("its own", 1), "nothing was asked before it"
    assert [run["seconds"] for run in runs] == [2, 3, 4]


def test_transformers_does_not_find_our_scripts_among_its_packages(tmp_path):
    """It looks for a package `kernels`, which is no dependency of it; a benchmark has that name."""
    (tmp_path / "transformers.py").write_text(
        "from importlib.util import find_spec\n"
        "class GenerationMixin:\n"
        "    continuous_batching_context_manager = None\n"
        "found = [name for name in ('kernels', 'peers') if find_spec(name)]\n"
        "assert not found, found\n"
    )
    program = f"import sys; sys.path[:0] = ['benchmarks', {str(tmp_path)!r}]; import gpu_serve; print(gpu_serve.why_no_peer())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.stdout == "None\n", done.stderr
