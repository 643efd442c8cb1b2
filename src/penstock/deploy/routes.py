"""Routes of a deployment: names under which one of several models answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.routes import (
    AgreementConfig,
    EnsembleConfig,
    FallbackConfig,
    LearnedConfig,
    RouteConfig,
    VerifierConfig,
    answerers_of,
)
from penstock.routes.prices import Bill, Price
from penstock.types.errors import ConfigError
from penstock.types.stats import RouteStats

if TYPE_CHECKING:  # this imports NumPy, which would delay a server's start
    from penstock.models.catalog import ModelSource
    from penstock.routes.drift import Drift
    from penstock.routes.learned import LearnedRoute

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """The fit of a learned route, which chooses the weak or the strong model by the question."""

    route: LearnedRoute
    threshold: float
    """Least expected gain for which the strong model answers."""
    drift: Drift | None = None
    """Compares recent gains with those of the fit. None if the fit's file does not have them."""

    def note(self, gain: float) -> None:
        """Record the gain that decided a question, to detect drift."""
        if self.drift is not None:
            self.drift.recent.append(gain)

    def gain(self, states: bytes, question: str, start: Sequence[float] | None = None) -> float:
        """Return the expected gain of asking the strong model.

        `states`: the question's embedding, float32, [width]. `start`: log-probabilities of the weak model's first tokens.
        """
        import numpy as np

        from penstock.routes.learned import inputs_of

        vector = np.frombuffer(states, np.float32).astype(np.float64)
        vector /= max(float(np.linalg.norm(vector)), 1e-12)
        if start is None or self.route.cascade is None:
            return float(self.route.by_question.gains(inputs_of(vector[None], [question]))[0])
        return float(self.route.cascade.fit.gains(inputs_of(vector[None], [question], [start]))[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    name: str
    models: tuple[str, ...]
    """The weak and the strong model, all models of an ensemble, or the models to try in turn."""
    learned: Learned | None = None
    by: AgreementConfig | VerifierConfig | EnsembleConfig | None = None
    """If this and `learned` are None, the route is a fallback: models are tried in turn until one does not refuse."""
    bill: Bill | None = None
    """The costs so far, if its models have prices. Written by the event loop."""

    @property
    def judges(self) -> tuple[str, ...]:
        """The model that reads answers, if there is one."""
        if isinstance(self.by, VerifierConfig):
            return (self.by.verifier,)
        return (self.by.judge,) if isinstance(self.by, EnsembleConfig) and self.by.judge else ()

    @property
    def helpers(self) -> tuple[str, ...]:
        """Further models of this server that the route needs: to embed, to judge, to rerank."""
        embedders = () if self.learned is None else (self.learned.route.embedder,)
        rerankers = (self.by.reranker,) if isinstance(self.by, EnsembleConfig) and self.by.reranker else ()
        return (*embedders, *self.judges, *rerankers)


def stats_of(route: Route) -> RouteStats:
    """Return the route's figures for metrics. Call this on the event loop, which writes the bill."""
    bill, drift = route.bill, None if route.learned is None else route.learned.drift
    return RouteStats(
        name=route.name,
        paid={} if bill is None else dict(bill.paid),
        full=0.0 if bill is None else bill.full,
        drift=None if drift is None else drift.distance(),
    )


def open_routes(configs: Sequence[RouteConfig]) -> list[Route]:
    """Read the routes' files. Raises ConfigError."""
    return [_open(config) for config in configs]


def _open(config: RouteConfig) -> Route:
    models, bill = answerers_of(config.by), None
    if config.prices:
        prices = {name: Price(*price) for name, price in config.prices.items()}
        bill = Bill(prices, judges=prices.keys() - {*models})
    if isinstance(config.by, FallbackConfig):
        return Route(name=config.name, models=models, bill=bill)
    if not isinstance(config.by, LearnedConfig):
        return Route(name=config.name, models=models, by=config.by, bill=bill)
    from penstock.routes.drift import Drift
    from penstock.routes.learned import read_route

    route = read_route(Path(config.by.file))
    threshold = route.threshold(config.by.share)
    fitted = route.fitted_gains(threshold)
    learned = Learned(route=route, threshold=threshold, drift=None if fitted is None else Drift(fitted))
    return Route(name=config.name, models=models, learned=learned, bill=bill)


def digest_of(source: ModelSource) -> str:
    """Return a hash of a model's files, by their names, sizes and samples of the content. Raises OSError."""
    from penstock.models.load import fingerprint

    return fingerprint(source.path, has_times=False).hex()[:32]


def digest_faults(route: Route, models: Mapping[str, ModelSource]) -> Iterator[ConfigError]:
    """Yield an error for each local model whose files differ from those at the fit. Skip models that are not downloaded."""
    if route.learned is None:
        return
    learned, weak = route.learned.route, route.models[0]
    names = {learned.embedder: learned.embedder}
    if learned.cascade is not None:
        names[learned.cascade.starter] = weak
    for fitted, name in names.items():
        digest, source = learned.digests.get(fitted), models.get(name)
        if digest is None or source is None or not source.is_present:
            continue
        with suppress(OSError):  # loading the model reports a file that can't be read
            if digest != digest_of(source):
                yield ConfigError(
                    f"The route {route.name} was fitted with another {fitted} than {name} is here: their files differ.",
                    remedy="Fit it anew with `penstock route fit`.",
                )


def warn_of_other_files(routes: Sequence[Route], models: Mapping[str, ModelSource]) -> None:
    """Log the `digest_faults` of routes. Such routes work, but may choose badly."""
    for fault in (fault for route in routes for fault in digest_faults(route, models)):
        _log.warning("%s", fault)


def check_routes(routes: Sequence[Route], by_name: Mapping[str, object], upstreams: Mapping[str, object]) -> None:
    """Raise ConfigError if a route's name is taken, or a model that it needs is not served. `by_name`: this server's models."""
    for fault in faults_of(routes, by_name, upstreams):
        raise fault


def faults_of(routes: Sequence[Route], by_name: Mapping[str, object], upstreams: Mapping[str, object]) -> Iterator[ConfigError]:
    """Yield every error that `check_routes` could raise."""
    for name in upstreams:
        if name in by_name or any(name == route.name for route in routes):
            yield ConfigError(f"An upstream is called {name!r}, and so is a model or a route.", remedy="Rename the upstream.")
        if not any(name in route.models for route in routes):
            yield ConfigError(f"The upstream {name} is in no route.", remedy="Name it in a route, which clients can ask for.")
    for route in routes:
        if route.name in by_name:
            yield ConfigError(f"A route is called {route.name!r}, and so is a model.", remedy="Rename the route.")
        if inner := next((one.name for one in routes if one.name in route.models), None):
            yield ConfigError(f"The route {route.name} contains the route {inner}.", remedy="Name its models instead.")
            continue
        here = [name for name in route.models if name not in upstreams]
        if isinstance(route.by, EnsembleConfig) and len(here) < len(route.models):
            yield ConfigError(
                f"The ensemble {route.name} has an upstream.",
                remedy="Name models of this server alone.",
            )
            continue
        has_weak = route.learned is not None or route.by is not None
        if not here or (has_weak and route.models[0] not in here):
            yield ConfigError(
                f"The route {route.name} needs a model of this server.",
                remedy="Name one. If the route has a weak model, it must be that.",
            )
        needed = [*here, *route.helpers]
        missing = [name for name in needed if name not in by_name]
        for name in missing:
            if name in upstreams:
                yield ConfigError(
                    f"In the route {route.name}, {name!r} reads or embeds, and is an upstream.",
                    remedy="Name a model of this server for that.",
                )
                continue
            yield ConfigError(
                f"The route {route.name} needs {name!r}, which is not served.",
                remedy=f"Name it beside the others, as in `penstock serve {' '.join(dict.fromkeys(needed))}`.",
            )
        if not missing and len({id(by_name[name]) for name in here}) < len(here):
            yield ConfigError(f"The route {route.name} names one model twice.", remedy="Name each once, by one of its names.")
