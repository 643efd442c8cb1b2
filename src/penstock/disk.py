"""Helpers for files and folders: durable changes, sizes, deletion, and texts of errors."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk. Raises OSError."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def size_of(path: Path) -> int:
    """Return the bytes of a file, or 0 if there is none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def cause(error: Exception) -> str:
    """Return what went wrong, without the names of files."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def remove(paths: Iterable[Path]) -> None:
    """Delete files, as far as the disk lets us. The next start of the store deletes the rest."""
    for path in paths:
        with suppress(OSError):
            path.unlink()
