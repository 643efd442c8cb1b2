"""Lets tests of the cuda backend run anywhere: without a device, Triton's kernels run in its interpreter, on CPU tensors.

Import it before anything that imports triton, which reads the setting when a kernel is defined.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

MISSING = " and ".join(name for name in ("torch", "triton") if find_spec(name) is None)
"""The modules without which the cuda backend can't be imported."""


def _has_device() -> bool:
    if MISSING:
        return False
    import torch

    return bool(torch.cuda.is_available())


HAS_DEVICE = _has_device()
DEVICE = "cuda" if HAS_DEVICE else "cpu"
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"


def compiling() -> dict[str, str]:
    """The environment of a program that compiles kernels, and imports what tests do."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return environment | {"PYTHONPATH": os.pathsep.join(sys.path)}


def _mend_interpreter() -> None:
    """Three things that Triton's interpreter gets wrong.

    Its scalars are arrays of one number, which NumPy 2.4 takes for no bound of a range. Its products are BLAS's: their
    bits depend on where in a tile a row is, and of bf16 they multiply the bit patterns. Here they become sums in float64,
    rounded once. And its `fma` rounds the product, which no device does.
    """
    import numpy as np
    from triton import language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def numbers(handle):
        if handle.dtype == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return handle.data.astype(np.float64)

    def create_dot(builder, a, b, d, input_precision, max_num_imprecise_acc):
        total = (np.matmul(numbers(a), numbers(b)) + d.data).astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    def create_fma(builder, x, y, z):
        total = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    interpreter.InterpreterBuilder.create_fma = create_fma
    interpreter.InterpreterBuilder.create_dot = create_dot


if not MISSING and not HAS_DEVICE:
    import torch

    torch.set_num_threads(1)  # tensors are tiny, and threads that wait for work spin
    _mend_interpreter()
