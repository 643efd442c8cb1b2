"""Splits the wait of a request into the reasons for it, for `Metrics` and for explanations.

All waiting requests wait for the resource that the first of them lacks.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from penstock.types.stats import StepStats, WaitReason

MAX_CHANGES = 2048
"""Changes of the reason that are remembered. Time before the oldest change counts for its reason."""

REASONS = tuple(WaitReason)
_INDEX = {reason: idx for idx, reason in enumerate(REASONS)}


@dataclass(frozen=True, slots=True)
class WaitMark:
    """The queue's total waiting times at an instant."""

    at_ns: int
    totals_ns: tuple[int, ...]
    """In the order of `REASONS`."""

    def since(self, earlier: WaitMark) -> tuple[int, ...]:
        """Return the waiting time since `earlier`, in the order of `REASONS`."""
        return tuple([max(0, late - early) for late, early in zip(self.totals_ns, earlier.totals_ns, strict=True)])


class Waits:
    """The reasons why the queue has waited, and since when."""

    def __init__(self) -> None:
        self._reasons = [WaitReason.NOTHING]
        self._since_ns = [0]
        """Since when the queue lacked each of `_reasons`, ascending."""
        self._totals_ns = [(0,) * len(REASONS)]
        """For each of `_since_ns`: the total time up to then of each reason, in the order of `REASONS`."""
        self._ended_ns = 0

    @property
    def reason(self) -> WaitReason:
        """The reason why the queue waits now."""
        return self._reasons[-1]

    def on_step(self, stats: StepStats) -> None:
        """Record what the queue lacked between steps, and since this step was planned."""
        self.lack(stats.counts.waited_for, self._ended_ns)
        self.lack(stats.counts.waits_for, stats.planned_ns)
        self._ended_ns = stats.ended_ns

    def split(self, from_ns: int, to_ns: int) -> dict[WaitReason, int]:
        """Return the time between two instants by what the queue lacked."""
        to_ns = max(from_ns, to_ns)
        if from_ns >= self._since_ns[-1]:
            return {self._reasons[-1]: to_ns - from_ns}
        times_ns = self.mark(to_ns).since(self.mark(from_ns))
        return {reason: time_ns for reason, time_ns in zip(REASONS, times_ns, strict=True) if time_ns}

    def lack(self, reason: WaitReason, at_ns: int) -> None:
        """Set the reason why the queue waits from now on."""
        if reason is self._reasons[-1]:
            return
        at_ns = max(at_ns, self._since_ns[-1])  # plans of a cluster's replicas come out of order
        self._totals_ns.append(self.mark(at_ns).totals_ns)
        self._since_ns.append(at_ns)
        self._reasons.append(reason)
        if len(self._reasons) > MAX_CHANGES:
            for entries in (self._reasons, self._since_ns, self._totals_ns):
                del entries[: MAX_CHANGES // 2]

    def mark(self, at_ns: int) -> WaitMark:
        """Return the totals at an instant, even a past one."""
        idx = max(0, bisect_right(self._since_ns, at_ns) - 1)
        totals_ns = list(self._totals_ns[idx])
        totals_ns[_INDEX[self._reasons[idx]]] += at_ns - self._since_ns[idx]
        return WaitMark(at_ns, tuple(totals_ns))
