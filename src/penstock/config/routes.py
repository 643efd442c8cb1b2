"""The `[[routes]]` tables of a config file: names under which one of several models answers."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.config.tables import Table, check_keys, count_of, name_of, number_of, parse_tables, pattern_of, text_of
from penstock.types.errors import ConfigError

ROUTES = "routes"
FALLBACK, CONFIDENCE, ENSEMBLE = "fallback", "confidence", "ensemble"
MAX_ENSEMBLE = 9
"""Most models of an ensemble, because a judge names the best answer by one digit."""
DEFAULT_SAMPLES, MAX_SAMPLES = 5, 32
LEAST_TEMPERATURE, DEFAULT_TEMPERATURE, MAX_TEMPERATURE = 0.01, 0.7, 2.0
_PAIR = ("weak", "strong")
_AGREEMENT, _VERIFIER = "agreement", "verifier"
_CONFIDENCES = {
    _AGREEMENT: ("samples", "temperature", _AGREEMENT, "part"),
    _VERIFIER: (_VERIFIER, "least"),
}
"""Kind of confidence -> the keys that a table of this kind may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedConfig:
    """A fit chooses the weak or the strong model by the question."""

    weak: str
    strong: str
    file: str
    """Written by `penstock route fit`. Relative paths start at the config file's folder."""
    share: float
    """Share of the questions that the strong model should answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementConfig:
    """The weak model answers if enough of its sampled answers agree, otherwise the strong one."""

    weak: str
    strong: str
    samples: int = DEFAULT_SAMPLES
    """Number of sampled answers to compare."""
    temperature: float = DEFAULT_TEMPERATURE
    """Sampling temperature of these answers."""
    least: float
    """Least share of the answers that must agree."""
    part: re.Pattern[str] | None = None
    """The part of an answer that is compared. None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """The weak model answers if a verifier, which can be the weak model, confirms the answer. Otherwise the strong one."""

    weak: str
    strong: str
    verifier: str
    """The model that is asked whether the answer is right."""
    least: float
    """Least probability of "yes" to keep the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig:
    """The first of these models that does not refuse answers."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleConfig:
    """All models answer, and one answer is chosen: by a judge, by a reranker, or else the most common one."""

    models: tuple[str, ...]
    judge: str | None = None
    """A model that reads all answers, and names the best one."""
    reranker: str | None = None
    """A reranker that scores each answer as a passage for the question."""
    part: re.Pattern[str] | None = None
    """The part of an answer that is compared. None: all of it."""


By = LearnedConfig | AgreementConfig | VerifierConfig | FallbackConfig | EnsembleConfig
"""The rule that chooses the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    name: str
    """The name that clients ask for."""
    by: By
    prices: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Model -> USD per million tokens of prompts, and of answers. Has either all models of the route or none."""


def parse_routes(tables: object, place: str, folder: Path) -> tuple[RouteConfig, ...]:
    """Parse the tables of a file in `folder`. Raises ConfigError with a message that begins with `place`."""
    return parse_tables(tables, ROUTES, place, partial(_parse, folder))


def _parse(folder: Path, table: Table, place: str) -> RouteConfig:
    name = name_of(table, place)
    by = _by(folder, table, place)
    return RouteConfig(name=name, by=by, prices=_prices(table, generators_of(by), place))


def answerers_of(by: By) -> tuple[str, ...]:
    """Return the models that may answer: the weak and the strong one, or those of the list."""
    return by.models if isinstance(by, FallbackConfig | EnsembleConfig) else (by.weak, by.strong)


def generators_of(by: By) -> list[str]:
    """Return the models that generate text for a route: those that may answer, and its judge or verifier."""
    judge = by.judge if isinstance(by, EnsembleConfig) else by.verifier if isinstance(by, VerifierConfig) else None
    return [*dict.fromkeys((*answerers_of(by), *filter(None, (judge,))))]


def _by(folder: Path, table: Table, place: str) -> By:
    def check(*keys: str) -> None:
        check_keys(table, ("name", "price", *keys), place)

    if FALLBACK in table:
        check(FALLBACK)
        return FallbackConfig(models=_models(table, FALLBACK, place))
    if ENSEMBLE in table:
        check(ENSEMBLE, "judge", "reranker", "part")
        return _ensemble(table, place)
    if CONFIDENCE in table and table[CONFIDENCE] not in (*_CONFIDENCES,):
        kinds = " or ".join(map(repr, _CONFIDENCES))
        raise ConfigError(f"{place}confidence is not {kinds}.", remedy="Name one, or the file of a fit.")
    kind = table.get(CONFIDENCE)
    check(*_PAIR, *((CONFIDENCE, *_CONFIDENCES[str(kind)]) if kind else ("file", "share")))
    weak, strong = (text_of(table, key, place) for key in _PAIR)
    if weak == strong:
        raise ConfigError(f"{place}weak and strong are one model.", remedy="Name two.")
    if kind == _AGREEMENT:
        return _agreement(weak, strong, table, place)
    if kind == _VERIFIER:
        verifier = text_of(table, _VERIFIER, place) if _VERIFIER in table else weak
        least = number_of(table, "least", None, 0, 1, place, "Say how likely the verifier's yes must be: 0.7.")
        return VerifierConfig(weak=weak, strong=strong, verifier=verifier, least=least)
    share = number_of(table, "share", None, 0, 1, place, "Say which part the strong model answers: 0.5.")
    return LearnedConfig(weak=weak, strong=strong, file=str(folder / text_of(table, "file", place)), share=share)


def _models(table: Table, key: str, place: str) -> tuple[str, ...]:
    models = table[key]
    if not isinstance(models, list) or len(models) < 2 or not all(isinstance(one, str) for one in models):
        raise ConfigError(f"{place}{key} is not a list of two models or more.", remedy="docs/routes.md shows one.")
    if len(set(models)) < len(models):
        raise ConfigError(f"{place}{key} names a model twice.", remedy="Name each once.")
    return tuple(models)


def _ensemble(table: Table, place: str) -> EnsembleConfig:
    models = _models(table, ENSEMBLE, place)
    if len(models) > MAX_ENSEMBLE:
        raise ConfigError(f"{place}ensemble has {len(models)} models.", remedy=f"Name at most {MAX_ENSEMBLE}.")
    judge, reranker = (text_of(table, key, place) if key in table else None for key in ("judge", "reranker"))
    if len({"judge", "reranker", "part"} & table.keys()) > 1:
        raise ConfigError(f"{place}an ensemble has a judge, a reranker or a part, not several.", remedy="Keep one of them.")
    return EnsembleConfig(models=models, judge=judge, reranker=reranker, part=_part(table, place))


def _part(table: Table, place: str) -> re.Pattern[str] | None:
    return pattern_of(text_of(table, "part", place), place) if "part" in table else None


def _agreement(weak: str, strong: str, table: Table, place: str) -> AgreementConfig:
    return AgreementConfig(
        weak=weak,
        strong=strong,
        samples=count_of(table, "samples", DEFAULT_SAMPLES, 2, MAX_SAMPLES, place),
        temperature=number_of(table, "temperature", DEFAULT_TEMPERATURE, LEAST_TEMPERATURE, MAX_TEMPERATURE, place),
        least=number_of(table, _AGREEMENT, None, 0, 1, place, "Say which share of the answers must be equal: 0.6."),
        part=_part(table, place),
    )


def _prices(table: Table, models: Sequence[str], place: str) -> dict[str, tuple[float, float]]:
    """Return the price of each model, or none at all."""
    if "price" not in table:
        return {}
    prices = table["price"]
    if not isinstance(prices, dict) or {*prices} != {*models}:
        named = ", ".join(models)
        raise ConfigError(f"{place}price is not that of {named}.", remedy="Give each its price; [0, 0] is nothing.")
    for name, price in prices.items():
        are_two = isinstance(price, list) and len(price) == 2
        if not are_two or not all(type(one) in (int, float) and 0 <= one < math.inf for one in price):
            raise ConfigError(
                f"{place}the price of {name} is not two numbers from 0 on.",
                remedy="Write USD per million tokens of prompts and of answers: [0.1, 0.4].",
            )
    return {name: (float(prompt), float(output)) for name, (prompt, output) in prices.items()}
