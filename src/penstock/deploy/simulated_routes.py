"""Simulations of a config's routes and pipelines, for `penstock simulate --route`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.config.routes import AgreementConfig, FallbackConfig
from penstock.config.routing import Routing
from penstock.config.upstreams import UpstreamConfig
from penstock.lab.distant import Distant
from penstock.lab.route_simulation import RouteSimulation, Strategy
from penstock.lab.simulation import Simulation
from penstock.routes.learned import LearnedRoute, read_route, thresholds_of
from penstock.routes.scores import Question
from penstock.types.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The models of a route or a pipeline."""

    models: Mapping[str, str]
    """Name -> `weak` or `strong`."""
    by: str
    """`fallback`, `learned` or `pipeline`."""
    route: LearnedRoute | None = None


def wanted_of(name: str, routing: Routing) -> Wanted:
    """Find a route or a pipeline by its name. Raises ConfigError."""
    if pipeline := next((one for one in routing.pipelines if one.name == name), None):
        if pipeline.reranker:
            raise ConfigError(f"{name} has a reranker, which is not simulated.", remedy="Simulate it without one.")
        return Wanted(models={pipeline.model: "strong"}, by="pipeline")
    config = next((one for one in routing.routes if one.name == name), None)
    if config is None:
        known = ", ".join([one.name for one in routing.routes] + [one.name for one in routing.pipelines]) or "none"
        raise ConfigError(f"The config file has no route or pipeline {name!r}.", remedy=f"It has {known}.")
    if isinstance(config.by, FallbackConfig):
        if len(config.by.models) != 2:
            raise ConfigError(f"{name} has {len(config.by.models)} models, and scores are of two.", remedy="Simulate two.")
        first, second = config.by.models
        return Wanted(models={second: "weak", first: "strong"}, by="fallback")
    if isinstance(config.by, AgreementConfig):
        raise ConfigError(
            f"{name} decides by the agreement of answers, and scores are of one.", remedy="Simulate another kind of route."
        )
    route = read_route(Path(config.by.file))
    return Wanted(models={config.by.weak: "weak", config.by.strong: "strong"}, by="learned", route=route)


def strategies_of(wanted: Wanted, questions: Sequence[Question], shares: Sequence[float], search_ns: int) -> list[Strategy]:
    """Return what is compared: each model alone, a fallback, and the learned route with and without first tokens.

    The thresholds of a cascade are not for the question alone. Without first tokens, those of the recorded gains stand in.
    """
    alone = [Strategy(name=name, models=(name,)) for name in wanted.models]
    if wanted.by == "pipeline":
        return [*alone, Strategy(name="pipeline", models=(*wanted.models,), search_ns=search_ns)]
    weak, strong = wanted.models
    found, route = [*alone, Strategy(name="fallback", models=(strong, weak))], wanted.route
    if route is not None:
        kinds = {"question": route}
        if route.cascade is not None:
            thresholds = thresholds_of(np.array([one.gain or 0.0 for one in questions]))
            kinds = {"question": replace(route, cascade=None, thresholds=thresholds), "cascade": route}
        found += [
            Strategy(name=f"{kind} {share:.0%}", models=(weak, strong), learned=one, threshold=one.threshold(share))
            for kind, one in kinds.items()
            for share in shares
        ]
    return found


def route_simulation_of(
    wanted: Wanted,
    find: Callable[[str], tuple[Simulation, float]],
    upstreams: Sequence[UpstreamConfig],
    *,
    far: Distant,
    embed_ns: int,
    max_returns: int,
    seed: int,
) -> RouteSimulation:
    """Return the simulated models, which share this machine. Raises ConfigError.

    `find` returns a model of this server, and its share of the machine. `far`: an upstream's times.
    """
    from penstock.backends.native._native import Account, Turns

    elsewhere = {one.name: replace(far, max_concurrent=one.max_concurrent) for one in upstreams if one.name in wanted.models}
    own = {name: find(name) for name in wanted.models if name not in elsewhere}
    if not own or (wanted.by == "learned" and next(iter(wanted.models)) in elsewhere):
        raise ConfigError("The route's weak model is an upstream.", remedy="Name one of this server.")
    shares = {name: share for name, (_, share) in own.items()}
    return RouteSimulation(
        kinds=wanted.models,
        here={name: simulation for name, (simulation, _) in own.items()},
        elsewhere=elsewhere,
        make_turns=Turns,
        make_account=lambda name: Account(shares.get(name, 1.0)),
        embed_ns=embed_ns,
        max_returns=max_returns,
        seed=seed,
    )
