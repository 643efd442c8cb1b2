"""The components together: the table of them and `Config`, made by `cli` or by hand, handed to `build`. Reads nothing itself.

Each component has a file of its own beside this one: data with defaults. A field's one-line doc is what `--help` and
docs/configuration.md show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.admission import AdmissionConfig
from penstock.config.backend import AttentionKernels, Backend, BackendConfig, Device
from penstock.config.kv import KvConfig
from penstock.config.log import LogConfig, LogFormat, LogLevel
from penstock.config.model import DEFAULT_MODEL, ModelConfig
from penstock.config.scheduler import SchedulerConfig
from penstock.config.server import ServerConfig
from penstock.config.setting import Component, settings_of

__all__ = [
    "COMPONENTS",
    "DEFAULT_MODEL",
    "AdmissionConfig",
    "AttentionKernels",
    "Backend",
    "BackendConfig",
    "Config",
    "Device",
    "KvConfig",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "ModelConfig",
    "SchedulerConfig",
    "ServerConfig",
    "config_from",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything at once: what `build` takes."""

    model: ModelConfig = field(default_factory=ModelConfig)
    kv: KvConfig = field(default_factory=KvConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)


COMPONENTS: tuple[tuple[str, type[Component]], ...] = (
    ("model", ModelConfig),
    ("kv", KvConfig),
    ("scheduler", SchedulerConfig),
    ("admission", AdmissionConfig),
    ("backend", BackendConfig),
    ("server", ServerConfig),
    ("log", LogConfig),
)
"""Field of `Config` and component, in the order of help and docs."""


def config_from(values: Mapping[str, object]) -> Config:
    """The config with these values of settings, by their keys. Keys that are none are left alone."""
    parts: dict[str, Any] = {}
    for name, component in COMPONENTS:
        given = {item.field: values[item.key] for item in settings_of(component) if item.key in values}
        parts[name] = component(**given)
    return Config(**parts)
