"""Lets tests of the cuda backend run anywhere: without a device, Triton's kernels run in its interpreter, on CPU tensors.

Import it before anything that imports triton, which reads the setting when a kernel is defined.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

MISSING = " and ".join(name for name in ("torch", "triton") if find_spec(name) is None)
"""What the cuda backend can't be imported without."""


def _has_device() -> bool:
    if MISSING:
        return False
    import torch

    return bool(torch.cuda.is_available())


HAS_DEVICE = _has_device()
DEVICE = "cuda" if HAS_DEVICE else "cpu"
if not HAS_DEVICE:
    os.environ["TRITON_INTERPRET"] = "1"
