"""The `[[routes]]` tables of a config file: names under which one of two models answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.types.errors import ConfigError

ROUTES = "routes"
_TEXTS = ("name", "weak", "strong", "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    name: str
    """The name that clients ask for."""
    weak: str
    strong: str
    file: str
    """Written by `penstock route fit`."""
    share: float
    """Share of the questions that the strong model should answer."""


def parse_routes(tables: object, place: str) -> tuple[RouteConfig, ...]:
    """Check the tables of a file. `place` begins the message of a ConfigError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place}{ROUTES} are tables.", remedy=f"Begin each with a line [[{ROUTES}]].")
    routes = [_parse(table, f"{place}[[{ROUTES}]] {number}: ") for number, table in enumerate(tables, 1)]
    _check_names(routes, place)
    return tuple(routes)


def _parse(table: Mapping[str, object], place: str) -> RouteConfig:
    if unknown := table.keys() - {*_TEXTS, "share"}:
        raise ConfigError(f"{place}unknown key {min(unknown)!r}.", remedy=f"The keys are {', '.join(_TEXTS)} and share.")
    texts: dict[str, str] = {}
    for key in _TEXTS:
        value = table.get(key)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{place}there is no text {key!r}.", remedy="docs/routes.md shows a route.")
        texts[key] = value
    share = table.get("share")
    if not isinstance(share, int | float) or isinstance(share, bool) or not 0 <= share <= 1:
        raise ConfigError(f"{place}share is not a number from 0 to 1.", remedy="Say which part the strong model answers: 0.5.")
    return RouteConfig(**texts, share=float(share))


def _check_names(routes: Sequence[RouteConfig], place: str) -> None:
    names = [route.name for route in routes]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{place}two routes are called {name!r}.", remedy="Rename one of them.")
