"""The variants of the native kernels that this machine can test: those that it can run, and those that it emulates, slowly."""

from __future__ import annotations

from penstock.backends.native._native import emulated_variants, usable_variants

VARIANTS: list[str] = [*usable_variants(), *emulated_variants()]
"""The first one is taken by default."""
WITH_TILES = [variant for variant in VARIANTS if variant.startswith("amx")]
"""In these, quantised weights become bf16 and multiply rows in bf16."""
WITHOUT_TILES = [variant for variant in VARIANTS if variant not in WITH_TILES]
"""In these, quantised weights multiply rows as groups of integers."""
ONE_OF_EACH = [WITHOUT_TILES[0], *WITH_TILES[:1]]
"""The fastest one for each of the two."""
