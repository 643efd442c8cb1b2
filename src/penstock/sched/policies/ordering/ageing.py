"""Ageing for orders that prefer small requests: a size becomes a delay of bounded length. Called by `sjf` and `srpf`; keeps no
state.

Whoever is larger is treated as if it had come later, by less than `max_delay_ns`. All who wait age at the same rate, so
the key needs no growth, and nobody is overtaken by a request that comes `max_delay_ns` after it.
"""

from __future__ import annotations


def delay_ns(size_tokens: int, half_size_tokens: int, max_delay_ns: int) -> int:
    """In [0, max_delay_ns), growing with the size; half of the range lies below `half_size_tokens`."""
    return max_delay_ns * size_tokens // (size_tokens + half_size_tokens)
