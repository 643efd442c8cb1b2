"""Opens an adapter's files while a server runs: only regular files in allowed folders, within a time limit."""

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
"""Peak bytes per adapter value during reading: its stored, float32, reordered and packed copies."""
_PIECE_BYTES = 1 << 24  # the time limit is checked after each piece of this size


def is_adapter(path: Path) -> bool:
    return (path / CONFIG_FILE).is_file() and not (path / "config.json").is_file()


class AdapterFiles:
    def __init__(
        self,
        *,
        roots: Sequence[Path] | None = None,
        timeout_s: float | None = None,
        take: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Set the limits on reading an adapter.

        - `roots`: resolved folders or files where reading is allowed; None: everywhere
        - `take`: called with the bytes that reading needs; raises ModelError if there is too little memory
        """
        self._roots = roots
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._take = take
        self._digest = blake2b(digest_size=16)

    @property
    def digest(self) -> bytes:
        return self._digest.digest()

    def check(self, path: Path) -> None:
        """Raise ModelError if a path leads out of the allowed folders. The message reveals nothing about files outside."""
        if self._roots is None:
            return
        try:
            self._check(Path(os.path.realpath(path)), path)
        except ValueError:  # a null character
            raise _outside(path) from None

    def open(self, path: Path) -> BinaryIO:
        """Open a regular file in the allowed folders. Raises ModelError for any other file, and OSError."""
        # Without O_NONBLOCK, opening a pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise ModelError(f"{path}: it is not a regular file.", remedy="Put a file there.")
            if self._roots is not None:  # check the open file: links may change between a check and the opening
                self._check(Path(f"/proc/self/fd/{fd}").readlink(), path)
        except BaseException:
            os.close(fd)
            raise
        return cast("BinaryIO", _HashedFile(io.FileIO(fd), self._read))

    def read(self, path: Path, max_bytes: int) -> bytes:
        """Read a whole file. Raises ModelError if it is missing, can't be read or has more than `max_bytes`."""
        try:
            with self.open(path) as file:
                num_bytes = os.fstat(file.fileno()).st_size
                if num_bytes > max_bytes:
                    raise ModelError(
                        f"{path}: it has {num_bytes} bytes, more than the {max_bytes} that it could need for this model.",
                        remedy="Check that it belongs to this model.",
                    )
                self._take(num_bytes)
                return file.read(num_bytes)
        except FileNotFoundError as error:
            raise ModelError(f"{path}: there is no such file.", remedy="Check the path.") from error
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error}.", remedy="Check the file and its permissions.") from error

    def take(self, num_values: int) -> None:
        """Reserve memory for `num_values` numbers of the adapter. Raises ModelError if there is too little."""
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
        assert size is not None, "every read must be limited"
        assert size >= 0, "every read must be limited"
        return self._hashed(super().read, size)


def _outside(path: Path) -> ModelError:
    return ModelError(
        f"{str(path)[:300]!r} is not in a folder that adapters may be loaded from.",
        remedy="Put the adapter, with its files, into the folder of --lora-dir, or name it in --lora-modules.",
    )
