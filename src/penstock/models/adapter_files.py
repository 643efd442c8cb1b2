"""Opens the files of an adapter while a server runs: regular files alone, in folders that are allowed, within a time; and makes
the hash of all that was read. `models.peft` and `models.gguf_adapter` read through it; `deploy.adapters` sets the bounds.
"""

from __future__ import annotations

import io
import os
import stat
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, cast

from penstock.types.adapter import CONFIG_FILE
from penstock.types.errors import ModelError

READ_BYTES = 16
"""Bytes of memory that each number of an adapter takes at most while it is read: as the file has it, as float32, the same in
the model's order of rows, and packed. `tests/models/test_adapter_files.py` measures it."""
_PIECE_BYTES = 1 << 24
"""The time is looked at after so many bytes."""


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter of PEFT and no model."""
    return (path / CONFIG_FILE).is_file() and not (path / "config.json").is_file()


class AdapterFiles:
    """One reading of one adapter."""

    def __init__(
        self,
        *,
        roots: Sequence[Path] | None = None,
        timeout_s: float | None = None,
        take: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`roots`: folders or files, without links, in which every file has to lie; None: files may lie anywhere. `timeout_s`:
        of all the reading. `take` is told the bytes of memory that the reading needs in all, as soon as they are known, and
        raises ModelError if there are too few.
        """
        self._roots = roots
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._take = take
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> bytes:
        """16 bytes, the hash of all that was read, in its order."""
        return self._digest.digest()

    def check(self, path: Path) -> None:
        """Raises ModelError for a path that leads out of the folders; nothing outside of them is told then."""
        if self._roots is None:
            return
        try:
            self._check(Path(os.path.realpath(path)), path)
        except ValueError:  # a null in it
            raise _outside(path) from None

    def open(self, path: Path) -> BinaryIO:
        """A regular file. Raises ModelError for any other and for one outside of the folders, and OSError."""
        # Else opening a pipe would wait for somebody who writes to it.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ModelError(f"{path}: it is no regular file.", remedy="Put a file there.")
            if self._roots is not None:  # of the file that is open: links may change between a look and the opening
                self._check(Path(f"/proc/self/fd/{fd}").readlink(), path)
        except BaseException:
            os.close(fd)
            raise
        return cast("BinaryIO", _HashedFile(io.FileIO(fd), self._read))

    def read(self, path: Path, max_bytes: int) -> bytes:
        """A whole file. Raises ModelError as `open` does, for a longer one and for one that can't be read."""
        try:
            with self.open(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes > max_bytes:
                    raise ModelError(
                        f"{path}: it has {num_bytes} bytes, and what it can hold at most takes {max_bytes}.",
                        remedy="Check that it belongs to this model.",
                    )
                self._take(num_bytes)
                return file.read(num_bytes)
        except FileNotFoundError as error:
            raise ModelError(f"{path}: there is no such file.", remedy="Check the path.") from error
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error}.", remedy="Check the file and its permissions.") from error

    def take(self, num_values: int) -> None:
        """Before so many numbers of factors are read. Raises ModelError if there is no memory for them."""
        self._take(READ_BYTES * num_values)

    def _check(self, found: Path, path: Path) -> None:
        if self._roots is not None and not any(found.is_relative_to(root) for root in self._roots):
            raise _outside(path)

    def _read(self, read: Callable[[int], bytes], num_bytes: int) -> bytes:
        pieces: list[bytes] = []
        while num_bytes:
            piece = read(min(num_bytes, _PIECE_BYTES))
            if not piece:
                break
            self._digest.update(piece)
            pieces.append(piece)
            num_bytes -= len(piece)
            if self._until_s is not None and time.monotonic() > self._until_s:
                raise TimeoutError(f"reading took more than {self._timeout_s:g} s")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _HashedFile(io.BufferedReader):
    def __init__(self, raw: io.FileIO, hashed: Callable[[Callable[[int], bytes], int], bytes]) -> None:
        super().__init__(raw)
        self._hashed = hashed

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes, fewer at the end; all reading says how many."""
        assert size is not None, "a bound is a must"
        assert size >= 0, "a bound is a must"
        return self._hashed(super().read, size)


def _outside(path: Path) -> ModelError:
    return ModelError(
        f"{str(path)[:300]!r} is not in a folder that adapters may be loaded from.",
        remedy="Put the adapter, with its files, into the folder of --lora-dir, or name it in --lora-modules.",
    )
