"""Simulations of a config's routes and pipelines, for `penstock simulate --route`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from penstock.config.pipelines import PipelineConfig
from penstock.config.routes import AgreementConfig, EnsembleConfig, FallbackConfig, LearnedConfig
from penstock.config.routing import Routing
from penstock.config.upstreams import UpstreamConfig
from penstock.lab.distant import Distant
from penstock.lab.route_simulation import Judged, RouteSimulation, Strategy
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
    """`fallback`, `learned`, `pipeline`, `agreement`, `verifier` or `ensemble`."""
    route: LearnedRoute | None = None
    judged: Judged | None = None

    @property
    def scores(self) -> tuple[str, ...]:
        """The scores that each question must have."""
        if self.judged is not None:
            return ("confidence",) if self.judged.judge or not self.judged.both else ()
        if self.route is None:
            return ()
        return ("gain",) if self.route.cascade is None else ("gain", "start_gain")


def wanted_of(name: str, routing: Routing) -> Wanted:
    """Find a route or a pipeline by its name. Raises ConfigError."""
    if pipeline := next((one for one in routing.pipelines if one.name == name), None):
        return Wanted(models={_only_model(pipeline, routing): "strong"}, by="pipeline")
    config = next((one for one in routing.routes if one.name == name), None)
    if config is None:
        known = ", ".join([one.name for one in routing.routes] + [one.name for one in routing.pipelines]) or "none"
        raise ConfigError(f"The config file has no route or pipeline {name!r}.", remedy=f"It has {known}.")
    by = config.by
    if isinstance(by, FallbackConfig | EnsembleConfig) and len(by.models) != 2:
        raise ConfigError(f"{name} has {len(by.models)} models, and scores are of two.", remedy="Simulate two.")
    if isinstance(by, FallbackConfig):
        first, second = by.models
        return Wanted(models={second: "weak", first: "strong"}, by="fallback")
    if isinstance(by, EnsembleConfig):
        if by.reranker is not None:
            raise ConfigError(f"{name} has a reranker, which is not simulated.", remedy="Simulate it with a judge.")
        models = dict(zip(by.models, ("weak", "strong"), strict=True))
        # Of two different answers without a judge, the first model's is kept.
        least, judge = (0.0, None) if by.judge is None else (0.5, _judge(by.judge, models, name))
        return Wanted(models=models, by="ensemble", judged=Judged(least=least, both=True, judge=judge))
    models = {by.weak: "weak", by.strong: "strong"}
    if isinstance(by, LearnedConfig):
        return Wanted(models=models, by="learned", route=read_route(Path(by.file)))
    if isinstance(by, AgreementConfig):
        return Wanted(models=models, by="agreement", judged=Judged(least=by.least, samples=by.samples))
    return Wanted(models=models, by="verifier", judged=Judged(least=by.least, judge=_judge(by.verifier, models, name)))


def _only_model(pipeline: PipelineConfig, routing: Routing) -> str:
    for part, what in ((pipeline.reranker, "a reranker"), (pipeline.check, "a check")):
        if part is not None:
            raise ConfigError(f"{pipeline.name} has {what}, which is not simulated.", remedy="Simulate it without one.")
    if any(one.name == pipeline.model for one in routing.routes):
        raise ConfigError(f"{pipeline.name} is over a route.", remedy=f"Simulate {pipeline.model}.")
    return pipeline.model


def _judge(judge: str | None, models: Mapping[str, str], name: str) -> str | None:
    if judge is not None and judge not in models:
        raise ConfigError(f"{name} asks a third model, {judge}, and scores are of two.", remedy="Name one of the two.")
    return judge


def strategies_of(wanted: Wanted, questions: Sequence[Question], shares: Sequence[float], search_ns: int) -> list[Strategy]:
    """Return the strategies to compare: each model alone, a fallback, and the route.

    A learned route is simulated at each share, a cascade also without first tokens. That variant needs other thresholds,
    which come from the recorded gains. A route by confidence is simulated at its configured level, and at the levels that
    send these shares of the questions to the large model.
    """
    alone = [Strategy(name=name, models=(name,)) for name in wanted.models]
    if wanted.by == "pipeline":
        return [*alone, Strategy(name="pipeline", models=(*wanted.models,), search_ns=search_ns)]
    weak, strong = wanted.models
    found, route, judged = [*alone, Strategy(name="fallback", models=(strong, weak))], wanted.route, wanted.judged
    if judged is not None and judged.both:
        found.append(Strategy(name=wanted.by, models=(weak, strong), judged=judged))
    elif judged is not None:
        confidence = np.array([one.confidence or 0.0 for one in questions])
        levels = {f"{wanted.by} {judged.least:g}": judged.least}
        levels |= {f"{wanted.by} {share:.0%}": float(np.quantile(confidence, share)) for share in shares}
        found += [
            Strategy(name=name, models=(weak, strong), judged=replace(judged, least=least)) for name, least in levels.items()
        ]
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
    is_alone = wanted.by in ("fallback", "pipeline")
    if not own or (not is_alone and next(iter(wanted.models)) in elsewhere):
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
