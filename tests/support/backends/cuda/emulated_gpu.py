"""A GPU that is emulated as far as the composition root asks: kernels run in Triton's interpreter, on CPU tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.backends import cuda
from penstock.backends.cuda import memory
from penstock.deploy import executor as executor_part
from penstock.deploy.blueprint import Compute
from support.interpreted import DEVICE, HAS_DEVICE

GIB = 1 << 30


class EmulatedMemory:
    """Memory of a GPU, where weights and steps took a fifth."""

    def __init__(self) -> None:
        self._num_read = 0

    def read(self) -> tuple[int, int]:
        self._num_read += 1
        return (10 if self._num_read == 1 else 8) * GIB, 10 * GIB


def emulate_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runtimes on a GPU compute in float32, for the reference's answers, and without a GPU on an emulated one."""
    extras = executor_part._gpu_extras

    def exactly(compute: Compute) -> dict[str, Any]:
        return {**extras(compute), "device": DEVICE, "dtype": torch.float32}

    monkeypatch.setattr(executor_part, "_gpu_extras", exactly)
    if HAS_DEVICE:
        return
    monkeypatch.setattr(cuda, "why_not", lambda: None)
    monkeypatch.setattr(cuda, "find_gpu", lambda: cuda.Gpu("Emulated", (9, 0), 10 * GIB, 1))
    monkeypatch.setattr(memory, "GpuMemory", EmulatedMemory)
