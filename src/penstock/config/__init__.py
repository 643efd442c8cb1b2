"""Settings and their defaults: read by `deploy` and `cli`, and by programs that start Penstock from Python. Builds nothing."""

from penstock.config.components import (
    AbConfig,
    AdmissionConfig,
    AttentionKernels,
    Backend,
    BackendConfig,
    Config,
    Device,
    KvConfig,
    LogConfig,
    LogFormat,
    LogLevel,
    ModelConfig,
    SchedulerConfig,
    ServerConfig,
)

__all__ = [
    "AbConfig",
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
]
