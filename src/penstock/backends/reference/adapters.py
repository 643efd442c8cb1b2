"""Adapters of the reference backend: their factors as float32, in pages that are blocks of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from penstock.models.adapter import AdapterFactors
from penstock.models.program import Program


@dataclass(frozen=True, slots=True, eq=False)
class PagedFactors:
    """An adapter packed into pages of the size of a KV block: A and B of one site after the other."""

    pages: tuple[memoryview, ...]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]  # site -> shapes of A and B

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def num_bytes(self) -> int:
        return sum(page.nbytes for page in self.pages)

    def factors(self, content: bytes) -> AdapterFactors:
        """Return the factors, read back from the joined bytes of all pages."""
        numbers, at = np.frombuffer(content, np.float32), 0
        found = {}
        for site, (a, b) in self.shapes.items():
            middle, end = at + a[0] * a[1], at + a[0] * a[1] + b[0] * b[1]
            found[site] = numbers[at:middle].reshape(a), numbers[middle:end].reshape(b)
            at = end
        return AdapterFactors(found)


def pack_factors(factors: AdapterFactors, program: Program, *, page_bytes: int, max_rank: int) -> PagedFactors:
    """Pack an adapter into pages."""
    assert factors.fits(program, max_rank)
    numbers = b"".join(np.ascontiguousarray(x, np.float32).tobytes() for pair in factors.by_weight.values() for x in pair)
    num_pages = max(1, -(-len(numbers) // page_bytes))
    content = memoryview(numbers.ljust(num_pages * page_bytes, b"\0"))
    pages = tuple(content[i * page_bytes : (i + 1) * page_bytes] for i in range(num_pages))
    return PagedFactors(pages, {site: (a.shape, b.shape) for site, (a, b) in factors.by_weight.items()})
