"""How far the expected time to first token is off: a factor that is learned from those who came in. Kept by `door`.

The factor is a quantile, tracked one observation at a time: each that took longer than (expected x factor) raises it by
`STEP`, each other lowers it by as much as makes both balance when 1 in 100 takes longer.
Source: Robbins and Monro, A Stochastic Approximation Method, 1951.
"""

from __future__ import annotations

SHARE_ABOVE = 0.01
STEP = 0.05
FIRST_FACTOR = 1.5
MIN_FACTOR, MAX_FACTOR = 1.1, 4.0


class Margin:
    """One writer: the engine thread."""

    def __init__(self) -> None:
        self.factor = FIRST_FACTOR

    def observe(self, expected_ns: int, real_ns: int) -> None:
        """`expected_ns` > 0 was said at the door; the first token came after `real_ns`."""
        if real_ns > expected_ns * self.factor:
            self.factor = min(MAX_FACTOR, self.factor * (1 + STEP))
        else:
            self.factor = max(MIN_FACTOR, self.factor * (1 - STEP * SHARE_ABOVE / (1 - SHARE_ABOVE)))
