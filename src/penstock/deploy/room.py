"""The choice of who leaves when another model needs the memory: numbers in, names out. The deployment's keeper asks.

A model that nobody uses goes first, the one that was used longest ago before others. One in use goes when its stay is over:
it has been there for so much longer than a load takes that loads can't come to fill the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_STAY_NS = 10_000_000_000
"""Least time that a model in use stays before it leaves for another."""
MAX_STAY_NS = 60_000_000_000
"""A load that was slow for once, as the machine was busy, must not keep others out for an hour."""
LOADS_PER_STAY = 10
"""A stay between these takes so many times as long as the load before it, so that loads do not fill the time."""
FIRST_USE_NS = 2_000_000_000
"""Time in which those that a model was loaded for may begin to use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenancy:
    """A loaded model as far as it matters to the choice."""

    name: str
    num_bytes: int
    is_used: bool
    """Somebody uses it now."""
    was_used: bool
    """Somebody has used it since it was loaded."""
    used_ns: int
    """When somebody last began or ended to use it."""
    loaded_ns: int
    load_ns: int
    """Time that its load took."""
    is_kept: bool = False
    """It never leaves for another model."""

    @property
    def stays_until_ns(self) -> int:
        """The instant from which it may leave for another."""
        if self.is_used:
            return self.loaded_ns + max(MIN_STAY_NS, min(LOADS_PER_STAY * self.load_ns, MAX_STAY_NS))
        return 0 if self.was_used else self.loaded_ns + FIRST_USE_NS


def room_at_ns(lacking_bytes: int, loaded: Sequence[Tenancy], now_ns: int) -> int:
    """The instant at which so much may leave, as the models are used now; `now_ns` if there is no such instant to wait for."""
    at_ns = now_ns
    for one in sorted([one for one in loaded if not one.is_kept], key=lambda one: one.stays_until_ns):
        if lacking_bytes > 0:
            lacking_bytes -= one.num_bytes
            at_ns = max(now_ns, one.stays_until_ns)
    return at_ns


def leavers(lacking_bytes: int, loaded: Sequence[Tenancy], now_ns: int) -> tuple[str, ...] | int | None:
    """The names of those that make room, the first to leave first; or the instant at which to ask again.

    `lacking_bytes`: > 0, beyond what is free. None: no time alone helps, as too little of the room belongs to these.
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
    for one in reversed(chosen):  # a large one that came last may make the small ones before it needless
        if num_bytes - one.num_bytes >= lacking_bytes:
            chosen.remove(one)
            num_bytes -= one.num_bytes
    return tuple(one.name for one in chosen)
