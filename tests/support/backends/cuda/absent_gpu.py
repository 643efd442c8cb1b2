"""A GPU that is not here: kernels are compiled for it as a launch on it would, by Triton and ptxas, and none is run.

For programs of their own (`compile_kernels.py`, `attention_sm90.py`): a process in which kernels are the interpreter's can't.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from penstock.backends.cuda.kernels import attention
from penstock.backends.cuda.kernels.launch import Kernel

SHARED_BYTES = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""That a program may have, by compute capability (CUDA C++ Programming Guide)."""
NUM_MULTIPROCESSORS = 132
ASSEMBLERS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
"""`ptxas`, and since Blackwell one that knows it."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one compiled kernel."""

    name: str
    warps: int
    registers: int
    spilled_bytes: int
    """Stored, by one thread."""
    shared_bytes: int
    num_matrix_instructions: int
    """Instructions of warpgroups, which are asynchronous; those of single warps are not counted."""
    is_serialised: bool
    """Whether these wait for each other."""


class AbsentGpu:
    """Takes the place of the device and of every launch, for the rest of the process."""

    def __init__(self, capability: int) -> None:
        if os.environ.get("TRITON_INTERPRET"):
            raise SystemExit("with TRITON_INTERPRET nothing is compiled")
        self.capability = capability
        self.shared_bytes = SHARED_BYTES[capability]
        self._launched: list[Any] = []
        driver.set_active(_Driver(capability))
        # Tensors are the CPU's; their kernels' tiles are to be this device's.
        attention.INTERPRETED = attention.Multiprocessors(NUM_MULTIPROCESSORS, self.shared_bytes)
        run = JITFunction.run

        def compile_instead(function: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            del warmup
            self._launched.append(run(function, *args, grid=grid, warmup=True, **kwargs))
            return self._launched[-1]

        JITFunction.run = compile_instead  # type: ignore[method-assign]
        # What is compiled here can't be launched a second time.
        Kernel.__getitem__ = lambda kernel, grid: kernel.jitted[grid]  # type: ignore[method-assign]

    def kernels(self, launch: Callable[[], object]) -> list[Any]:
        """The kernels that are launched, in order, compiled."""
        self._launched.clear()
        launch()
        return list(self._launched)

    def figures(self, kernel: Any) -> Figures:
        ptx = kernel.asm["ptx"]
        with tempfile.TemporaryDirectory() as directory:
            source = Path(directory) / "kernel.ptx"
            source.write_text(ptx)
            target = f"sm_{self.capability}{'a' if self.capability >= 90 else ''}"
            assembler = ASSEMBLERS / ("ptxas-blackwell" if self.capability >= 100 else "ptxas")
            command = [assembler, "-v", f"--gpu-name={target}", source, "-o", source.with_suffix(".cubin")]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        return Figures(
            kernel.metadata.name,
            warps=kernel.metadata.num_warps,
            registers=int(re.findall(r"Used (\d+) registers", said)[-1]),
            spilled_bytes=int(re.findall(r"(\d+) bytes spill stores", said)[-1]),
            shared_bytes=int(kernel.metadata.shared),
            num_matrix_instructions=ptx.count("wgmma.mma_async"),
            is_serialised="wgmma.mma_async instructions are serialized" in said,
        )


class _Driver:
    """A driver that answers what Triton asks before it compiles."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device
