"""The `[[pipelines]]` tables of a config file: models that answer from an index of documents."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.config.routes import NAME
from penstock.types.errors import ConfigError

PIPELINES = "pipelines"
DEFAULT_TOP, MAX_TOP = 4, 100
DEFAULT_TEMPLATE = """Answer the question from these sources, and cite them as [1]. If they do not answer it, say so.

{sources}

Question: {question}"""
_KEYS = ("name", "index", "model", "top", "template")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    name: str
    """The name that clients ask for."""
    index: str
    """Written by `penstock index`. A relative path is seen from the config file's folder."""
    model: str
    """Writes the answer."""
    top: int = DEFAULT_TOP
    """Passages that it is shown."""
    template: str = DEFAULT_TEMPLATE
    """The text of the question to it, with the passages at `{sources}` and the client's question at `{question}`."""


def parse_pipelines(tables: object, place: str, folder: Path) -> tuple[PipelineConfig, ...]:
    """Check the tables of a file in this folder. `place` begins the message of a ConfigError."""
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise ConfigError(f"{place}{PIPELINES} are tables.", remedy=f"Begin each with a line [[{PIPELINES}]].")
    pipelines = [_parse(table, f"{place}[[{PIPELINES}]] {number}: ", folder) for number, table in enumerate(tables, 1)]
    names = [one.name for one in pipelines]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{place}two pipelines are called {name!r}.", remedy="Rename one of them.")
    return tuple(pipelines)


def _parse(table: Mapping[str, object], place: str, folder: Path) -> PipelineConfig:
    if unknown := table.keys() - {*_KEYS}:
        raise ConfigError(f"{place}unknown key {min(unknown)!r}.", remedy=f"The keys are {', '.join(_KEYS)}.")
    name, index, model = (_text(table, key, place) for key in ("name", "index", "model"))
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{place}{name!r} can't be a name.", remedy="Use up to 200 printable ASCII characters, and no spaces."
        )
    top = table.get("top", DEFAULT_TOP)
    if type(top) is not int or not 1 <= top <= MAX_TOP:
        raise ConfigError(f"{place}top is not a number from 1 to {MAX_TOP}.", remedy=f"Leave it out for {DEFAULT_TOP}.")
    template = _text(table, "template", place) if "template" in table else DEFAULT_TEMPLATE
    for part in ("{sources}", "{question}"):
        if part not in template:
            raise ConfigError(f"{place}the template has no {part}.", remedy="docs/pipelines.md shows one.")
    return PipelineConfig(name=name, index=str(folder / index), model=model, top=top, template=template)


def _text(table: Mapping[str, object], key: str, place: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}{key!r} is missing, or not a text.", remedy="docs/pipelines.md shows a pipeline.")
    return value
