"""Chooses which models to unload when another model needs the memory. Time is passed in.

Models without requests are unloaded first, the least recently used one before others. A model with requests stays loaded for
much longer than its load took, so that the server does not spend its time on loading. Background requests keep no model loaded
when people want another one, and unload none that people use or have used lately.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from penstock.deploy.running import ModelState, RunningModel, ServedModel, Uses

MIN_STAY_NS = 10_000_000_000
"""Least time that a model in use stays loaded."""
MAX_STAY_NS = 60_000_000_000
"""Longest protected time: one slow load must not keep other models out for an hour."""
LOADS_PER_STAY = 10
"""Between these limits, a model in use stays this many times as long as its load took."""
FIRST_USE_NS = 2_000_000_000
"""Time for the waiting requests to begin to use a newly loaded model, and least time without users before it is unloaded."""
PEOPLE_STAY_NS = 300_000_000_000
"""After a request that is not of the background, a model stays this long before background requests may unload it."""


def room_at_ns(lacking_bytes: int, served: Iterable[ServedModel], now_ns: int) -> int:
    """Return the time from which unloading models can free `lacking_bytes`, or `now_ns` if waiting does not help."""
    at_ns = now_ns
    for one, until_ns in sorted(_stays(served).items(), key=lambda stay: stay[1]):
        if lacking_bytes > 0:
            lacking_bytes -= one.num_bytes
            at_ns = max(now_ns, until_ns)
    return at_ns


def leavers(
    lacking_bytes: int, served: Iterable[ServedModel], now_ns: int, *, for_background: bool = False
) -> tuple[Sequence[ServedModel], int | None]:
    """Return the models to unload, in order, to free `lacking_bytes` (> 0). `for_background`: for background requests alone.

    If not enough can be unloaded yet, return no models, and when to call again, or None if waiting does not help.
    """
    served = [one for one in served if not (for_background and _serves_people(one, now_ns))]
    stays = _stays(served, for_background=for_background)
    chosen: list[ServedModel] = []
    num_bytes = 0
    last_use = partial(_last_use, for_background=for_background)
    for one in sorted([one for one, until_ns in stays.items() if until_ns <= now_ns], key=last_use):
        if num_bytes < lacking_bytes:
            chosen.append(one)
            num_bytes += one.num_bytes
    if num_bytes < lacking_bytes:
        return (), min([until_ns for until_ns in stays.values() if until_ns > now_ns], default=None)
    for one in reversed(chosen):  # a large model chosen last can make smaller ones unnecessary
        if num_bytes - one.num_bytes >= lacking_bytes:
            chosen.remove(one)
            num_bytes -= one.num_bytes
    return chosen, None


def _stays(served: Iterable[ServedModel], *, for_background: bool = False) -> dict[ServedModel, int]:
    """Return, for each loaded model, the time until which it stays loaded even if another one needs its memory."""
    stays: dict[ServedModel, int] = {}
    for one in served:
        running = one.running
        if one.state is not ModelState.LOADED or running is None or one.is_kept:
            continue
        uses = _uses(running, for_background=for_background)
        if uses.num_users:
            stays[one] = one.loaded_ns + max(MIN_STAY_NS, min(LOADS_PER_STAY * one.load_ns, MAX_STAY_NS))
        else:
            stays[one] = 0 if uses.num_uses else uses.used_ns + FIRST_USE_NS
    return stays


def _uses(running: RunningModel, *, for_background: bool) -> Uses:
    """Return the uses that count: people do not wait for background requests."""
    return running.uses if for_background else running.people


def _serves_people(one: ServedModel, now_ns: int) -> bool:
    """Return whether people use the model, or have used it or had it loaded within `PEOPLE_STAY_NS`."""
    people = Uses() if one.running is None else one.running.people
    return people.num_users > 0 or now_ns - people.used_ns < PEOPLE_STAY_NS


def _last_use(one: ServedModel, *, for_background: bool) -> tuple[bool, int, bool, str]:
    """Return a sort key: the model with the lowest key is unloaded first."""
    assert one.running is not None
    uses = _uses(one.running, for_background=for_background)
    is_used = uses.num_users > 0
    return is_used, one.loaded_ns if is_used else uses.used_ns, one.running.uses.num_users > 0, one.name
