"""Routers: they choose a replica for each request. Users can add a class with the method `choose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from penstock.kv.prefix_cache import Recent
from penstock.sched.policies.own import load, make
from penstock.types.errors import ConfigError
from penstock.types.stats import EngineLoad

MAX_PREFIXES = 4096
"""Prefixes for which it is remembered how long requests waited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """The facts of an arriving request by which a router chooses its replica."""

    index: int
    now_ns: int
    num_prompt_tokens: int
    tenant: str
    priority: int
    work: Sequence[int]
    """Tokens, of prompts and answers, that each replica still has to compute for the requests it was sent. Background requests
    count only for one another."""
    held: Sequence[int]
    """Leading prompt tokens that each replica holds, or will hold after computing the requests it was sent. An adapter that it
    was sent before counts as the tokens that would fit its blocks."""
    prefix: int
    """Name of the longest prompt prefix that any replica holds, or else of the adapter; 0: neither exists."""
    names: Sequence[int] = ()
    """Names of the prompt's whole blocks, each a hash of the prompt up to the block's end."""


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
    """Chooses the replica with the fewest tokens left to compute; of equals, the next in turn."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del loads
        self._last = _least(arrival.work, self._last)
        return self._last


class PrefixAware:
    """Chooses the replica with the fewest tokens left to compute, less twice the prompt tokens that it holds, until requests
    have waited for this prefix as long as another copy takes.

    Twice, because computing them elsewhere costs two things: the computation, and room for a second copy. For that, as
    many tokens of another prefix are evicted, to be computed again.

    A request sent to its prefix although another replica has less work waits for the difference. These waits are added up for
    each prefix. Once the sum exceeds the cost of a copy, the request makes one, on the replica with the least work. This is
    the ski rental rule: rent until you have paid what skis cost (Karlin, Manasse, Rudolph, Sleator, Competitive Snoopy Caching,
    Algorithmica 3, 1988).
    """

    def __init__(self) -> None:
        self._last = -1
        self._waited: Recent[int, int] = Recent(MAX_PREFIXES)
        """Name of a prefix -> tokens that its requests have waited for since it was last computed."""

    def choose(self, arrival: Arrival, loads: Sequence[EngineLoad]) -> int:
        del loads
        work, held = arrival.work, arrival.held
        best = _least([tokens - 2 * of_prompt for tokens, of_prompt in zip(work, held, strict=True)], self._last)
        if (extra := work[best] - min(work)) > 0:
            idlest, waited = _least(work, self._last), (self._waited.get(arrival.prefix) or 0) + extra
            if waited > 2 * (held[best] - held[idlest]):
                best, waited = idlest, 0
            self._waited.put(arrival.prefix, waited)
        self._last = best
        return best


def _least(values: Sequence[int], last: int) -> int:
    """Return the number of the least value; of equals, the next one after `last`."""
    least = min(values)
    return values.index(least, last + 1) if least in values[last + 1 :] else values.index(least)


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
