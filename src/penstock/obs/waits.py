"""Splits the wait of a request into the reasons for it, for `Metrics`.

As in explanations (`obs/explain/lives.py`), all waiting requests wait for the resource that the first of them lacks.
"""

from __future__ import annotations

from bisect import bisect_right

from penstock.types.stats import StepStats, WaitReason

MAX_CHANGES = 2048
"""Changes of the reason that are remembered. A wait that began before the oldest has that one's reason until then."""

REASONS = tuple(WaitReason)
_INDEX = {reason: idx for idx, reason in enumerate(REASONS)}


class Waits:
    """The reasons why the queue has waited, and since when."""

    def __init__(self) -> None:
        self._reasons = [WaitReason.NOTHING]
        self._since_ns = [0]
        """Since when the queue lacked each of `_reasons`, ascending."""
        self._totals_ns = [(0,) * len(REASONS)]
        """The time of each of `REASONS` up to each of `_since_ns`."""
        self._ended_ns = 0

    def on_step(self, stats: StepStats) -> None:
        """Take over what the queue lacked while no step ran, and since this one was planned."""
        if stats.counts.waited_for is not self._reasons[-1]:
            self._lack(stats.counts.waited_for, self._ended_ns)
        if stats.counts.waits_for is not self._reasons[-1]:
            self._lack(stats.counts.waits_for, stats.planned_ns)
        self._ended_ns = stats.ended_ns

    def split(self, from_ns: int, to_ns: int) -> dict[WaitReason, int]:
        """Return the time between two instants by what the queue lacked."""
        to_ns = max(from_ns, to_ns)
        if from_ns >= self._since_ns[-1]:
            return {self._reasons[-1]: to_ns - from_ns}
        begun, ended = self._totals_at(from_ns), self._totals_at(to_ns)
        return {reason: late - early for reason, late, early in zip(REASONS, ended, begun, strict=True) if late > early}

    def _lack(self, reason: WaitReason, at_ns: int) -> None:
        at_ns = max(at_ns, self._since_ns[-1])  # plans of a cluster's replicas come out of order
        self._totals_ns.append(tuple(self._totals_at(at_ns)))
        self._since_ns.append(at_ns)
        self._reasons.append(reason)
        if len(self._reasons) > MAX_CHANGES:
            for entries in (self._reasons, self._since_ns, self._totals_ns):
                del entries[: MAX_CHANGES // 2]

    def _totals_at(self, at_ns: int) -> list[int]:
        idx = max(0, bisect_right(self._since_ns, at_ns) - 1)
        totals_ns = list(self._totals_ns[idx])
        totals_ns[_INDEX[self._reasons[idx]]] += at_ns - self._since_ns[idx]
        return totals_ns
