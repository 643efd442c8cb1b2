"""What can be set, and nothing else: read by `build` and `cli`, and by whoever starts Penstock from Python. Builds nothing."""

from penstock.config.components import (
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
