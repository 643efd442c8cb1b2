"""Routers: they choose a replica for each request. Users can add a class with the method `choose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from penstock.sched.policies.own import load, make
from penstock.types.errors import ConfigError
from penstock.types.stats import EngineLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The facts of an arriving request by which a router chooses its replica."""

    index: int
    now_ns: int
    num_prompt_tokens: int
    tenant: str
    priority: int
    work: Sequence[int]
    """For each replica, the tokens of prompts and answers that it has yet to compute for the requests it was sent."""
    held: Sequence[int]
    """For each replica, the tokens at the prompt's beginning whose KV it holds, or will once it has its earlier requests."""


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


class LeastWork:
    """Chooses the replica with the fewest tokens left to compute."""

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del loads
        return arrival.work.index(min(arrival.work))


class PrefixAware:
    """Chooses the replica with the fewest tokens left to compute, less twice those of the prompt that it holds.

    Twice, because to compute them elsewhere costs two things: the computation, and the room for a second copy. For that, as
    many tokens of another prefix are evicted, to be computed again. So a popular prefix comes to a second replica once the
    first one is that far behind.
    """

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del loads
        left = [work - 2 * held for work, held in zip(arrival.work, arrival.held, strict=True)]
        return left.index(min(left))


ROUTERS: Mapping[str, Callable[[], Router]] = {
    "round-robin": RoundRobin,
    "least-work": LeastWork,
    "prefix": PrefixAware,
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
