"""From a config to a running model for a command: fetches what is missing, then builds. Never answers anything itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config import Config
from penstock.config.environment import unknown_variables

if TYPE_CHECKING:
    from penstock.deploy.running import RunningModel

_log = logging.getLogger(__name__)


def cache_dir(given: str | None) -> Path:
    """The folder that was named, or the default one. Raises ConfigError if it begins with a home that is nobody's."""
    from penstock.models.catalog import default_cache_dir, expand_home

    return expand_home(given) if given else default_cache_dir()


def warn_of_unknown_variables() -> None:
    """A line in the log for each environment variable that looks like a setting and is none: a command's first word."""
    for warning in unknown_variables(os.environ):
        _log.warning(warning)


def start_runtime(config: Config) -> RunningModel:
    """The model of a config, fetched first if it is one that can be. Raises PenstockError."""
    from penstock.deploy.factory import locate, start_model

    warn_of_unknown_variables()
    return start_model(config, locate(config))
