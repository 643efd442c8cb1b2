"""The choice of the models that leave when another one needs the memory. Time is passed in.

Unused models leave first, the least recently used one first. A used one may leave after a stay that is much longer than its
load took, so that loads can't fill the time.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.deploy.served import ModelState, ServedModel

MIN_STAY_NS = 10_000_000_000
"""Least time that a used model stays before it leaves for another."""
MAX_STAY_NS = 60_000_000_000
"""Longest such time: one slow load must not keep others out for an hour."""
LOADS_PER_STAY = 10
"""A stay between these limits takes this many times as long as the load before it."""
FIRST_USE_NS = 2_000_000_000
"""Time in which the requests that a model was loaded for may begin to use it."""


def room_at_ns(lacking_bytes: int, served: Iterable[ServedModel], now_ns: int) -> int:
    """Return when so many bytes may leave, as the models are used now; `now_ns` if waiting does not help."""
    at_ns = now_ns
    for one, until_ns in sorted(_stays(served).items(), key=lambda stay: stay[1]):
        if lacking_bytes > 0:
            lacking_bytes -= one.num_bytes
            at_ns = max(now_ns, until_ns)
    return at_ns


def leavers(lacking_bytes: int, served: Iterable[ServedModel], now_ns: int) -> tuple[ServedModel, ...] | int | None:
    """Return the models that leave, in order, or the instant at which to ask again, or None: waiting won't help.

    For the keeper. `lacking_bytes`: > 0, beyond what is free.
    """
    stays = _stays(served)
    chosen: list[ServedModel] = []
    num_bytes = 0
    for one in sorted([one for one, until_ns in stays.items() if until_ns <= now_ns], key=_last_use):
        if num_bytes < lacking_bytes:
            chosen.append(one)
            num_bytes += one.num_bytes
    if num_bytes < lacking_bytes:
        return min([until_ns for until_ns in stays.values() if until_ns > now_ns], default=None)
    for one in reversed(chosen):  # a large last one may make small ones before it needless
        if num_bytes - one.num_bytes >= lacking_bytes:
            chosen.remove(one)
            num_bytes -= one.num_bytes
    return tuple(chosen)


def _stays(served: Iterable[ServedModel]) -> dict[ServedModel, int]:
    """Return the loaded models that may leave for another one, and when."""
    stays: dict[ServedModel, int] = {}
    for one in served:
        running = one.running
        if one.state is not ModelState.LOADED or running is None or one.is_kept:
            continue
        if running.num_users:
            stays[one] = one.loaded_ns + max(MIN_STAY_NS, min(LOADS_PER_STAY * one.load_ns, MAX_STAY_NS))
        else:
            stays[one] = 0 if running.num_uses else one.loaded_ns + FIRST_USE_NS
    return stays


def _last_use(one: ServedModel) -> tuple[bool, int, str]:
    """Return the order in which models leave."""
    assert one.running is not None
    is_used = one.running.num_users > 0
    return is_used, one.loaded_ns if is_used else one.running.used_ns, one.name
