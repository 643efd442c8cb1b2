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
FALLBACK, CONFIDENCE = "fallback", "confidence"
DEFAULT_SAMPLES, MAX_SAMPLES = 5, 32
LEAST_TEMPERATURE, DEFAULT_TEMPERATURE, MAX_TEMPERATURE = 0.01, 0.7, 2.0
_PAIR = ("weak", "strong")
_KEYS = {
    FALLBACK: (FALLBACK,),
    CONFIDENCE: (*_PAIR, CONFIDENCE, "samples", "temperature", "agreement", "part"),
    "file": (*_PAIR, "file", "share"),
}
"""Keys of each kind of route, by the one that tells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedConfig:
    """One of two models, by the question."""

    weak: str
    strong: str
    file: str
    """Written by `penstock route fit`. A relative path is seen from the config file's folder."""
    share: float
    """Share of the questions that the strong model should answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgreementConfig:
    """The weak model, if enough of its answers to the question say the same."""

    weak: str
    strong: str
    samples: int = DEFAULT_SAMPLES
    """Answers that are compared."""
    temperature: float = DEFAULT_TEMPERATURE
    """The temperature of these."""
    least: float
    """Share of them that must be equal."""
    part: re.Pattern[str] | None = None
    """The part of an answer that is compared. None: all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig:
    """The first of these models that does not refuse."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    name: str
    """The name that clients ask for."""
    by: LearnedConfig | AgreementConfig | FallbackConfig
    prices: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Model -> USD per million tokens of prompts, and of answers. Every model of the route has a price, or none has."""


def parse_routes(tables: object, place: str, folder: Path) -> tuple[RouteConfig, ...]:
    """Check the tables of a file in this folder. `place` begins the message of a ConfigError."""
    return parse_tables(tables, ROUTES, place, partial(_parse, folder))


def _parse(folder: Path, table: Table, place: str) -> RouteConfig:
    kind = next((key for key in (FALLBACK, CONFIDENCE) if key in table), "file")
    check_keys(table, ("name", "price", *_KEYS[kind]), place)
    name = name_of(table, place)
    if kind == FALLBACK:
        models = table[FALLBACK]
        if not isinstance(models, list) or len(models) < 2 or not all(isinstance(one, str) for one in models):
            raise ConfigError(f"{place}fallback is not a list of two models or more.", remedy="docs/routes.md shows one.")
        if len(set(models)) < len(models):
            raise ConfigError(f"{place}fallback names a model twice.", remedy="Name each once.")
        return RouteConfig(name=name, by=FallbackConfig(models=tuple(models)), prices=_prices(table, models, place))
    weak, strong = (text_of(table, key, place) for key in _PAIR)
    if weak == strong:
        raise ConfigError(f"{place}weak and strong are one model.", remedy="Name two.")
    by: LearnedConfig | AgreementConfig
    if kind == CONFIDENCE:
        by = _agreement(weak, strong, table, place)
    else:
        file = str(folder / text_of(table, "file", place))
        share = number_of(table, "share", None, 0, 1, place, "Say which part the strong model answers: 0.5.")
        by = LearnedConfig(weak=weak, strong=strong, file=file, share=share)
    return RouteConfig(name=name, by=by, prices=_prices(table, [weak, strong], place))


def _agreement(weak: str, strong: str, table: Table, place: str) -> AgreementConfig:
    if table[CONFIDENCE] != "agreement":
        raise ConfigError(f"{place}confidence is not 'agreement'.", remedy="Name that, or the file of a fit.")
    return AgreementConfig(
        weak=weak,
        strong=strong,
        samples=count_of(table, "samples", DEFAULT_SAMPLES, 2, MAX_SAMPLES, place),
        temperature=number_of(table, "temperature", DEFAULT_TEMPERATURE, LEAST_TEMPERATURE, MAX_TEMPERATURE, place),
        least=number_of(table, "agreement", None, 0, 1, place, "Say which share of the answers must be equal: 0.6."),
        part=pattern_of(text_of(table, "part", place), place) if "part" in table else None,
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
