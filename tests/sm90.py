"""What Triton's compiler and ptxas make of a launch for an H100 or H200, without having one: run in a process of its own.

`compiled` stands in for the launch: kernels are compiled for the tensors, numbers and options that they were called with, and
none is run. Not in the interpreter: a process that has imported `interpreted` can't.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.bool: "i1",
}
ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel of a launch."""

    name: str
    registers: int
    spilled_bytes: int
    """Stored, by one thread."""
    shared_bytes: int
    num_matrix_instructions: int
    """Of warpgroups, which are asynchronous; those of single warps are not counted."""
    is_serialised: bool
    """Whether these wait for each other."""


def compiled(launch: Callable[[], object]) -> list[Compiled]:
    """What is launched, in order."""
    found: list[Compiled] = []

    def compile_instead(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        del grid, warmup
        found.append(_compile(kernel, args, kwargs))

    run = JITFunction.run
    JITFunction.run = compile_instead
    try:
        launch()
    finally:
        JITFunction.run = run
    return found


def _compile(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Compiled:
    options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in kwargs.items() if k not in options}
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values.get(param.name, param.default)
        is_one = isinstance(value, int) and value == 1 and not param.do_not_specialize
        if param.is_constexpr or value is None or is_one:
            signature[param.name] = "constexpr"
            constants[param.name] = value
            continue
        signature[param.name] = _type_name(value)
        is_aligned = isinstance(value, torch.Tensor) or (isinstance(value, int) and value % ALIGNMENT == 0)
        if is_aligned and not param.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", ALIGNMENT]]
    made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=TARGET, options=options)
    return _figures(kernel.__name__, made)


def _type_name(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return "*" + NAMES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _figures(name: str, made: Any) -> Compiled:
    ptx = made.asm["ptx"]
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "kernel.ptx"
        source.write_text(ptx)
        command = [PTXAS, "-v", "--gpu-name=sm_90a", source, "-o", source.with_suffix(".cubin")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Compiled(
        name,
        registers=int(re.findall(r"Used (\d+) registers", said)[-1]),
        spilled_bytes=int(re.findall(r"(\d+) bytes spill stores", said)[-1]),
        shared_bytes=int(made.metadata.shared),
        num_matrix_instructions=ptx.count("wgmma.mma_async"),
        is_serialised="wgmma.mma_async instructions are serialized" in said,
    )
