"""Files with a model's packed weights, which a later start maps instead of converting the model's own files.

A file is a header, then the packed arrays of each matrix (native/packing.h), each padded to a multiple of 64 bytes. The header
is its length and digest, then text: lines that identify the sources, an empty line, a line for each matrix.
"""

from __future__ import annotations

import errno
import mmap
import os
import shlex
import shutil
import stat
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.disk import sync
from penstock.models.cache import locked
from penstock.types.errors import ModelError

LAYOUT = 2
"""Raise this number when the same weights are packed to other bytes (packing.cpp, blocks.cpp, lowering.py). A test notices."""
MAGIC = b"PENSTOCK PACKED\n"
MAX_HEADER_BYTES = 1 << 24
ALIGNMENT = 64  # `kArrayAlignment` of native/packing.h
_PREFIX = struct.Struct("<16sQ32s")
"""Magic, bytes of the header's text, its digest."""
_WRITTEN_BYTES = 1 << 21  # a huge page
_DIGEST_BYTES = 32

Identity = Mapping[str, str]
"""The sources and the version that a file was made from. A start uses the file only if all match."""
_PACK_AGAIN = "`penstock pack` with the same settings writes it again."
_CHANGES = {"weights": "the model's files changed", "adapter": "the adapter's files changed"}


class PackedError(ModelError):
    """A file of packed weights is damaged, unsafe, or made of something else."""


class Form(NamedTuple):
    """The arguments of the engine's `add_matrix` on which a matrix's packed bytes depend."""

    format: str
    num_rows: int
    num_cols: int
    by_row: bool = False
    has_apart: bool = False


class Packed(NamedTuple):
    form: Form
    arrays: Sequence[NDArray[np.uint8]]


class Place(NamedTuple):
    form: Form
    offset: int
    num_bytes: int  # with the padding
    digest: str


@dataclass(frozen=True, slots=True)
class PackedFile:
    """An open file with a sound header."""

    path: Path
    fd: int
    num_bytes: int
    identity: Identity
    places: Mapping[str, Place]

    def place(self, name: str, form: Form) -> Place:
        """Return where a matrix lies. Raises PackedError if the file does not have it in this form."""
        place = self.places.get(name)
        if place is None or place.form != form:
            fault = "missing" if place is None else "packed in another form"
            raise PackedError(f"{self.path} was made for other weights: {name} is {fault}.", remedy=_PACK_AGAIN)
        return place

    def check(self) -> None:
        """Read the whole file. Raises PackedError for a matrix that is not what was written."""
        with mmap.mmap(self.fd, 0, prot=mmap.PROT_READ) as data, memoryview(data) as view:
            with suppress(OSError):  # a system without huge pages
                data.madvise(mmap.MADV_HUGEPAGE)  # the kernels will use the pages that this brings into memory
            spans = [[view[place.offset : place.offset + place.num_bytes]] for place in self.places.values()]
            digests = _digests(spans)
            for (part,) in spans:
                part.release()
        for (name, place), digest in zip(self.places.items(), digests, strict=True):
            if digest != place.digest:
                raise _damaged(self.path, f"{name} is not what was written")


@contextmanager
def open_packed(path: Path, identity: Identity | Callable[[], Identity], *, is_checked: bool = False) -> Iterator[PackedFile]:
    """Open a packed file if its `identity` matches. A function is called only if the file exists.

    Raises FileNotFoundError, and PackedError if the file can't be used. Its content is checked if `is_checked`, or if its
    inode, size or times differ from those of the file checked last: reading 1 GB takes longer than a start may. Other users
    can't write the file or its folder, and programs can't set the time of the last change (ctime).
    """
    try:
        # A symbolic link may lead to where others can write. Opening a named pipe would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise PackedError(f"{path} can't be opened: {error.strerror}.") from error
    try:
        yield _verified(path, fd, identity() if callable(identity) else identity, is_checked=is_checked)
    finally:
        os.close(fd)


def _verified(path: Path, fd: int, identity: Identity, *, is_checked: bool) -> PackedFile:
    try:
        check_owner(path, os.fstat(fd))
        check_owner(path.parent, path.parent.stat())
        file = _read(path, fd)
        for name, value in identity.items():
            if (found := file.identity.get(name)) != value:
                cause = _CHANGES.get(name, f"it was made for {name} {found}, not {value}")
                raise PackedError(f"{path} is out of date: {cause}.", remedy=_PACK_AGAIN)
        stamp, record = _stamp(fd), path.with_suffix(".checked")  # before the check: a later change gives another stamp
        if is_checked or _read_record(record) != stamp:
            try:
                file.check()
            except PackedError:
                with suppress(OSError):
                    record.unlink(missing_ok=True)
                raise
            with suppress(OSError):  # a folder that can't be written: each start checks
                record.write_text(stamp, encoding="ascii")
    except (OSError, ValueError) as error:  # ValueError: the file was emptied meanwhile
        raise PackedError(f"{path} can't be read: {error}.") from error
    return file


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raise PackedError if other users can write the path with this status."""
    if status.st_uid not in (os.geteuid(), 0):
        raise PackedError(f"{path} belongs to another user.", remedy="Name a folder of your own with --cache.")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PackedError(f"{path} can be written by other users.", remedy=f"Run `chmod go-w {shlex.quote(str(path))}`.")


def _damaged(path: Path, cause: str) -> PackedError:
    return PackedError(f"{path} is damaged: {cause}.", remedy=_PACK_AGAIN)


def _stamp(fd: int) -> str:
    status = os.fstat(fd)
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _read_record(path: Path) -> str:
    try:
        with path.open(encoding="ascii") as file:
            return file.read(200)
    except (OSError, ValueError):
        return ""


def _read(path: Path, fd: int) -> PackedFile:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise PackedError(f"{path} is not a file.", remedy="Remove it.")
    prefix = os.pread(fd, _PREFIX.size, 0)
    if len(prefix) < _PREFIX.size or not prefix.startswith(MAGIC):
        raise PackedError(f"{path} is not a file of packed weights.", remedy=_PACK_AGAIN)
    _, num_bytes, digest = _PREFIX.unpack(prefix)
    text = os.pread(fd, min(num_bytes, MAX_HEADER_BYTES), _PREFIX.size)
    if len(text) != num_bytes or _digest([text]).digest() != digest:
        raise _damaged(path, "its header is not what was written")
    try:
        about, _, lines = text.decode().partition("\n\n")
        identity = {name: value for name, _, value in (line.partition("\t") for line in about.splitlines())}
        places = dict(_place(line, _aligned(_PREFIX.size + num_bytes), status.st_size) for line in lines.splitlines())
    except ValueError as error:
        raise _damaged(path, f"its header makes no sense ({error})") from error
    return PackedFile(path, fd, status.st_size, identity, places)


def _line(name: str, place: Place) -> str:
    fmt, num_rows, num_cols, by_row, has_apart = place.form
    return (
        f"{place.offset}\t{place.num_bytes}\t{place.digest}\t{fmt}\t{num_rows}\t{num_cols}\t{by_row:d}\t{has_apart:d}\t{name}"
    )


def _place(line: str, base: int, file_bytes: int) -> tuple[str, Place]:
    """Return a matrix's name and place. Raises ValueError. `base`: where the header ends, from which offsets count."""
    start, length, digest, fmt, num_rows, num_cols, by_row, has_apart, name = line.split("\t")
    offset, num_bytes = int(start), int(length)
    if offset < 0 or num_bytes < 0 or offset % ALIGNMENT or base + offset + num_bytes > file_bytes:
        raise ValueError(f"{name} lies outside of the file")
    form = Form(fmt, int(num_rows), int(num_cols), bool(int(by_row)), bool(int(has_apart)))
    return name, Place(form, base + offset, num_bytes, digest)


def write_packed(
    path: Path, identity: Identity, matrices: Mapping[str, Packed], *, on_wait: Callable[[], object] = lambda: None
) -> None:
    """Write a file, in place of an older one. Other processes see the old file or the new one. Raises OSError.

    `on_wait` is called before waiting for another process that writes the same file. A valid file from that process stays.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(path.with_name(f".{path.name}.lock"), on_wait) as has_waited:
        if has_waited:
            with suppress(FileNotFoundError, PackedError), open_packed(path, identity, is_checked=True):
                return
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)  # a killed process left it
        if sum(array.nbytes for packed in matrices.values() for array in packed.arrays) > shutil.disk_usage(path.parent).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))  # before other programs lack the space
        # Read-only: overwriting the file would kill servers that map it.
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o400)
        try:
            _write(fd, _pieces(identity, matrices))
            os.fsync(fd)
            part.replace(path)
            sync(path.parent)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)


def _pieces(identity: Identity, matrices: Mapping[str, Packed]) -> Iterator[memoryview]:
    """Yield the bytes of a file, in order."""
    padded = {name: [piece for array in packed.arrays for piece in _padded(array.data)] for name, packed in matrices.items()}
    lines, offset = [f"{name}\t{value}" for name, value in identity.items()] + [""], 0
    for (name, pieces), digest in zip(padded.items(), _digests(padded.values()), strict=True):
        num_bytes = sum(piece.nbytes for piece in pieces)
        lines.append(_line(name, Place(matrices[name].form, offset, num_bytes, digest)))
        offset += num_bytes
    header = "\n".join(lines).encode()
    yield from _padded(memoryview(_PREFIX.pack(MAGIC, len(header), _digest([header]).digest()) + header))
    for pieces in padded.values():
        yield from pieces


def _padded(data: memoryview) -> Iterator[memoryview]:
    yield data
    yield memoryview(bytes(_aligned(data.nbytes) - data.nbytes))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write(fd: int, pieces: Iterable[memoryview]) -> None:
    """Write whole chunks of 2 MiB: file systems with large folios then keep them in memory as huge pages."""
    chunk, filled = memoryview(bytearray(_WRITTEN_BYTES)), 0
    for piece in pieces:
        at = 0
        while at < piece.nbytes:
            size = min(piece.nbytes - at, _WRITTEN_BYTES - filled)
            chunk[filled : filled + size] = piece[at : at + size]
            at, filled = at + size, filled + size
            if filled == _WRITTEN_BYTES:
                _write_all(fd, chunk)
                filled = 0
    _write_all(fd, chunk[:filled])


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _digests(parts: Iterable[Sequence[memoryview]]) -> list[str]:
    """Return the digest of each item, computed by all CPUs."""
    with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
        return [digest.hexdigest() for digest in threads.map(_digest, parts)]


def _digest(parts: Sequence[bytes | memoryview]) -> blake2b:
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest
