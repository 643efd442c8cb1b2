"""The `[[routes]]` tables of a config file: names under which one of several models answers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.types.errors import ConfigError

ROUTES = "routes"
NAME = re.compile(r"[!-~]{1,200}")
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


def parse_routes(tables: object, place: str, folder: Path) -> tuple[RouteConfig, ...]:
    """Check the tables of a file in this folder. `place` begins the message of a ConfigError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place}{ROUTES} are tables.", remedy=f"Begin each with a line [[{ROUTES}]].")
    routes = [_parse(table, f"{place}[[{ROUTES}]] {number}: ", folder) for number, table in enumerate(tables, 1)]
    _check_names(routes, place)
    return tuple(routes)


def _parse(table: Mapping[str, object], place: str, folder: Path) -> RouteConfig:
    is_fallback = "fallback" in table
    known = ("name", "fallback") if is_fallback else ("name", *_TEXTS, "share")
    if unknown := table.keys() - {*known}:
        raise ConfigError(f"{place}unknown key {min(unknown)!r}.", remedy=f"The keys are {', '.join(known)}.")
    name = _text(table, "name", place)
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{place}{name!r} can't be a name.", remedy="Use up to 200 printable ASCII characters, and no spaces."
        )
    if is_fallback:
        models = table["fallback"]
        if not isinstance(models, list) or len(models) < 2 or not all(isinstance(one, str) for one in models):
            raise ConfigError(f"{place}fallback is not a list of two models or more.", remedy="docs/routes.md shows one.")
        if len(set(models)) < len(models):
            raise ConfigError(f"{place}fallback names a model twice.", remedy="Name each once.")
        return RouteConfig(name=name, by=FallbackConfig(models=tuple(models)))
    texts = {key: _text(table, key, place) for key in _TEXTS}
    texts["file"] = str(folder / texts["file"])
    if texts["weak"] == texts["strong"]:
        raise ConfigError(f"{place}weak and strong are one model.", remedy="Name two.")
    share = table.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise ConfigError(f"{place}share is not a number from 0 to 1.", remedy="Say which part the strong model answers: 0.5.")
    return RouteConfig(name=name, by=LearnedConfig(**texts, share=float(share)))


def _text(table: Mapping[str, object], key: str, place: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}{key!r} is missing, or not a text.", remedy="docs/routes.md shows a route.")
    return value


def _check_names(routes: Sequence[RouteConfig], place: str) -> None:
    names = [route.name for route in routes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{place}two routes are called {name!r}.", remedy="Rename one of them.")
