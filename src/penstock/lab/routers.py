"""Routers of the simulator: they choose a replica for each request. Users can add a class with the method `choose`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from penstock.sched.policies.own import load, make
from penstock.types.errors import ConfigError
from penstock.types.stats import EngineLoad

MAX_REMEMBERED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The facts of an arriving request by which a router chooses its replica."""

    index: int
    now_ns: int
    num_prompt_tokens: int
    tenant: str
    priority: int
    blocks: Sequence[int]
    """Names of the prompt's blocks: equal names at equal positions mean equal tokens. A conversation without blocks has one
    name of its own."""


class Router(Protocol):
    """Interface of an object that chooses a replica for each request. Each run makes a new router, so it can keep state."""

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int: ...


class RoundRobin:
    def __init__(self) -> None:
        self._next = 0

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del arrival
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastLoaded:
    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del arrival
        return min(range(len(loads)), key=lambda number: (_num_requests(loads[number]), loads[number].num_prompt_tokens))


class PrefixAffine:
    """Chooses the replica that last got the longest prefix of the prompt, else the least loaded one.

    A replica with more than `bound` times the mean number of requests in flight is skipped, so that a popular prefix does not
    overload it (Mirrokni, Thorup, Zadimoghaddam, Consistent Hashing with Bounded Loads, SODA 2018).
    """

    def __init__(self, *, bound: float = 1.25) -> None:
        if bound < 1:
            raise ConfigError(f"bound {bound:g} is less than 1: no replica could take its share.", remedy="Raise it.")
        self._bound = bound
        self._places: OrderedDict[int, int] = OrderedDict()

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        limit = self._bound * (sum(map(_num_requests, loads)) + 1) / len(loads)
        keys, chain = [], 0
        for block in arrival.blocks:
            chain = hash((chain, block))
            keys.append(chain)
        num_found = [0] * len(loads)
        places = [self._places.get(key) for key in keys]
        for depth, place in enumerate(places, start=1):
            if place is None:
                break
            num_found[place] = depth
        allowed = [number for number, load in enumerate(loads) if _num_requests(load) + 1 <= limit] or range(len(loads))
        chosen = min(allowed, key=lambda number: (-num_found[number], _num_requests(loads[number]), number))
        for key in keys:
            self._places[key] = chosen
            self._places.move_to_end(key)
        while len(self._places) > MAX_REMEMBERED:
            self._places.popitem(last=False)
        return chosen


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix": PrefixAffine,
}


def find_router(name: str) -> Callable[[], Router]:
    """Return a factory for a router: a name in `ROUTERS`, `package.module:Class` or `./file.py:Class`. Raises ConfigError."""
    if name in ROUTERS:
        return ROUTERS[name]
    if ":" not in name:
        own = "or a class of your own, as package.module:Class or ./file.py:Class"
        raise ConfigError(f"There is no router {name!r}.", remedy=f"There are {', '.join(ROUTERS)}; {own}.")
    factory = load("router", name)
    if not callable(getattr(factory, "choose", None)):
        raise ConfigError(f"The router {name!r} has no method choose(arrival, loads).", remedy="docs/simulate.md shows one.")
    return lambda: cast("Router", make("router", name, factory, {}))


def _num_requests(load: EngineLoad) -> int:
    return load.num_running + load.num_waiting
