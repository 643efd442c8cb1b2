"""The `[[pipelines]]` tables of a config file: models that answer from an index of documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.config.tables import Table, check_keys, name_of, parse_tables, text_of
from penstock.types.errors import ConfigError

PIPELINES = "pipelines"
DEFAULT_TOP, MAX_TOP = 4, 100
CANDIDATES = 5
"""Passages that a reranker reads for each one that it chooses, unless the table says how many."""
DEFAULT_TEMPLATE = """Answer the question from these sources, and cite them as [1]. If they do not answer it, say so.

{sources}

Question: {question}"""
_KEYS = ("name", "index", "model", "top", "template", "reranker", "candidates")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerConfig:
    model: str
    candidates: int
    """Passages that it reads, the nearest ones."""


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
    reranker: RerankerConfig | None = None
    """Chooses them. None: they are the nearest."""
    template: str = DEFAULT_TEMPLATE
    """The text of the question to it, with the passages at `{sources}` and the client's question at `{question}`."""


def parse_pipelines(tables: object, place: str, folder: Path) -> tuple[PipelineConfig, ...]:
    """Check the tables of a file in this folder. `place` begins the message of a ConfigError."""
    return parse_tables(tables, PIPELINES, place, partial(_parse, folder))


def _parse(folder: Path, table: Table, place: str) -> PipelineConfig:
    check_keys(table, _KEYS, place)
    name, index, model = name_of(table, place), text_of(table, "index", place), text_of(table, "model", place)
    top = _number(table, "top", DEFAULT_TOP, 1, place)
    reranker = None
    if "reranker" in table:
        candidates = _number(table, "candidates", min(CANDIDATES * top, MAX_TOP), top, place)
        reranker = RerankerConfig(model=text_of(table, "reranker", place), candidates=candidates)
    elif "candidates" in table:
        raise ConfigError(f"{place}candidates are for a reranker, and there is none.", remedy="Name one, or leave them out.")
    template = text_of(table, "template", place) if "template" in table else DEFAULT_TEMPLATE
    for part in ("{sources}", "{question}"):
        if part not in template:
            raise ConfigError(f"{place}the template has no {part}.", remedy="docs/pipelines.md shows one.")
    return PipelineConfig(name=name, index=str(folder / index), model=model, top=top, reranker=reranker, template=template)


def _number(table: Table, key: str, default: int, least: int, place: str) -> int:
    value = table.get(key, default)
    if type(value) is not int or not least <= value <= MAX_TOP:
        raise ConfigError(f"{place}{key} is not a number from {least} to {MAX_TOP}.", remedy=f"Leave it out for {default}.")
    return value
