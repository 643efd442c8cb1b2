"""Random adapters of a program, for tests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.models.adapter import AdapterFactors, sites
from penstock.models.program import Program


def random_factors(
    program: Program, rank: int, *, seed: int = 0, strength: float = 0.15, wanted: Callable[[str], bool] = lambda _: True
) -> AdapterFactors:
    """Factors of the sites that are `wanted`, whose product's entries are about `strength` / sqrt(in)."""
    rng = np.random.default_rng((seed, rank))
    found = {}
    for site, (num_out, num_in) in sites(program).items():
        a = rng.standard_normal((rank, num_in)).astype(np.float32) / np.sqrt(np.float32(num_in))
        b = rng.standard_normal((num_out, rank)).astype(np.float32) * np.float32(strength / np.sqrt(rank))
        if wanted(site):
            found[site] = a, b
    return AdapterFactors(found)
