"""The share of the time that background requests get at least, if their owner asks for one."""

from __future__ import annotations

from penstock.types.stats import StepCounts

MEMORY_NS = 1_000_000_000
"""Time over which the share is kept: a surplus or a lack of more than this time's share is forgotten."""


class Share:
    def __init__(self, share: float) -> None:
        self._share = share
        self._owed_ns = 0.0

    @property
    def is_owed(self) -> bool:
        return self._owed_ns > 0

    def count(self, duration_ns: int, counts: StepCounts, *, has_work: bool) -> None:
        """Count a step. Its time is divided by tokens, which is about right. `has_work`: background requests run or wait."""
        if not self._share:
            return
        got_ns = duration_ns * counts.num_background_tokens / max(1, counts.num_tokens)
        limit_ns = self._share * MEMORY_NS
        owed_ns = self._owed_ns + self._share * duration_ns - got_ns
        self._owed_ns = min(max(owed_ns, -limit_ns), limit_ns) if has_work else 0.0
