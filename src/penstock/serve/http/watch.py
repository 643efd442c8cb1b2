"""Reloads the server's TLS and key files when they change, and immediately after a SIGHUP.

A changed file is read once it is the same in two checks, so that it is not read while it is written. If a file can't be used,
the log says why once, nothing changes, and each check tries again: the cause may be outside the file, such as permissions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

from penstock.deploy.off_loop import in_daemon
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)
_Value = TypeVar("_Value")

EVERY_S = 2.0
"""Time between two checks."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[_Value]):
    """Files that are read together, such as a certificate and its key."""

    def __init__(self, name: str, paths: Sequence[str], *, read: Callable[[], _Value], use: Callable[[_Value], object]) -> None:
        """`name` is for the log. `read` runs on a thread and may raise `ConfigError`; `use` runs on the event loop."""
        self.name = name
        self._paths = [Path(path) for path in paths]
        self._read = read
        self._use = use
        self._seen = self._taken = self._stamp()
        self._failure: tuple[_Stamp, str] | None = None
        """The files that the last read could not use, and why."""

    async def look(self, *, at_once: bool) -> None:
        """Read the files if they have changed. `at_once`: read them in any case."""
        seen, self._seen = self._seen, await in_daemon(self._stamp)
        is_done = self._seen == self._taken and self._failure is None
        if not at_once and (is_done or self._seen != seen):
            return
        self._taken, failure, self._failure = self._seen, self._failure, None
        try:
            self._use(await in_daemon(self._read))
        except ConfigError as error:
            self._failure = self._seen, str(error)
            if at_once or self._failure != failure:
                _log.error("%s could not be reloaded, so the previous version stays in force: %s", self.name, error)
        else:
            _log.info("%s was reloaded", self.name)

    def _stamp(self) -> _Stamp:
        """Return a value that changes when a file is written or replaced, also behind a symbolic link."""
        return tuple(map(_stamp_of, self._paths))


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


class FileWatch:
    """A task on the event loop that reloads files until `close`."""

    def __init__(self, watched: Sequence[Watched[object]]) -> None:
        self._watched = watched
        self._is_asked = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    def ask(self) -> None:
        """Reload all files now."""
        self._is_asked.set()

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._is_asked.wait(), EVERY_S)
            at_once = self._is_asked.is_set()
            self._is_asked.clear()
            for watched in self._watched:
                try:
                    await watched.look(at_once=at_once)
                except Exception:
                    _log.exception("%s could not be reloaded", watched.name)
