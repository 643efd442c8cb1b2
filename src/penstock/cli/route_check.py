"""Checks the routes of a configuration without loading a model, for `penstock route check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.routes import AgreementConfig, EnsembleConfig, LearnedConfig, RouteConfig, VerifierConfig, answerers_of
from penstock.config.routing import Routing
from penstock.config.units import format_size
from penstock.deploy.pipelines import check_pipelines, open_pipelines
from penstock.deploy.resolve import aliases, served_names
from penstock.deploy.routes import Route, digest_faults, faults_of, open_routes
from penstock.types.encoder import Task
from penstock.types.errors import ConfigError, PenstockError, damaged

if TYPE_CHECKING:  # with NumPy
    from penstock.models.catalog import ModelSource

Found = tuple[Config, "ModelSource"]
Gain = Callable[[Route, Config], float]
"""Embeds the example question with the model of a config, and returns its expected gain."""


@dataclass(slots=True)
class RouteCheck:
    facts: list[tuple[str, str]] = field(default_factory=list)
    """(subject, description)."""
    faults: list[PenstockError] = field(default_factory=list)
    """Reasons why a server would not start, or a route would not work."""

    def note(self, subject: str, words: str) -> None:
        self.facts.append((subject, words))


def check(configs: Sequence[Config], routing: Routing, question: str, gain: Gain) -> RouteCheck:
    """Check all routes. `question`: an example, or empty."""
    found = RouteCheck()
    models = _models(configs, found)
    shares = {one.name: one.by.share for one in routing.routes if isinstance(one.by, LearnedConfig)}
    routes = [_open(config, found) for config in routing.routes]
    upstreams = {one.name: one for one in routing.upstreams}
    found.faults += faults_of(routes, models, upstreams)
    learned = [route.learned.route for route in routes if route.learned is not None]
    widths = {route.embedder: route.by_question.width for route in learned}
    _check_pipelines(routing, routes, models, found)
    answerers = {name for route in routes for name in (*route.models, *route.judges)}
    answerers |= {one.model for one in routing.pipelines} | {one.check.model for one in routing.pipelines if one.check}
    rerankers = {route.by.reranker for route in routes if isinstance(route.by, EnsembleConfig) and route.by.reranker}
    rerankers |= {one.reranker.model for one in routing.pipelines if one.reranker}
    for name in sorted((answerers | rerankers | {*widths}) & {*models}):
        width, answers, reranks = widths.get(name), name in answerers, name in rerankers
        _check_model(name, models[name], found, width=width, answers=answers, reranks=reranks)
    for upstream in routing.upstreams:
        found.note(f"upstream {upstream.name}", f"{upstream.url}, {'with a' if upstream.key else 'without a'} key")
    for route in routes:
        found.note(f"route {route.name}", _rule(route, shares))
        found.faults += digest_faults(route, {name: source for name, (_, source) in models.items()})
    if question and not found.faults:
        for route in routes:
            kept_from = [name for name in route.models if name in upstreams and upstreams[name].keeps_text([question])]
            found.note(f"by {route.name}", _decision(route, kept_from, models, gain))
    return found


def _models(configs: Sequence[Config], found: RouteCheck) -> dict[str, Found]:
    """Return the models by their names and aliases."""
    from penstock.deploy.factory import find_source

    models: dict[str, Found] = {}
    for config in configs:
        try:
            source = find_source(config)
        except PenstockError as error:
            found.faults.append(error)
            continue
        one = config, source
        for name in dict.fromkeys((*served_names(config, source), *aliases(config, source))):
            if name in models:
                found.faults.append(ConfigError(f"Two models are served as {name!r}.", remedy="Rename one of them."))
            models[name] = one
    return models


def _check_pipelines(routing: Routing, routes: Sequence[Route], models: Mapping[str, Found], found: RouteCheck) -> None:
    upstreams = {one.name for one in routing.upstreams}
    for config in routing.pipelines:
        found.note(f"pipeline {config.name}", f"{config.model} answers from {config.index}")
        try:
            opened = open_pipelines([config])
        except ConfigError as error:
            found.faults.append(error)
            continue
        try:
            check_pipelines(opened, models, {route.name: route for route in routes}, upstreams)
        except ConfigError as error:
            found.faults.append(error)
        finally:
            opened[0].reader.close()


def _open(config: RouteConfig, found: RouteCheck) -> Route:
    try:
        [route] = open_routes([config])
    except ConfigError as error:
        found.faults.append(error)
        return Route(name=config.name, models=answerers_of(config.by))
    return route


def _check_model(name: str, model: Found, found: RouteCheck, *, width: int | None, answers: bool, reranks: bool) -> None:
    """Check one model. `width`: vector width that a learned route needs, or None."""
    from penstock.deploy.forecast import appraise

    config, source = model
    if not source.is_present:
        size = "" if source.entry is None else f" {format_size(source.entry.download_bytes)}"
        found.note(f"model {name}", f"`penstock pull {config.model.model}` fetches{size}")
        return
    try:
        appraisal = appraise(config, source)
    except PenstockError as error:
        found.faults.append(error)
        return
    except OSError as error:
        found.faults.append(damaged(source.path, str(error.strerror)))
        return
    found.faults += [ConfigError(f"{name}: {one.cause}", remedy=one.remedy) for one in appraisal.refusals]
    if (loaded := appraisal.model) is None:
        return
    encoder = loaded.encoder
    if width is not None and (encoder is None or encoder.width != width):
        words = "it makes none" if encoder is None else f"its vectors have {encoder.width}"
        cause = f"A route needs vectors of {width} numbers from {name}, and {words}."
        found.faults.append(ConfigError(cause, remedy="Serve the embedding model of the fit, or fit anew."))
    if answers and encoder is not None:
        found.faults.append(ConfigError(f"{name} is to answer or to judge, and writes no text.", remedy="Name another model."))
    if reranks and (encoder is None or encoder.task is not Task.RERANK):
        found.faults.append(ConfigError(f"{name} is named as a reranker, and is none.", remedy="Name another model."))
    found.note(f"model {name}", f"here, {format_size(loaded.num_weight_bytes)} of weights")


def _rule(route: Route, shares: Mapping[str, float]) -> str:
    """Return what the route does, in words."""
    if isinstance(by := route.by, AgreementConfig):
        return f"{by.weak} answers {by.samples} times; {by.strong} unless a share of {by.least:g} says the same"
    if isinstance(by, VerifierConfig):
        return f"{by.weak}; {by.strong} unless {by.verifier} says with {by.least:g} that the answer is right"
    if isinstance(by, EnsembleConfig):
        return f"{', '.join(by.models)} together; {by.judge or by.reranker or 'the majority'} chooses"
    if route.learned is None:
        return ", then ".join(route.models)
    weak, strong = route.models
    words = f"{strong} from a gain of {route.learned.threshold:.3f} on (share {shares[route.name]:g}), else {weak}"
    cascade = route.learned.route.cascade
    return words if cascade is None else f"{words}, which begins {cascade.window} tokens if those can change that"


def _decision(route: Route, kept_from: Sequence[str], models: Mapping[str, Found], gain: Gain) -> str:
    """Return which models the route asks for the example question."""
    left = [name for name in route.models if name not in kept_from]
    words = "".join(f"; {name} must not see it" for name in kept_from)
    if not left:
        return f"nobody{words}"
    if len(left) > 1 and isinstance(route.by, AgreementConfig):
        return f"{route.models[0]} begins, and the agreement of its answers decides"
    if len(left) > 1 and isinstance(route.by, VerifierConfig):
        return f"{route.models[0]} begins, and {route.by.verifier} decides"
    if len(left) > 1 and route.by is not None:
        return f"{', '.join(left)} together"
    if route.learned is None or len(left) == 1:
        return f"{', then '.join(left)}{words}"
    config, source = models[route.learned.route.embedder]
    if not source.is_present:
        return f"unknown until {config.model.model} is fetched"
    at, threshold, (weak, strong) = gain(route, config), route.learned.threshold, route.models
    model = strong if at >= threshold else weak
    if route.learned.route.tries(at, threshold):
        model = f"{weak} begins, and its first tokens decide"
    return f"{model}; gain={at:.3f}; threshold={threshold:.3f}"
