"""The CPU backend: a program lowered once to C++ instructions, a step in one call without the GIL."""

from __future__ import annotations

from typing import TypedDict

KV_TILE = 16
"""Block sizes must be multiples of this (`kKvTile` in native/kernels/kernels.h)."""
LARGEST_HEAD_DIM = 512
"""Columns of a head (`kLargestHeadDim` there)."""


class KernelInfo(TypedDict):
    """The kernels of this build that this machine can run."""

    variants: list[str]
    """Usable instruction-set variants, best first."""
    variant: str
    """The one taken by default."""


def info() -> KernelInfo:
    """Ask the compiled module. Raises ImportError if it was not built."""
    from penstock.backends.native import _native

    variants = _native.usable_variants()
    return {"variants": variants, "variant": variants[0]}
