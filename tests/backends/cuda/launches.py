"""A program that launches a tiny model's steps on a GPU that is not here, by our launches and by Triton's own.

    python tests/backends/cuda/launches.py

Prints two JSON lists, which should be equal: of each launch the kernel, the grid and the arguments. Not with TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from penstock.backends.cuda.executor import CudaExecutor
from penstock.backends.cuda.kernels.launch import Kernel
from penstock.models import architectures
from penstock.models.gguf import load_gguf
from penstock.testing import sizes_of
from penstock.types.kv_dtype import KvDtype
from penstock.types.plan import AdmitRow, Capacity, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.tiny_models import TinyLlama, write_gguf

CAPACITY = Capacity(num_blocks=40, block_size=16, max_rows=5, max_step_tokens=40, max_model_len=60)
SAMPLING = SamplingParams(seed=4, top_k=20, repetition_penalty=1.2, logprobs=2)
launched: list[Any] = []


class _Utils:
    """The driver's library, as far as Triton asks it before it launches."""

    def load_binary(self, *_: object) -> tuple[int, int, int, int, int]:
        return 1, 1, 32, 0, 1024

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132}


class _Launcher:
    """Notes launches instead."""

    def __init__(self, _: object, metadata: Any) -> None:
        self._name = metadata.name, metadata.hash

    def __call__(self, *arguments: Any) -> None:
        grid, kernel_arguments = arguments[:3], arguments[9:]  # between: stream, function, two of metadata, two hooks
        told = [str((a.shape, a.stride(), a.dtype)) if isinstance(a, torch.Tensor) else str(a) for a in kernel_arguments]
        launched.append([*self._name, grid, told])


class _Driver:
    utils, launcher_cls = _Utils(), _Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device


def steps() -> list[StepPlan]:
    """A prompt, then a decode beside a longer prompt, twice: the second time nothing is new."""
    plans = []
    for turn in range(2):
        a, b = f"a{turn}", f"b{turn}"
        admits = [
            AdmitRow(name, tuple(range(5, 5 + n)), n, blocks, 0, SAMPLING)
            for name, n, blocks in ((a, 4, (1, 2)), (b, 21, (3, 4)))
        ]
        plans.append(StepPlan(3 * turn, 0, (admits[0],), (RowPlan(a, 0, 4, (), True),), ()))
        plans.append(StepPlan(3 * turn + 1, 0, (admits[1],), (RowPlan(a, 4, 1, (), True), RowPlan(b, 0, 21, (), True)), ()))
        plans.append(StepPlan(3 * turn + 2, 0, (), (), (a, b)))
    return plans


def launches_of(executor: CudaExecutor, plans: list[StepPlan]) -> list[Any]:
    for plan in plans:
        executor.collect(executor.submit(plan))
    done = list(launched)
    launched.clear()
    return done


def no_launch(*_: object, **__: object) -> None:
    raise AssertionError("Triton looks a kernel up")


def main() -> None:
    """Steps of int8 keys and values, and deterministic ones of bf16."""
    driver.set_active(_Driver())
    with tempfile.TemporaryDirectory() as folder:
        model = load_gguf(write_gguf(Path(folder) / "tiny.gguf", TinyLlama(num_layers=2), matrix_type="Q8_0"))
    program = architectures.describe(model.spec)
    ours, tritons = [], []
    for kv_dtype, deterministic in ((KvDtype.INT8, False), (KvDtype.BF16, True)):
        modes: dict[str, Any] = {"kv_dtype": kv_dtype, "deterministic": deterministic}
        executor = CudaExecutor(model, program, device="cpu", depth=1, use_graphs=False, **modes, **sizes_of(CAPACITY))
        launches_of(executor, steps())  # compiles
        with patch.object(JITFunction, "run", no_launch):
            ours += launches_of(executor, steps())
        with patch.object(Kernel, "__getitem__", lambda kernel, grid: kernel.jitted[grid]):
            tritons += launches_of(executor, steps())
    print(json.dumps(ours))
    print(json.dumps(tritons))


if __name__ == "__main__":
    main()
