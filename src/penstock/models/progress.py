"""How a download tells where it is. Called by `models.pull`; the terminal's bar is made by `cli`."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Protocol, Self, TextIO


class Progress(Protocol):
    """One thing at a time: `begin`, any number of `update`, `end`."""

    def begin(self, label: str, total_bytes: int) -> None:
        """A stage starts; `total_bytes` is 0 if unknown, and else may be off by a little."""
        ...

    def update(self, done_bytes: int) -> None:
        """Bytes done of this stage; never falls."""
        ...

    def end(self) -> None:
        """The stage is over, done or not. May be called when none is running."""
        ...

    def note(self, text: str) -> None:
        """A line for the user."""
        ...


class NullProgress:
    """Tells nobody."""

    def begin(self, label: str, total_bytes: int) -> None: ...

    def update(self, done_bytes: int) -> None: ...

    def end(self) -> None: ...

    def note(self, text: str) -> None: ...


class TerminalProgress:
    """A tqdm bar on a terminal; where the stream is none, one line per stage. A context manager: leaving it ends the bar."""

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.end()
