"""A disk that fails at the n-th write, and what a process has open. For tests of what is kept on a disk."""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from unittest import mock

_open, _fsync, _fdatasync = Path.open, os.fsync, os.fdatasync


def open_files() -> list[str]:
    """Paths of the files that this process has open."""
    found = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            path = str(number.readlink())
            if path.startswith("/") and not path.startswith(("/proc", "/dev")):
                found.append(path)
    return sorted(found)


class FailingFile(FileIO):
    """A file whose writes may fail, after having written a part."""

    disk: FailingDisk

    def write(self, data):
        if self.disk.fails():
            super().write(memoryview(data)[: len(data) // 2])
            raise self.disk.error()
        return super().write(data)

    def truncate(self, size=None):
        if self.disk.fails():
            raise self.disk.error()
        return super().truncate(size)


class FailingDisk:
    """Fails once, at the n-th of all writes, truncations and syncs of files in Python. SQLite's own are not counted."""

    def __init__(self) -> None:
        self._left = 0
        self._code = errno.EIO
        self.has_failed = False

    def fails(self) -> bool:
        self._left -= 1
        if self._left == -1:
            self.has_failed = True
        return self._left == -1

    def error(self) -> OSError:
        return OSError(self._code, os.strerror(self._code))

    @contextlib.contextmanager
    def failing(self, nth: int, code: int) -> Iterator[None]:
        self._left, self._code, self.has_failed = nth, code, False
        file_type = type("File", (FailingFile,), {"disk": self})

        def synced(real):
            def sync(number):
                if self.fails():
                    raise self.error()
                real(number)

            return sync

        def opened(path: Path, mode: str = "r", *args, **kwargs):
            if "x" in mode or "w" in mode:
                return io.BufferedWriter(file_type(path, mode.replace("b", "")), 8192)
            return _open(path, mode, *args, **kwargs)

        with (
            mock.patch.object(os, "fsync", synced(_fsync)),
            mock.patch.object(os, "fdatasync", synced(_fdatasync)),
            mock.patch.object(Path, "open", opened),
            mock.patch("penstock.jobs.lines.FileIO", file_type),
        ):
            try:
                yield
            finally:
                self._left = -1  # files that are still open are sound from now on
