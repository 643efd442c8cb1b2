"""Pipelines of a deployment: models that answer from an index of documents."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.pipelines import PipelineConfig
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # with NumPy, which a server starts without
    from penstock.search.index import Reader


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    config: PipelineConfig
    reader: Reader

    @property
    def name(self) -> str:
        return self.config.name


def open_pipelines(configs: Sequence[PipelineConfig]) -> list[Pipeline]:
    """Open the pipelines' indexes. Raises ConfigError."""
    if not configs:
        return []
    from penstock.search.index import Reader

    readers = {path: Reader(Path(path)) for path in {config.index for config in configs}}
    return [Pipeline(config=config, reader=readers[config.index]) for config in configs]


def check_pipelines(pipelines: Sequence[Pipeline], by_name: Mapping[str, object], others: Collection[str]) -> None:
    """Raise ConfigError for a pipeline with another's name, or of models that are not served. `others`: names of routes."""
    for pipeline in pipelines:
        if pipeline.name in by_name or pipeline.name in others:
            raise ConfigError(f"A pipeline is called {pipeline.name!r}, and so is a model or a route.", remedy="Rename it.")
        reranker = pipeline.config.reranker
        for name in (pipeline.config.model, pipeline.reader.embedder, *([reranker.model] if reranker else [])):
            if name not in by_name:
                raise ConfigError(
                    f"The pipeline {pipeline.name} needs {name!r}, which is not served.",
                    remedy="Add a [[models]] table for it.",
                )
