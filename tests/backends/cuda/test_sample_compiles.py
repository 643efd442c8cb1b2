"""The sampling kernels are right for Triton's compiler, too, which is stricter than its interpreter; it needs no GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from penstock.backends.cuda.kernels import sample

POINTERS = {"logits": "*fp32", "params_f64": "*fp64", "out_logprobs": "*fp64"}
COUNTS = {"row_stride", "table_width"}
CONSTANTS = {"VOCAB_SIZE": 128256, "BLOCK": 4096, "NUM_PIVOTS": 4, "MAX_TOP": 20}
for kernel in (sample.choose, sample.logprobs):
    types = {}
    for name in kernel.arg_names:
        default = "i32" if name in COUNTS else "*i32"
        types[name] = "constexpr" if name in CONSTANTS else POINTERS.get(name, default)
    constants = {name: CONSTANTS[name] for name in kernel.arg_names if name in CONSTANTS}
    source = ASTSource(kernel, types, constexprs=constants)
    triton.compile(source, target=GPUTarget("cuda", CAPABILITY, 32), options={"num_warps": 16})
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile(capability: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = COMPILE.replace("CAPABILITY", str(capability))
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
