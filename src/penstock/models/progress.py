"""How a pull shows what it does, and the copying that reports to it."""

from __future__ import annotations

import hashlib
import sys
from typing import IO, Any, TextIO


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


def copy(stream: IO[bytes], out: IO[bytes] | None, digest: hashlib._Hash, progress: Progress, done: int) -> int:
    """Read a stream to its end, into `out` if given. `done`: bytes of this stage so far. Return that with the new ones."""
    while chunk := stream.read(1 << 20):
        digest.update(chunk)
        if out is not None:
            out.write(chunk)
        done += len(chunk)
        progress.update(done)
    return done
