"""The tables of a config file for routes and pipelines, which clients use like models, and for upstreams of routes."""

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
