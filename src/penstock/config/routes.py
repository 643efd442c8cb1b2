"""The `[[routes]]` tables of a config file: names under which one of several models answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from penstock.config.tables import Table, check_keys, name_of, parse_tables, text_of
from penstock.types.errors import ConfigError

ROUTES = "routes"
_TEXTS = ("weak", "strong", "file")


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
class FallbackConfig:
    """The first of these models that does not refuse."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    name: str
    """The name that clients ask for."""
    by: LearnedConfig | FallbackConfig
    prices: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Model -> USD per million tokens of prompts, and of answers. Every model of the route has a price, or none has."""


def parse_routes(tables: object, place: str, folder: Path) -> tuple[RouteConfig, ...]:
    """Check the tables of a file in this folder. `place` begins the message of a ConfigError."""
    return parse_tables(tables, ROUTES, place, partial(_parse, folder))


def _parse(folder: Path, table: Table, place: str) -> RouteConfig:
    is_fallback = "fallback" in table
    check_keys(table, ("name", "price", *(("fallback",) if is_fallback else (*_TEXTS, "share"))), place)
    name = name_of(table, place)
    if is_fallback:
        models = table["fallback"]
        if not isinstance(models, list) or len(models) < 2 or not all(isinstance(one, str) for one in models):
            raise ConfigError(f"{place}fallback is not a list of two models or more.", remedy="docs/routes.md shows one.")
        if len(set(models)) < len(models):
            raise ConfigError(f"{place}fallback names a model twice.", remedy="Name each once.")
        return RouteConfig(name=name, by=FallbackConfig(models=tuple(models)), prices=_prices(table, models, place))
    texts = {key: text_of(table, key, place) for key in _TEXTS}
    texts["file"] = str(folder / texts["file"])
    if texts["weak"] == texts["strong"]:
        raise ConfigError(f"{place}weak and strong are one model.", remedy="Name two.")
    share = table.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise ConfigError(f"{place}share is not a number from 0 to 1.", remedy="Say which part the strong model answers: 0.5.")
    prices = _prices(table, [texts["weak"], texts["strong"]], place)
    return RouteConfig(name=name, by=LearnedConfig(**texts, share=float(share)), prices=prices)


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
