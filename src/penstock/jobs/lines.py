"""The lines of one batch: checked, put in order, and taken away one by one as their answers are written.

A SQLite database has the unanswered lines, and the lengths of the answer files. One transaction updates both after answers were
written. Bytes beyond these lengths, left by a killed process or a full disk, are cut off. So each line has one answer.
The database also counts how often the server failed while a line was in flight. A line that crashes the server is given up
after a few attempts.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from hashlib import blake2b
from io import FileIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock import fast_json
from penstock.disk import remove, sync
from penstock.jobs.order import prefix_key

MAX_LINES = 50_000_000
"""Most lines of a file. Checking so many takes ten minutes, and other large files wait meanwhile."""
NOT_IN_A_BATCH = ("stream", "background")
"""Fields of a request that a line can't have."""
ALONE_AFTER, GIVEN_UP_AFTER = 2, 3
"""Failures of the server during a line after which it is asked alone, and after which it is given up. So a line that breaks the
server does that three times, and its neighbours in the batch are answered."""
MAX_ERRORS = 50
"""Most errors of a file that are listed."""
AT_ONCE = 250
"""Lines that are inserted together."""
YIELD_EVERY_BYTES = 1 << 12
"""Bytes that a check reads before it lets other threads run: 50 us of work."""
CACHE_KIB = 1 << 15
_STOP_CHECK_INSTRUCTIONS = 100_000
"""SQLite calls `is_stopped` after so many instructions of its virtual machine."""

_SCHEMA = """
CREATE TABLE lines (place INTEGER PRIMARY KEY, start INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE TABLE progress (
    num_lines INTEGER NOT NULL, num_completed INTEGER NOT NULL, num_failed INTEGER NOT NULL,
    num_output_bytes INTEGER NOT NULL, num_error_bytes INTEGER NOT NULL, usage BLOB NOT NULL
);
"""

_ASKED = """
CREATE TABLE IF NOT EXISTS asked (place INTEGER PRIMARY KEY, num_failures INTEGER NOT NULL, is_under_way INTEGER NOT NULL)
"""

_DIGEST_BYTES = 16
"""Enough for different ids to have different digests in practice."""
_Row = tuple[int, bytes, bytes, int, int]
"""Number, digest of the `custom_id`, key, start and size of a line."""


class Request(msgspec.Struct):
    """One line of a file. Other fields are refused when a batch begins: earlier releases accepted them."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _OnlyRequest(Request, forbid_unknown_fields=True):
    pass


read_line = msgspec.json.Decoder(Request).decode
_read_only_request = msgspec.json.Decoder(_OnlyRequest).decode
_read_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class BadLines(Exception):
    """A batch can't run, because of the file. `errors` says why."""

    def __init__(self, errors: Sequence[dict[str, Any]]) -> None:
        super().__init__(errors[0]["message"])
        self.errors = errors


class Stopped(Exception):
    """The check of a file was stopped."""


def prepare(path: Path, source: Path, urls: Collection[str], max_line_bytes: int, is_stopped: Callable[[], bool]) -> None:
    """Check the lines of a file, and write them to a new database in the order in which they run.

    `urls`: paths that the lines may request. `CACHE_KIB` limits the memory, however many lines there are. Raises BadLines,
    Stopped, OSError and sqlite3.Error, and leaves no database then.
    """
    _check_there(source)
    new, unsorted = path.with_name(f"{path.name}-new"), path.with_name(f"{path.name}-unsorted")
    remove(path.parent.glob(f"{path.name}*"))
    try:
        with closing(sqlite3.connect(new, isolation_level=None)) as base:
            base.set_progress_handler(is_stopped, _STOP_CHECK_INSTRUCTIONS)
            _fill(base, unsorted, source, _checked(source, urls, max_line_bytes, is_stopped))
        sync(new)
        new.rename(path)
        sync(path.parent)
    except sqlite3.OperationalError:
        if is_stopped():
            raise Stopped from None
        raise
    finally:
        remove((new, unsorted))


def _check_there(source: Path) -> None:
    """Raise BadLines if the file of a batch was deleted."""
    if not source.exists():
        raise BadLines([error_at(None, "file_not_found", "The file is gone.")])


def _fill(base: sqlite3.Connection, unsorted: Path, source: Path, rows: Iterator[_Row]) -> None:
    """Write lines to a database, sorted by their keys. Raises BadLines."""
    base.execute("PRAGMA journal_mode = OFF")  # not crash-safe: after a crash the file is prepared again
    base.execute("PRAGMA synchronous = OFF")
    base.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    base.execute("ATTACH ? AS aside", (str(unsorted),))
    base.execute("PRAGMA aside.journal_mode = OFF")
    base.execute("PRAGMA aside.synchronous = OFF")
    columns = (
        "number INTEGER PRIMARY KEY, digest BLOB NOT NULL, key BLOB NOT NULL, start INTEGER NOT NULL, size INTEGER NOT NULL"
    )
    base.execute(f"CREATE TABLE aside.unsorted ({columns})")
    base.execute("BEGIN")
    num_lines = 0
    while some := [*islice(rows, AT_ONCE)]:
        base.executemany("INSERT INTO unsorted VALUES (?, ?, ?, ?, ?)", some)
        num_lines += len(some)
    if errors := _duplicates(base, source):
        raise BadLines(errors)
    for statement in _SCHEMA.split(";"):
        base.execute(statement)
    base.execute("INSERT INTO lines (start, size) SELECT start, size FROM unsorted ORDER BY key, number")
    base.execute("INSERT INTO progress VALUES (?, 0, 0, 0, 0, ?)", (num_lines, b"{}"))
    base.execute("COMMIT")


def _checked(source: Path, urls: Collection[str], max_line_bytes: int, is_stopped: Callable[[], bool]) -> Iterator[_Row]:
    """Yield each line that is not blank. Raises BadLines and Stopped."""
    errors: list[dict[str, Any]] = []
    start, number, num_bytes, num_lines = 0, 0, 0, 0
    with source.open("rb") as file:
        while line := file.readline(max_line_bytes + 2):
            number += 1
            if is_stopped():
                raise Stopped
            num_bytes += len(line)
            if num_bytes >= YIELD_EVERY_BYTES:
                num_bytes = 0
                time.sleep(0)
            if len(line) - line.endswith(b"\n") > max_line_bytes:
                message = f"The line has more than {max_line_bytes} bytes."
                errors.append(error_at(number, "line_too_long", message))
                break
            if line.strip():
                num_lines += 1
                if num_lines > MAX_LINES:
                    errors.append(error_at(number, "too_many_lines", f"The file has more than {MAX_LINES} lines. Split it."))
                    break
                found = _row(line, urls, number)
                if isinstance(found, dict):
                    errors.append(found)
                else:
                    custom_id, key = found
                    digest = blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()
                    yield number, digest, key, start, len(line)
                if len(errors) >= MAX_ERRORS:
                    break
            start += len(line)
    if not (errors or num_lines):
        errors.append(error_at(None, "empty_file", "The file has no lines."))
    if errors:
        raise BadLines(errors)


def _row(line: bytes, urls: Collection[str], number: int) -> tuple[str, bytes] | dict[str, Any]:
    """Return a line's `custom_id` and its key, or what is wrong with it."""
    try:
        request = _read_checked(line)
        data = bytes(request.body)
        if excess := fast_json.excess(data):
            return error_at(number, "invalid_request", f"'body' has {excess}.", "body")
        body = fast_json.loads(data)
    except RecursionError:
        return error_at(number, "invalid_json_line", "The line is not JSON: nested too deeply.")
    except (msgspec.DecodeError, ValueError) as error:
        if excess := fast_json.excess(line):
            return error_at(number, "invalid_request", f"The line has {excess}.")
        try:
            fast_json.loads(line.rstrip(b"\r\n"))
        except fast_json.DecodeError as wrong:
            return error_at(number, "invalid_json_line", f"The line is not JSON: {wrong.msg} (column {wrong.colno}).")
        return error_at(number, "invalid_request", f"The line is not a request: {error}.")
    if not request.custom_id or len(request.custom_id) > 512:
        return error_at(number, "invalid_custom_id", "'custom_id' must have 1 to 512 characters.", "custom_id")
    if request.method != "POST":
        return error_at(number, "invalid_method", "'method' must be 'POST'.", "method")
    if request.url not in urls:
        wanted = f"{' or '.join(urls)}{', the endpoint of the batch' * (len(urls) == 1)}"
        return error_at(number, "invalid_url", f"'url' is {request.url[:80]!r}, and must be {wanted}.", "url")
    if not isinstance(body, dict):
        return error_at(number, "invalid_request", "'body' must be an object.", "body")
    for name in NOT_IN_A_BATCH:
        if body.get(name):
            return error_at(number, "invalid_request", f"'{name}' can't be used in a batch.", f"body.{name}")
    return request.custom_id, prefix_key(request.url, body)


def _read_checked(line: bytes) -> Request:
    """Return the request of a line. Raises msgspec.DecodeError, also for an unknown field unless it is null."""
    with suppress(msgspec.ValidationError):
        return _read_only_request(line)
    for name, value in _read_fields(line).items():
        if name not in Request.__struct_fields__ and bytes(value) != b"null":
            raise msgspec.ValidationError(f"Object contains unknown field `{name[:80]}`")
    return read_line(line)


def error_at(number: int | None, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error of a batch. `number`: of the line, or None for the batch as a whole."""
    return {"code": code, "line": number, "message": message, "param": param}


def _duplicates(base: sqlite3.Connection, source: Path) -> list[dict[str, Any]]:
    """Return an error for each line that repeats the `custom_id` of an earlier one, at most `MAX_ERRORS`."""
    base.execute("CREATE TABLE aside.twice (digest BLOB PRIMARY KEY, first INTEGER NOT NULL) WITHOUT ROWID")
    base.execute("INSERT INTO twice SELECT digest, min(number) FROM unsorted GROUP BY digest HAVING count(*) > 1")
    later = "SELECT number, start FROM unsorted JOIN twice USING (digest) WHERE number > first ORDER BY number LIMIT ?"
    errors: list[dict[str, Any]] = []
    with source.open("rb") as file:
        for number, start in base.execute(later, (MAX_ERRORS,)):
            file.seek(start)
            name = read_line(file.readline()).custom_id
            message = f"'custom_id' {name[:80]!r} is already used in an earlier line."
            errors.append(error_at(number, "duplicate_custom_id", message, "custom_id"))
    return errors


class Line(NamedTuple):
    place: int
    """Its number in the order of the batch."""
    data: bytes
    num_failures: int = 0
    """How often the server failed while the line was in flight."""


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
    """The lines of a batch that was prepared. Any thread may call its methods, which raise sqlite3.Error and OSError."""

    def __init__(self, path: Path, source: Path, output: Path, errors: Path) -> None:
        """Open the files. Raises BadLines, also if the database or a file of answers has lost what was written to it."""
        _check_there(source)
        self._guard = threading.Lock()
        with ExitStack() as opened:
            self._base = opened.enter_context(closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)))
            self._base.execute("PRAGMA journal_mode = WAL")
            self._base.execute("PRAGMA synchronous = NORMAL")
            self._base.execute("PRAGMA cache_size = -2048")
            self._base.execute(_ASKED)
            self._base.execute("UPDATE asked SET num_failures = num_failures + 1, is_under_way = 0 WHERE is_under_way")
            self.progress = self._read_progress()
            self._source = opened.enter_context(source.open("rb"))
            self._source_state = self._state_of_source()
            self._output, self._errors = [opened.enter_context(_opened(one)) for one in (output, errors)]
            sync(output.parent)
            sizes = [os.fstat(one.fileno()).st_size for one in (self._output, self._errors)]
            if sizes[0] < self.progress.num_output_bytes or sizes[1] < self.progress.num_error_bytes:
                raise BadLines([error_at(None, "answers_lost", "A file of answers is shorter than what was written to it.")])
            self._cut()
            self._opened = opened.pop_all()

    def _read_progress(self) -> Progress:
        try:
            self._base.execute("SELECT place, start, size FROM lines LIMIT 0")
            *counts, usage = self._base.execute("SELECT * FROM progress").fetchone()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_ERROR:  # such as a full disk, which is tried again
                raise
            raise BadLines([error_at(None, "progress_lost", f"The batch's database is damaged: {error}.")]) from None
        return Progress._make([*counts, fast_json.loads(usage)])

    def _state_of_source(self) -> tuple[int, int]:
        state = os.fstat(self._source.fileno())
        return state.st_size, state.st_mtime_ns

    def _cut(self) -> None:
        """Undo what is left of a write that failed, in this process or in one that was killed."""
        if self._base.in_transaction:
            self._base.execute("ROLLBACK")
        self._output.truncate(self.progress.num_output_bytes)
        self._errors.truncate(self.progress.num_error_bytes)

    def take(self, after: int, most: int, most_bytes: int) -> list[Line]:
        """Return up to `most` unanswered lines after the place `after`: as many as fit into `most_bytes`, but at least one.

        Raises BadLines if the file changed since the batch was opened.
        """
        query = (
            "SELECT place, start, size, coalesce(num_failures, 0) FROM lines LEFT JOIN asked USING (place) "
            "WHERE place > ? ORDER BY place LIMIT ?"
        )
        taken: list[Line] = []
        with self._guard:
            if self._state_of_source() != self._source_state:
                raise BadLines([error_at(None, "file_changed", "The file was changed while its lines were answered.")])
            for place, start, size, num_failures in self._base.execute(query, (after, most)).fetchall():
                most_bytes -= size
                if taken and most_bytes < 0:
                    break
                taken.append(Line(place, os.pread(self._source.fileno(), size, start), num_failures))
        return taken

    def take_to_ask(self, after: int, most: int, most_bytes: int) -> list[Line]:
        """Take lines as `take` does, and mark them as in flight until they are answered or refused.

        A line that is asked alone is not marked yet: see `note_alone`.
        """
        taken = self.take(after, most, most_bytes)
        with self._guard, suppress(sqlite3.OperationalError):  # a full disk: then a failure of the server does not count
            self._base.executemany(
                "INSERT INTO asked VALUES (?, 0, 1) ON CONFLICT (place) DO UPDATE SET is_under_way = 1",
                [(one.place,) for one in taken if one.num_failures < ALONE_AFTER],
            )
        return taken

    def note_alone(self, place: int) -> None:
        """Mark a line that is asked alone as in flight, and unmark earlier ones, whose answers may not be written yet."""
        query = "UPDATE asked SET is_under_way = (place = ?) WHERE num_failures >= ?"
        with self._guard, suppress(sqlite3.OperationalError):
            self._base.execute(query, (place, ALONE_AFTER))

    def note_refusal(self, place: int, *, has_failed: bool) -> None:
        """Mark a line without an answer as no longer in flight. `has_failed`: the engine failed meanwhile, which is counted."""
        query = "UPDATE asked SET num_failures = num_failures + ?, is_under_way = 0 WHERE place = ?"
        with self._guard, suppress(sqlite3.OperationalError):
            self._base.execute(query, (has_failed, place))

    def write(self, answers: Sequence[Answer]) -> None:
        """Write answers. If that fails, none of them was written."""
        with self._guard:
            later = _later(self.progress, answers)
            try:
                self._cut()
                _append(self._output, [one.data for one in answers if not one.is_error])
                _append(self._errors, [one.data for one in answers if one.is_error])
                self._note(later, answers)
            except BaseException:
                with suppress(sqlite3.Error, OSError):  # if this fails, the next write cuts
                    self._cut()
                raise
            self.progress = later

    def _note(self, later: Progress, answers: Sequence[Answer]) -> None:
        base, (_, *counts, usage) = self._base, later
        base.execute("BEGIN IMMEDIATE")
        places = [(one.place,) for one in answers]
        gone = base.executemany("DELETE FROM lines WHERE place = ?", places)
        assert gone.rowcount == len(answers)  # else a line was answered twice
        base.executemany("DELETE FROM asked WHERE place = ?", places)
        base.execute(
            "UPDATE progress SET num_completed = ?, num_failed = ?, num_output_bytes = ?, num_error_bytes = ?, usage = ?",
            (*counts, fast_json.dumps(usage)),
        )
        base.execute("COMMIT")

    def close(self) -> None:
        with self._guard:
            with suppress(sqlite3.Error):
                self._base.execute("UPDATE asked SET is_under_way = 0")
            self._opened.close()


def _later(progress: Progress, answers: Sequence[Answer]) -> Progress:
    """Return the progress after these answers."""
    usage = Counter(progress.usage)
    for one in answers:
        usage.update(one.usage)
    num_errors = sum([one.is_error for one in answers])
    return Progress(
        progress.num_lines,
        progress.num_completed + len(answers) - num_errors,
        progress.num_failed + num_errors,
        progress.num_output_bytes + sum([len(one.data) for one in answers if not one.is_error]),
        progress.num_error_bytes + sum([len(one.data) for one in answers if one.is_error]),
        dict(usage),
    )


def _opened(path: Path) -> FileIO:
    path.touch(mode=0o600)
    return FileIO(path, "r+")


def _append(file: FileIO, lines: Sequence[bytes]) -> None:
    file.seek(0, os.SEEK_END)
    left = memoryview(b"".join(lines))
    while left:
        left = left[file.write(left) :]
    if lines:
        os.fdatasync(file.fileno())
