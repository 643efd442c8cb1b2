"""The settings of the log. Read by `cli`; writes no line."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from penstock.config.setting import Component, Kind, setting


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(Component):
    """What is written to stderr."""

    title: ClassVar[str] = "Log"

    log_level: str = setting(
        LogLevel.INFO.value, "Least important lines that are written.", kind=Kind.CHOICE, choices=tuple(LogLevel)
    )
    log_format: str = setting(LogFormat.TEXT.value, "How log lines look.", kind=Kind.CHOICE, choices=tuple(LogFormat))
