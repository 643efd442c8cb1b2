"""The CPU backend: a program lowered once to C++ instructions, a step in one call without the GIL."""

from __future__ import annotations


def info() -> dict[str, object]:
    """What this build offers on this machine: `variants` (usable, best first) and `variant` (the one taken by default)."""
    from penstock.backends.native import _native

    variants = _native.usable_variants()
    return {"variants": variants, "variant": variants[0]}
