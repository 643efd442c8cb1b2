"""Penstock's cache folder, which keeps models, saved experts and verdicts on kernels; and helpers to lock and sync files."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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


@contextmanager
def locked(path: Path, on_wait: Callable[[], object]) -> Iterator[bool]:
    """Lock a file while the context lasts. Yields whether another process had the lock."""
    with path.open("ab") as file:  # it stays: removing it would race
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_waited = False
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
            has_waited = True
        yield has_waited


def fetching_alone(path: Path, note: Callable[[str], object]) -> AbstractContextManager[bool]:
    """Let one process at a time fetch the model that will be at `path`. If another one does, `note` gets a line to show."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return locked(path.with_name(f".{path.name}.lock"), lambda: note("Another process is fetching this model; waiting for it."))
