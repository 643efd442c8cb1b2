"""The choice of the models that leave when another one needs the memory. Pure: numbers in, names out.

Unused models leave first, the least recently used one first. A used one may leave after a stay that is much longer than its
load took, so that loads can't fill the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_STAY_NS = 10_000_000_000
"""Least time that a used model stays before it leaves for another."""
MAX_STAY_NS = 60_000_000_000
"""Longest such time: one slow load must not keep others out for an hour."""
LOADS_PER_STAY = 10
"""A stay between these limits takes this many times as long as the load before it."""
FIRST_USE_NS = 2_000_000_000
"""Time in which the requests that a model was loaded for may begin to use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A loaded model, as far as the choice depends on it."""

    name: str
    num_bytes: int
    is_used: bool
    was_used: bool
    """It was used since it was loaded."""
    used_ns: int
    """When a use last began or ended."""
    loaded_ns: int
    load_ns: int
    """Time that its load took."""
    is_kept: bool = False
    """It never leaves for another model."""

    @property
    def stays_until_ns(self) -> int:
        """When it may leave for another."""
        if self.is_used:
            return self.loaded_ns + max(MIN_STAY_NS, min(LOADS_PER_STAY * self.load_ns, MAX_STAY_NS))
        return 0 if self.was_used else self.loaded_ns + FIRST_USE_NS


def room_at_ns(lacking_bytes: int, loaded: Sequence[Tenancy], now_ns: int) -> int:
    """Return when so many bytes may leave, as the models are used now; `now_ns` if waiting does not help."""
    at_ns = now_ns
    for one in sorted([one for one in loaded if not one.is_kept], key=lambda one: one.stays_until_ns):
        if lacking_bytes > 0:
            lacking_bytes -= one.num_bytes
            at_ns = max(now_ns, one.stays_until_ns)
    return at_ns


def leavers(lacking_bytes: int, loaded: Sequence[Tenancy], now_ns: int) -> tuple[str, ...] | int | None:
    """Return the names of the models that leave, in order, or the instant at which to ask again, or None: waiting won't help.

    `lacking_bytes`: > 0, beyond what is free.
    """
    movable = [one for one in loaded if not one.is_kept]
    willing = sorted(
        [one for one in movable if one.stays_until_ns <= now_ns],
        key=lambda one: (one.is_used, one.loaded_ns if one.is_used else one.used_ns, one.name),
    )
    chosen: list[Tenancy] = []
    num_bytes = 0
    for one in willing:
        if num_bytes < lacking_bytes:
            chosen.append(one)
            num_bytes += one.num_bytes
    if num_bytes < lacking_bytes:
        return min([one.stays_until_ns for one in movable if one.stays_until_ns > now_ns], default=None)
    for one in reversed(chosen):  # a large last one may make small ones before it needless
        if num_bytes - one.num_bytes >= lacking_bytes:
            chosen.remove(one)
            num_bytes -= one.num_bytes
    return tuple(one.name for one in chosen)
