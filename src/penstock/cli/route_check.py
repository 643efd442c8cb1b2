"""Checks the routes of a configuration without loading a model, for `penstock route check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.routes import FallbackConfig, LearnedConfig, RouteConfig
from penstock.config.routing import Routing
from penstock.config.units import format_size
from penstock.deploy.resolve import aliases, served_names
from penstock.deploy.routes import Route, digest_faults, faults_of, open_routes
from penstock.types.errors import ConfigError, PenstockError, damaged

if TYPE_CHECKING:  # with NumPy
    from penstock.models.catalog import ModelSource

Found = tuple[Config, "ModelSource"]
Gain = Callable[[Route, Config], float]
"""Embeds the example question with the model of a config, and returns its expected gain."""


@dataclass(slots=True)
class RouteCheck:
    facts: list[tuple[str, str]] = field(default_factory=list)
    """(subject, what is known of it)."""
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
    answerers = {name for route in routes for name in route.models}
    for name in sorted((answerers | {*widths}) & {*models}):
        _check_model(name, models[name], found, width=widths.get(name), answers=name in answerers)
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
    from penstock.models import catalog
    from penstock.models.cache import cache_dir

    models: dict[str, Found] = {}
    for config in configs:
        try:
            source = catalog.resolve(config.model.model, cache_dir(config.model.cache_dir))
        except PenstockError as error:
            found.faults.append(error)
            continue
        one = config, source
        for name in dict.fromkeys((*served_names(config, source), *aliases(config, source))):
            if name in models:
                found.faults.append(ConfigError(f"Two models are served as {name!r}.", remedy="Rename one of them."))
            models[name] = one
    return models


def _open(config: RouteConfig, found: RouteCheck) -> Route:
    try:
        [route] = open_routes([config])
    except ConfigError as error:
        found.faults.append(error)
        by = config.by
        return Route(name=config.name, models=by.models if isinstance(by, FallbackConfig) else (by.weak, by.strong))
    return route


def _check_model(name: str, model: Found, found: RouteCheck, *, width: int | None, answers: bool) -> None:
    """Check one model. `width`: of the vectors that a learned route needs of it, or None."""
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
        found.faults.append(ConfigError(f"{name} answers in a route, and writes no text.", remedy="Name another model."))
    found.note(f"model {name}", f"here, {format_size(loaded.num_weight_bytes)} of weights")


def _rule(route: Route, shares: Mapping[str, float]) -> str:
    """Return what the route does, in words."""
    if route.agreement is not None:
        by = route.agreement
        return f"{by.weak} answers {by.samples} times; {by.strong} unless a share of {by.least:g} says the same"
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
    if len(left) > 1 and route.agreement is not None:
        return f"{route.models[0]} begins, and the agreement of its answers decides"
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
