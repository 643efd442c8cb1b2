"""The folder in which Penstock keeps models, saved experts and verdicts on kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from penstock.types.errors import ConfigError


def default_cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return $PENSTOCK_CACHE, else $XDG_CACHE_HOME/penstock, else ~/.cache/penstock."""
    if environ.get("PENSTOCK_CACHE"):
        return expand_home(environ["PENSTOCK_CACHE"])
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else expand_home("~/.cache")) / "penstock"


def expand_home(folder: str) -> Path:
    """Return the path with `~` or `~user` replaced. Raises ConfigError if there is no such home."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{folder!r}: there is no such home folder.",
            remedy="Name a folder in full (the cache with --cache or PENSTOCK_CACHE), or ./~... if its own name begins with ~.",
        ) from error


def cache_dir(given: str | None) -> Path:
    return expand_home(given) if given else default_cache_dir()
