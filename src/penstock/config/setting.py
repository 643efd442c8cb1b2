"""The declaration of one setting. `components` declares settings; the command line, the file reader and the docs read them.

A setting belongs to a dataclass field, so default, documentation, flag, environment variable and file key are stated once.
"""

from __future__ import annotations

import dataclasses
import math
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, ClassVar

from penstock.config.units import (
    MAX_PORT,
    format_size,
    parse_count,
    parse_counts,
    parse_duration,
    parse_port,
    parse_share,
    parse_size,
)
from penstock.types.errors import ConfigError


class Kind(StrEnum):
    """The type of a setting's value, under the name that help and docs use."""

    TEXT = "text"
    PATH = "path"
    CHOICE = "choice"
    FLAG = "flag"
    COUNT = "count"
    COUNTS = "counts"
    PORT = "port"
    SIZE = "size"
    DURATION = "duration"
    SHARE = "share"
    TABLE = "table"


_PARSERS: Mapping[Kind, Callable[[str], int | float]] = {
    Kind.COUNT: parse_count,
    Kind.PORT: parse_port,
    Kind.SIZE: parse_size,
    Kind.DURATION: parse_duration,
    Kind.SHARE: parse_share,
}
_UNITS: Mapping[Kind, str] = {Kind.SIZE: "_bytes", Kind.DURATION: "_s"}
_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    field: str = ""
    """Attribute of its component."""
    key: str = ""
    """Name in a TOML file, from which flag and environment variable derive."""
    doc: str
    kind: Kind
    default: object
    default_doc: str = ""
    """The default in words, if it is None or empty."""
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    is_multiple: bool = False
    takes_class: bool = False
    """The value may also name a user's own class."""
    is_secret: bool = False
    """Never written to a file."""

    def named(self, field: str) -> Setting:
        """Return the setting with its dataclass field's name, and the key that follows from it."""
        return dataclasses.replace(self, field=field, key=self.key or field.removesuffix(_UNITS.get(self.kind, "")))

    @property
    def flag(self) -> str:
        return "--" + self.key.replace("_", "-")

    @property
    def env(self) -> str:
        return "PENSTOCK_" + self.key.upper()

    @property
    def shown_default(self) -> str:
        """The default in help and docs: as a user would write it, or in words."""
        if self.default_doc:
            return self.default_doc
        if self.kind is Kind.SIZE and isinstance(self.default, int):
            return self.shown(self.default)
        if self.kind is Kind.DURATION:
            return f"{self.default:g}s"
        return str(self.default).lower() if self.kind is Kind.FLAG else str(self.default)

    def parse(self, raw: object) -> Any:
        """Return the value of one entry from a flag, the environment or TOML. Raises ValueError with the cause."""
        value = self._convert(raw)
        self.check(value)
        return value

    def check(self, value: object) -> None:
        """Raise ValueError if a value of the right type is blank, or outside the choices or the range."""
        if isinstance(value, str) and not value.strip():
            raise ValueError(f"{value!r} is empty")
        if self.takes_class and isinstance(value, str) and ":" in value:
            return
        if self.choices and value not in self.choices:
            own = "; or a class of your own, as package.module:Class or ./file.py:Class" if self.takes_class else ""
            raise ValueError(f"{value!r} is not available; available: {', '.join(self.choices)}{own}")
        if isinstance(value, tuple):
            for entry in value:
                self.check(entry)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return
        if not math.isfinite(value):
            raise ValueError(f"{value:g} is not a finite number")
        if self.minimum is not None and value < self.minimum:
            raise ValueError(f"{self.shown(value)} is less than {self.shown(self.minimum)}")
        if self.maximum is not None and value > self.maximum:
            raise ValueError(f"{self.shown(value)} is more than {self.shown(self.maximum)}")

    def shown(self, number: float) -> str:
        return format_size(int(number)).replace(" ", "") if self.kind is Kind.SIZE else f"{number:g}"

    def _convert(self, raw: object) -> object:
        if self.kind is Kind.FLAG:
            return _as_bool(raw)
        if self.kind is Kind.COUNTS:
            return _as_counts(raw)
        if self.kind is Kind.TABLE:
            return _as_table(raw)
        if self.kind in _PARSERS:
            return self._as_number(raw)
        if self.takes_class and isinstance(raw, type):  # from Python
            return _name_of(raw)
        if not isinstance(raw, str):
            raise ValueError(f"{raw!r} is {_toml_type(raw)}, not text")
        return raw

    def _as_number(self, raw: object) -> int | float:
        if isinstance(raw, str):
            return _PARSERS[self.kind](raw)
        allowed = (int,) if self.kind in (Kind.COUNT, Kind.PORT, Kind.SIZE) else (int, float)
        if isinstance(raw, bool) or not isinstance(raw, allowed):
            raise ValueError(f"{raw!r} is {_toml_type(raw)}, not a {self.kind}")
        return raw


def setting(default: object, doc: str, kind: Kind = Kind.TEXT, **details: Any) -> Any:
    """Return a dataclass field that declares a setting. `details`: fields of `Setting`.

    The key defaults to the field's name without `_bytes` or `_s`: users write the unit with the number. Help shows a default of
    None or () as `none`, unless `default_doc` says otherwise.
    """
    if default is None or default == ():
        details.setdefault("default_doc", "none")
    return dataclasses.field(default=default, metadata={"setting": Setting(default=default, doc=doc, kind=kind, **details)})


path = partial(setting, kind=Kind.PATH)
choice = partial(setting, kind=Kind.CHOICE)
flag = partial(setting, kind=Kind.FLAG)
count = partial(setting, kind=Kind.COUNT)
counts = partial(setting, kind=Kind.COUNTS)
port_number = partial(setting, kind=Kind.PORT, minimum=0, maximum=MAX_PORT)
size = partial(setting, kind=Kind.SIZE)
duration = partial(setting, kind=Kind.DURATION)
share = partial(setting, kind=Kind.SHARE)
table = partial(setting, kind=Kind.TABLE)


def settings_of(component: type) -> tuple[Setting, ...]:
    """Return the settings that a component declares, in order."""
    return tuple(
        part.metadata["setting"].named(part.name) for part in dataclasses.fields(component) if "setting" in part.metadata
    )


class Component:
    """Base of the config dataclasses. The constructor checks values against each setting's choices and range."""

    title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in settings_of(type(self)):
            value = getattr(self, item.field)
            for entry in value if item.is_multiple else (value,):
                if entry is None:
                    continue
                try:
                    item.check(entry)
                except ValueError as error:
                    raise ConfigError(f"{item.key}: {error}.") from None


def _name_of(kind: type) -> str:
    """Return `module:Class`. Raises ValueError if that name does not find the class, such as one that was defined again."""
    found: object = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise ValueError(f"{kind!r} can't be found by its name: define it once, at the top of a module")
    return f"{kind.__module__}:{kind.__qualname__}"


def _as_bool(raw: object) -> bool:
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in _TRUE + _FALSE:
        return raw.lower() in _TRUE
    raise ValueError(f"{raw!r} is not true or false")


def _as_counts(raw: object) -> tuple[int, ...]:
    if isinstance(raw, str):
        return parse_counts(raw)
    if not isinstance(raw, list | tuple) or not raw or not all(type(entry) is int for entry in raw):
        raise ValueError(f"{raw!r} is not a list of counts")
    return tuple(raw)


def _as_table(raw: object) -> dict[str, Any]:
    """Return a table from a config file, or parse one from a flag, such as `{weight = 2, name = "a"}`."""
    if isinstance(raw, str):
        try:
            raw = tomllib.loads(f"table = {raw}")["table"]
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"{raw!r} is not an inline table of TOML, such as {{weight = 2}}: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{raw!r} is {_toml_type(raw)}, not a table")
    return raw


def _toml_type(value: object) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a decimal number", list: "a list", dict: "a table"}
    return names.get(type(value), f"a {type(value).__name__}")  # a date or a time
