"""The lines of one batch: checked, put in order, and taken away one by one as their answers are written.

A SQLite database has the lines without an answer, and how long the files of answers are. Both change together, after the
answers were written. Bytes beyond, which a killed process has written, are cut off at the next start. So each line has one
answer.
"""

from __future__ import annotations

import os
import sqlite3
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock import fast_json
from penstock.jobs.order import prefix_key

MAX_ERRORS = 50
"""Most errors of a file that are listed."""
AT_ONCE = 2000
"""Lines that are noted together."""
CACHE_KIB = 1 << 15

_SCHEMA = """
CREATE TABLE lines (place INTEGER PRIMARY KEY, start INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE progress (
    num_lines INTEGER NOT NULL, num_completed INTEGER NOT NULL, num_failed INTEGER NOT NULL,
    num_output_bytes INTEGER NOT NULL, num_error_bytes INTEGER NOT NULL, usage BLOB NOT NULL
);
"""


class Request(msgspec.Struct):
    """One line of a file."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


_read_request = msgspec.json.Decoder(Request).decode


class BadLines(Exception):
    """A file can't be run."""

    def __init__(self, errors: Sequence[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


class Stopped(Exception):
    """The check of a file was stopped."""


def prepare(path: Path, source: Path, urls: Collection[str], max_line_bytes: int, is_stopped: Callable[[], bool]) -> int:
    """Check the lines of a file, and write them to a new database in the order in which they run. Return their number.

    `urls`: paths that they may be for. Takes memory for 8 bytes of each line, and for sorting
    what `CACHE_KIB` says. Raises BadLines, Stopped, OSError and sqlite3.Error; then the database is as if it had not begun.
    """
    unsorted = path.with_name(f"{path.name}-unsorted")
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    with closing(sqlite3.connect(path, isolation_level=None)) as base:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = OFF")  # a process that is killed in here begins anew
        base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        base.execute("ATTACH ? AS aside", (str(unsorted),))
        base.execute("PRAGMA aside.journal_mode = OFF")
        base.execute("CREATE TABLE aside.unsorted (key BLOB NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL)")
        base.execute("BEGIN")
        rows: list[tuple[bytes, int, int]] = []
        num_lines = 0
        for row in _checked(source, urls, max_line_bytes, is_stopped):
            rows.append(row)
            num_lines += 1
            if len(rows) == AT_ONCE:
                base.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", rows)
                rows.clear()
        base.executemany("INSERT INTO unsorted VALUES (?, ?, ?)", rows)
        for statement in _SCHEMA.split(";"):
            base.execute(statement)
        base.execute("INSERT INTO lines (start, size) SELECT start, size FROM unsorted ORDER BY key, start")
        base.execute("INSERT INTO progress VALUES (?, 0, 0, 0, 0, ?)", (num_lines, b"{}"))
        base.execute("COMMIT")
        base.execute("DETACH aside")
    unsorted.unlink()
    return num_lines


def _checked(
    source: Path, urls: Collection[str], max_line_bytes: int, is_stopped: Callable[[], bool]
) -> Iterator[tuple[bytes, int, int]]:
    """Yield key, start and size of each line. Raises BadLines and Stopped."""
    errors: list[dict[str, Any]] = []
    hashes, starts = array("q"), array("q")
    start, number = 0, 0
    with source.open("rb") as file:
        while line := file.readline(max_line_bytes + 2):
            number += 1
            if is_stopped():
                raise Stopped
            if number % 16 == 0:
                time.sleep(0)  # others need the interpreter
            if len(line) > max_line_bytes + 1:
                message = f"The line has more than {max_line_bytes} bytes (--max-body-size)."
                errors.append(_error(number, "line_too_long", message))
                break
            if line.strip():
                found = _row(line, urls, number)
                if isinstance(found, dict):
                    errors.append(found)
                else:
                    custom_id, key = found
                    hashes.append(hash(custom_id))
                    starts.append(start)
                    yield key, start, len(line)
                if len(errors) >= MAX_ERRORS:
                    break
            start += len(line)
    if not errors and not starts:
        errors.append(_error(None, "empty_file", "The file has no lines."))
    if errors or (errors := _twice(source, hashes, starts, max_line_bytes)):
        raise BadLines(errors)


def _row(line: bytes, urls: Collection[str], number: int) -> tuple[str, bytes] | dict[str, Any]:
    """Return a line's `custom_id` and its key, or what is wrong with it."""
    try:
        request = _read_request(line)
        body = fast_json.loads(bytes(request.body))
    except (msgspec.DecodeError, ValueError) as error:
        try:
            fast_json.loads(line)
        except fast_json.DecodeError as wrong:
            return _error(number, "invalid_json_line", f"The line is not JSON: {wrong}")
        return _error(number, "invalid_request", f"The line is not a request: {error}.")
    if not request.custom_id or len(request.custom_id) > 512:
        return _error(number, "invalid_custom_id", "'custom_id' must have 1 to 512 characters.", "custom_id")
    if request.method != "POST":
        return _error(number, "invalid_method", "'method' must be 'POST'.", "method")
    if request.url not in urls:
        return _error(number, "invalid_url", f"'url' must be {' or '.join(urls)}.", "url")
    if not isinstance(body, dict):
        return _error(number, "invalid_request", "'body' must be an object.", "body")
    if body.get("stream"):
        return _error(number, "invalid_request", "Answers of a batch can't be streamed.", "body.stream")
    return request.custom_id, prefix_key(request.url, body)


def _error(number: int | None, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    return {"code": code, "line": number, "message": message, "param": param}


def _twice(source: Path, hashes: array[int], starts: array[int], max_line_bytes: int) -> list[dict[str, Any]]:
    """Return errors for a `custom_id` of two lines. Lines of equal hashes are read again."""
    import numpy as np  # here, for a server starts without it

    known = np.frombuffer(hashes, np.int64)
    ordered = np.argsort(known, kind="stable")
    same = np.flatnonzero(known[ordered[1:]] == known[ordered[:-1]])
    errors = []
    with source.open("rb") as file:

        def custom_id(nth: int) -> str:
            file.seek(starts[nth])
            return _read_request(file.readline(max_line_bytes + 2)).custom_id

        for place in same[:MAX_ERRORS].tolist():
            first, second = ordered[place], ordered[place + 1]
            if (name := custom_id(first)) == custom_id(second):
                message = f"'custom_id' {name[:80]!r} stands in an earlier line, too."
                errors.append(_error(_number_at(source, starts[second]), "duplicate_custom_id", message, "custom_id"))
    return errors


def _number_at(source: Path, start: int) -> int:
    """Return the number of the line that begins there, from 1."""
    number = 1
    with source.open("rb") as file:
        while start > 0:
            data = file.read(min(start, 1 << 20))
            number += data.count(b"\n")
            start -= len(data)
    return number


class Line(NamedTuple):
    place: int
    """Its number in the order of the batch."""
    data: bytes


class Answer(NamedTuple):
    place: int
    data: bytes
    """A line of the output file, or of the error file."""
    is_error: bool
    usage: dict[str, int]


class Progress(NamedTuple):
    num_lines: int
    num_completed: int
    num_failed: int
    num_output_bytes: int
    num_error_bytes: int
    usage: dict[str, int]

    @property
    def num_answered(self) -> int:
        return self.num_completed + self.num_failed

    @property
    def num_left(self) -> int:
        return self.num_lines - self.num_answered


class Lines:
    """The lines of a batch that was prepared. For one thread at a time. Raises sqlite3.Error and OSError."""

    def __init__(self, path: Path, source: Path, output: Path, errors: Path) -> None:
        self._base = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._base.execute("PRAGMA synchronous = NORMAL")
        self._base.execute("PRAGMA cache_size = -2048")
        *counts, usage = self._base.execute("SELECT * FROM progress").fetchone()
        self.progress = Progress._make([*counts, fast_json.loads(usage)])
        self._source = source.open("rb")
        self._output, self._errors = _opened(output), _opened(errors)
        self._cut()
        self._last = 0
        """Place of the last line that was taken."""

    def _cut(self) -> None:
        """Cut off what was written of answers that are not noted."""
        self._output.truncate(self.progress.num_output_bytes)
        self._errors.truncate(self.progress.num_error_bytes)

    def rewind(self) -> None:
        """Begin anew with the first line that has no answer."""
        self._last = 0

    def take(self, num: int) -> list[Line]:
        """Return the next lines that have no answer."""
        query = "SELECT place, start, size FROM lines WHERE place > ? ORDER BY place LIMIT ?"
        rows = self._base.execute(query, (self._last, num)).fetchall()
        if rows:
            self._last = rows[-1][0]
        return [Line(place, os.pread(self._source.fileno(), size, start)) for place, start, size in rows]

    def write(self, answers: Sequence[Answer]) -> None:
        """Write answers. If that fails, none of them was written."""
        progress = self.progress
        outputs = b"".join([one.data for one in answers if not one.is_error])
        errors = b"".join([one.data for one in answers if one.is_error])
        num_errors = sum([one.is_error for one in answers])
        usage = dict(progress.usage)
        for one in answers:
            for name, num in one.usage.items():
                usage[name] = usage.get(name, 0) + num
        later = Progress(
            progress.num_lines,
            progress.num_completed + len(answers) - num_errors,
            progress.num_failed + num_errors,
            progress.num_output_bytes + len(outputs),
            progress.num_error_bytes + len(errors),
            usage,
        )
        base = self._base
        try:
            for file, data in ((self._output, outputs), (self._errors, errors)):
                if data:
                    _append(file, data)
            base.execute("BEGIN IMMEDIATE")
            base.executemany("DELETE FROM lines WHERE place = ?", [(one.place,) for one in answers])
            base.execute(
                "UPDATE progress SET num_completed = ?, num_failed = ?, num_output_bytes = ?, num_error_bytes = ?, usage = ?",
                (later.num_completed, later.num_failed, later.num_output_bytes, later.num_error_bytes, fast_json.dumps(usage)),
            )
            base.execute("COMMIT")
        except BaseException:
            if base.in_transaction:
                base.execute("ROLLBACK")
            self._cut()
            raise
        self.progress = later

    def close(self) -> None:
        self._base.close()
        for file in (self._source, self._output, self._errors):
            file.close()


def _opened(path: Path) -> FileIO:
    path.touch(mode=0o600)
    return FileIO(path, "r+")


def _append(file: FileIO, data: bytes) -> None:
    file.seek(0, os.SEEK_END)
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]
    os.fdatasync(file.fileno())


def read_line(data: bytes) -> Request:
    """Return the request of a line that was checked."""
    return _read_request(data)
