"""The `[[pipelines]]` tables of a config file: models that answer from an index of documents."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.config.tables import Table, check_keys, count_of, name_of, number_of, parse_tables, text_of
from penstock.types.errors import ConfigError

PIPELINES = "pipelines"
DEFAULT_TOP, MAX_TOP = 4, 100
CANDIDATES = 5
"""Default number of passages that a reranker scores for each one that it chooses."""
DEFAULT_TEMPLATE = """Answer the question from these sources, and cite them as [1]. If they do not answer it, say so.

{sources}

Question: {question}"""
DEFAULT_SUPPORTED = 0.5
DEFAULT_UNSUPPORTED = "The documents do not answer this."
_KEYS = ("name", "index", "model", "top", "template", "reranker", "candidates", "check", "supported", "unsupported")


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankerConfig:
    model: str
    candidates: int
    """Number of nearest passages that the reranker scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig:
    """The answer is replaced unless a model confirms that the passages support it."""

    model: str
    least: float = DEFAULT_SUPPORTED
    """Least probability of "yes" to keep the answer."""
    otherwise: str = DEFAULT_UNSUPPORTED
    """The text that replaces an unsupported answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    name: str
    """The name that clients ask for."""
    index: str
    """Written by `penstock index`. Relative paths start at the config file's folder."""
    model: str
    """The model that writes the answer, or a route between models of this server."""
    top: int = DEFAULT_TOP
    """Number of passages in the prompt."""
    reranker: RerankerConfig | None = None
    """Chooses the passages. None takes the nearest ones."""
    check: CheckConfig | None = None
    template: str = DEFAULT_TEMPLATE
    """The prompt template: passages replace `{sources}`, and the client's question `{question}`."""


def parse_pipelines(tables: object, place: str, folder: Path) -> tuple[PipelineConfig, ...]:
    """Parse the tables of a file in `folder`. Raises ConfigError with a message that begins with `place`."""
    return parse_tables(tables, PIPELINES, place, partial(_parse, folder))


def _parse(folder: Path, table: Table, place: str) -> PipelineConfig:
    check_keys(table, _KEYS, place)
    name, index, model = name_of(table, place), text_of(table, "index", place), text_of(table, "model", place)
    top = count_of(table, "top", DEFAULT_TOP, 1, MAX_TOP, place)
    reranker = None
    if "reranker" in table:
        candidates = count_of(table, "candidates", min(CANDIDATES * top, MAX_TOP), top, MAX_TOP, place)
        reranker = RerankerConfig(model=text_of(table, "reranker", place), candidates=candidates)
    elif "candidates" in table:
        raise ConfigError(f"{place}candidates are for a reranker, and there is none.", remedy="Name one, or leave them out.")
    template = text_of(table, "template", place) if "template" in table else DEFAULT_TEMPLATE
    for part in ("{sources}", "{question}"):
        if part not in template:
            raise ConfigError(f"{place}the template has no {part}.", remedy="docs/pipelines.md shows one.")
    check = None
    if "check" in table:
        least = number_of(table, "supported", DEFAULT_SUPPORTED, 0, 1, place)
        otherwise = text_of(table, "unsupported", place) if "unsupported" in table else DEFAULT_UNSUPPORTED
        check = CheckConfig(model=text_of(table, "check", place), least=least, otherwise=otherwise)
    elif lost := {"supported", "unsupported"} & table.keys():
        raise ConfigError(f"{place}{min(lost)!r} is for a check, and there is none.", remedy="Name its model, or leave it out.")
    return PipelineConfig(
        name=name, index=str(folder / index), model=model, top=top, reranker=reranker, check=check, template=template
    )
