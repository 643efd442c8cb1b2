"""Every kernel of steps of real shapes is compiled for GPUs that are not here: the interpreter takes what no GPU would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.interpreted import compiling

PROGRAM = Path(__file__).with_name("compile_kernels.py")
KERNELS = {
    "_add_splits_kernel",
    "_expand_kernel",
    "_layer_norm_kernel",
    "_look_up_factors_kernel",
    "_look_up_kernel",
    "_mean_rows_kernel",
    "_matmul_kernel",
    "_multiply_kernel",
    "_rms_norm_kernel",
    "_route_kernel",
    "_shrink_kernel",
    "_sort_kernel",
    "_sum_kernel",
    "_text_attention_kernel",
    "_unit_rows_kernel",
    "_write_kernel",
    "choose",
    "decode_kernel",
    "logprobs",
    "merge_kernel",
    "prefill_kernel",
    "restrict",
}
"""Some of them."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", [80, 86, 89, 90])
def test_kernels_of_real_shapes_compile_and_fit(capability: int) -> None:
    done = subprocess.run(
        [sys.executable, PROGRAM, str(capability)], env=compiling(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    names = [kernel["name"] for kernel in kernels]
    assert set(names) >= KERNELS
    assert names.count("restrict") == 1, "one for lists and for grammars: no request waits for another"
    assert all(kernel["cubin_bytes"] > 0 for kernel in kernels)
    assert [kernel for kernel in kernels if not kernel["fits"]] == []
