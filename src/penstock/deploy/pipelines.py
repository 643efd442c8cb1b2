"""Pipelines of a deployment: models that answer from an index of documents."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.pipelines import PipelineConfig
from penstock.deploy.routes import Route
from penstock.types.errors import ConfigError

if TYPE_CHECKING:  # this imports NumPy, which would delay a server's start
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


def check_pipelines(
    pipelines: Sequence[Pipeline], by_name: Mapping[str, object], routes: Mapping[str, Route], upstreams: Collection[str]
) -> None:
    """Raise ConfigError if a pipeline's name is taken, or if this server lacks one of its models."""
    for pipeline in pipelines:
        name, config = pipeline.name, pipeline.config
        if name in by_name or name in routes or name in upstreams:
            raise ConfigError(f"A pipeline is called {name!r}, and so is a model or a route.", remedy="Rename it.")
        route = routes.get(config.model)
        answerers = (config.model,) if route is None else route.models
        if route is not None and (far := [one for one in answerers if one in upstreams]):
            raise ConfigError(
                f"The pipeline {name} would send its documents to the upstream {far[0]}.",
                remedy="Name a model, or a route of models of this server.",
            )
        helpers = [one.model for one in (config.reranker, config.check) if one is not None]
        for needed in (*answerers, pipeline.reader.embedder, *helpers):
            if needed not in by_name:
                raise ConfigError(
                    f"The pipeline {name} needs {needed!r}, which is not served.", remedy="Add a [[models]] table for it."
                )
