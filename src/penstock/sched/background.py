"""When background requests run: their share of the time, and whether they leave the machine to other models."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.types.stats import EngineLoad, StepCounts

MEMORY_NS = 1_000_000_000
"""The time owed to background requests, or used in advance, is at most their share of this time."""
PAUSE_NS = 20_000_000
"""After a step with people's requests, other models start no background step for this long."""


class Share:
    """Tracks the time owed to background requests, if a minimum share is set for them."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._owed_ns = 0.0
        self._counted_until_ns: int | None = None
        """None: there was no background request."""

    @property
    def is_owed(self) -> bool:
        return self._owed_ns > 0

    def pass_time(self, now_ns: int, *, has_work: bool) -> None:
        """Count the time since the last call, also if other models had it. `has_work`: background requests run or wait."""
        if not self._share:
            return
        if has_work and self._counted_until_ns is not None:
            self._owe(self._share * (now_ns - self._counted_until_ns))
        elif not has_work:
            self._owed_ns = 0.0
        self._counted_until_ns = now_ns if has_work else None

    def count(self, duration_ns: int, counts: StepCounts) -> None:
        """Charge background requests for a step, by their share of its tokens."""
        if self._share:
            self._owe(-duration_ns * counts.num_background_tokens / max(1, counts.num_tokens))

    def _owe(self, more_ns: float) -> None:
        limit_ns = self._share * MEMORY_NS
        self._owed_ns = min(max(self._owed_ns + more_ns, -limit_ns), limit_ns)


def serve_people(loads: Iterable[EngineLoad], now_ns: int) -> bool:
    """Return whether one of these models has requests other than background ones, or had some within `PAUSE_NS`."""
    return any(load.num_running or load.num_waiting or now_ns - load.served_ns < PAUSE_NS for load in loads)
