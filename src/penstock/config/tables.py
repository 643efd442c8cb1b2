"""Reads a config file's arrays of tables, such as `[[routes]]`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

from penstock.types.errors import ConfigError

MAX_LISTED = 20
"""Keys that the error for an unknown key lists. The tables have fewer keys, the settings at the top level more."""
_NAME = re.compile(r"[!-~]{1,200}")
Table = Mapping[str, object]


class _Named(Protocol):
    @property
    def name(self) -> str: ...


_Entry = TypeVar("_Entry", bound=_Named)


def parse_tables(tables: object, key: str, place: str, parse: Callable[[Table, str], _Entry]) -> tuple[_Entry, ...]:
    """Parse each table. `parse` takes a table and its own place. Error messages begin with the place.

    Raises ConfigError, also for a duplicate name.
    """
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place}{key} are tables.", remedy=f"Begin each with a line [[{key}]].")
    entries = [parse(table, f"{place}[[{key}]] {number}: ") for number, table in enumerate(tables, 1)]
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{place}two {key} are called {name!r}.", remedy="Rename one of them.")
    return tuple(entries)


def check_keys(table: Table, known: Collection[str], place: str) -> None:
    for key in sorted(table.keys() - {*known}):
        close = difflib.get_close_matches(key.replace("-", "_"), known, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        all_keys = f"Valid keys: {', '.join(known)}." if len(known) <= MAX_LISTED else "docs/configuration.md lists all keys."
        raise ConfigError(f"{place}unknown key {key!r}.", remedy=hint + all_keys)


def text_of(table: Table, key: str, place: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}{key!r} is missing, or not a text.", remedy="The documentation shows such a table.")
    return value


def name_of(table: Table, place: str) -> str:
    """Return the name that clients ask for."""
    name = text_of(table, "name", place)
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{place}{name!r} can't be a name.", remedy="Use up to 200 printable ASCII characters, and no spaces."
        )
    return name


def number_of(table: Table, key: str, default: float | None, least: float, most: float, place: str, remedy: str = "") -> float:
    """Return a number from `least` to `most`. Without a default the key is required; `remedy` says what to write."""
    if default is None and key not in table:
        raise ConfigError(f"{place}{key!r} is missing.", remedy=remedy)
    value = table.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        message = f"{place}{key} is not a number from {least:g} to {most:g}."
        raise ConfigError(message, remedy=remedy or f"Leave it out for {default:g}.")
    return float(value)


def count_of(table: Table, key: str, default: int, least: int, most: int, place: str) -> int:
    """Return a whole number from `least` to `most`."""
    value = number_of(table, key, default, least, most, place)
    if not value.is_integer():
        raise ConfigError(f"{place}{key} is not a whole number.", remedy=f"Leave it out for {default}.")
    return int(value)


def pattern_of(text: str, place: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise ConfigError(
            f"{place}{text!r} is not a regular expression: {error}.", remedy="Python's re describes them."
        ) from None
