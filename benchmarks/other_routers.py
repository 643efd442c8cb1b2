"""Rules of other systems as routers, to compare with ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from penstock.sched.routing.routers import Arrival, Router, find_router
from penstock.types.stats import EngineLoad

MIN_MATCH = 0.1


class PowerOfTwo:
    """Chooses the replica with less work of two at random."""

    def __init__(self) -> None:
        self._random = Random(0)

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        two = self._random.sample(range(len(loads)), min(2, len(loads)))
        return min(two, key=arrival.work.__getitem__)


class RayPrefix:
    """The rule of Ray Serve's `PrefixCacheAffinityRouter` with its defaults (read in Ray 2.60), in blocks, not characters.

    It remembers every prompt that it has sent to each replica, also after its KV was evicted. It looks for the longest
    beginning of the new prompt among them. If that is a tenth of the prompt or more, the prompt goes there. Otherwise it goes
    to the replica that was sent the fewest blocks, each counted once. If there are several, two are drawn, and the one with
    fewer requests gets it. Loads count for nothing else: the threshold from which they would is infinite.
    """

    def __init__(self) -> None:
        self._sent: dict[int, set[int]] = {}
        """Name of a block -> the replicas that were sent it."""
        self._sizes: dict[int, int] = {}
        self._random = Random(0)

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        matched, depth = set(range(len(loads))), 0
        for name in arrival.names:
            if not (found := matched & self._sent.get(name, set())):
                break
            matched, depth = found, depth + 1
        if depth < max(1.0, MIN_MATCH * len(arrival.names)):
            sizes = [self._sizes.get(number, 0) for number in range(len(loads))]
            matched = {number for number, size in enumerate(sizes) if size == min(sizes)}
        two = self._random.sample(sorted(matched), min(2, len(matched)))
        chosen = min(two, key=lambda number: loads[number].num_running + loads[number].num_waiting)
        for name in arrival.names:
            replicas = self._sent.setdefault(name, set())
            self._sizes[chosen] = self._sizes.get(chosen, 0) + (chosen not in replicas)
            replicas.add(chosen)
        return chosen


OTHERS: Mapping[str, Callable[[], Router]] = {"power-of-two": PowerOfTwo, "ray": RayPrefix}


def router_of(name: str) -> Callable[[], Router]:
    """Return a factory for a router: of `OTHERS`, or as `find_router`."""
    return OTHERS.get(name) or find_router(name)
