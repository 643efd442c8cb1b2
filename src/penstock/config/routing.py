"""The tables of a config file that give clients more names than those of models."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.pipelines import PipelineConfig
from penstock.config.routes import RouteConfig
from penstock.config.upstreams import UpstreamConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    routes: tuple[RouteConfig, ...] = ()
    upstreams: tuple[UpstreamConfig, ...] = ()
    pipelines: tuple[PipelineConfig, ...] = ()
