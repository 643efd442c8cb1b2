"""The folder of files and batches: a SQLite database that lists them, and the contents of the files.

    jobs.db        files and batches
    files/ID       the content of a file, also the answers of a batch that still runs
    lines/ID       the lines of an unfinished batch that have no answer yet (`lines`)

A file's content is written before its row, and deleted before it: a full disk takes no change of the database until a content
is deleted. If the row then stays, as after a kill, it is deleted when the deletion is repeated, or at the next start.

One process has the folder at a time. The remains of a process that was killed are deleted at the next start.
"""

from __future__ import annotations

import fcntl
import os
import re
import sqlite3
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from penstock import fast_json
from penstock.disk import remove, size_of, sync
from penstock.types.errors import DISK_FULL, ConfigError
from penstock.types.request import Owner

FORMAT = 1
UPLOAD, OUTPUT, INTERNAL = "batch", "batch_output", "internal"
"""Purposes of files: lines to run, their answers, and either for an API that shows no files."""
MAX_FILES = 10_000
"""Most files of one key. Limits are per key, since a client without a key may name any tenant."""
MAX_UPLOADS = 64
"""Most unfinished uploads of one key. Each has an open file."""
MAX_UNFINISHED = 100
"""Most unfinished batches of one key."""
MAX_ENDED = 10_000
"""Most ended batches of one key that are remembered."""

MAX_EVENTS = 10_000
"""Most events that wait to be delivered. The oldest are dropped for new ones."""

_MAKE_ROOM = "Delete files or message batches."
_ANOTHER = "Name another folder (--jobs-dir, --output)."
_RESTORE = "Restore the database from a backup, or name another folder (--jobs-dir, --output)."
_FREE_SPACE = "Free some space, or name another folder (--jobs-dir, --output)."
_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
"""SQLite's errors when the disk is full: of a write, and of an open."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, name TEXT NOT NULL,
    purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, created_s INTEGER NOT NULL, expires_s INTEGER
);
CREATE INDEX IF NOT EXISTS files_of_owners ON files (owner, number);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL,
    is_ended INTEGER NOT NULL, record BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS batches_of_owners ON batches (owner, kind, number);
CREATE INDEX IF NOT EXISTS unfinished ON batches (is_ended) WHERE NOT is_ended;
CREATE TABLE IF NOT EXISTS responses (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, owner TEXT NOT NULL, record BLOB NOT NULL,
    used_s INTEGER NOT NULL, UNIQUE (owner, id)
);
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY AUTOINCREMENT, kind TEXT NOT NULL, subject TEXT NOT NULL, created_s INTEGER NOT NULL,
    due_s INTEGER NOT NULL, num_attempts INTEGER NOT NULL
);
"""

_OURS = re.compile("[a-z]+[-_][0-9a-f]{32}(-[a-z]+)?")
"""Names of contents that the store creates. Other files in its folders are left alone."""
_OF_KEY = "owner >= ? AND owner < ?"


class Event(NamedTuple):
    """The end of a batch or response, to be delivered to a webhook."""

    number: int
    kind: str
    subject: str
    """The id of what ended."""
    created_s: int
    due_s: int
    """Unix time of the next attempt to deliver it."""
    num_attempts: int


class NoRoom(Exception):
    """A key has too much already. The text says what to do."""


class Busy(Exception):
    """A key has too many unfinished uploads. They end by themselves."""


class NoFile(Exception):
    """The file that a batch is to read is not there."""


class InUse(Exception):
    """An unfinished batch reads the file."""


@dataclass(frozen=True, slots=True)
class File:
    id: str
    owner: Owner
    name: str
    """The client's name for it, never used as a path."""
    purpose: str
    num_bytes: int
    created_s: int
    """Unix time, as the next one."""
    expires_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    id: str
    owner: Owner
    kind: str
    """The API that it belongs to."""
    url: str
    """Path that all lines are for. Empty: each line has its own."""
    input_file: str
    window_s: int
    """Time after which lines that have no answer are given up."""
    created_s: int
    status: str = "validating"
    times_s: Mapping[str, int] = field(default_factory=dict)
    """Status -> Unix time since which the batch has had it."""
    output_file: str = ""
    error_file: str = ""
    """Reserved when the batch is created. The files exist when it has ended, unless they would be empty."""
    files_expire_s: int | None = None
    """Time after its end until these files are deleted."""
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    usage: Mapping[str, int] = field(default_factory=dict)
    """Sums of the tokens that the answers report."""
    errors: Sequence[Mapping[str, Any]] = ()
    """Why it could not begin, or, while it runs, why it waits."""
    metadata: Mapping[str, str] | None = None
    is_local_only: bool = False
    """Its lines must not be sent to other servers."""

    @property
    def is_ended(self) -> bool:
        return self.status in ("completed", "failed", "expired", "cancelled")

    @property
    def due_s(self) -> int:
        return self.created_s + self.window_s

    def with_status(self, status: str, now_s: int, **changes: Any) -> Batch:
        """Return the batch with another status."""
        return replace(self, status=status, times_s={**self.times_s, status: now_s}, **changes)


def new_id(kind: str) -> str:
    return f"{kind}{uuid.uuid4().hex}"


def unreadable(folder: Path, error: Exception) -> ConfigError:
    """Return the error of a record in the database that can't be read."""
    cause = f"{folder / 'jobs.db'} has a record that can't be read, because it is damaged or a newer version wrote it: {error}."
    return ConfigError(cause, remedy=_RESTORE)


def discard(folder: Path) -> None:
    """Delete what a closed store has made in its folder, the database last, and the folder if nothing else is there."""
    for part in (folder / "files", folder / "lines"):
        remove(path for path in part.glob("*") if _OURS.fullmatch(path.name))
        with suppress(OSError):
            part.rmdir()
    remove([folder / name for name in ("jobs.db-wal", "jobs.db-shm", "jobs.db", "lock")])
    with suppress(OSError):
        folder.rmdir()


class Store:
    """Any thread may call its methods. They block on the disk, and raise sqlite3.Error and OSError when it fails."""

    def __init__(self, folder: Path, *, max_bytes: int, notes_events: bool = False) -> None:
        """Open or make a folder. Raises ConfigError.

        `max_bytes`: most bytes in the files of one owner. `notes_events`: queue an event for each batch or response that ends,
        until it is delivered.
        """
        self.folder, self.max_bytes, self._notes_events = folder, max_bytes, notes_events
        self._files, self._lines = folder / "files", folder / "lines"
        self._uploads: set[Upload] = set()
        """Uploads that are not closed."""
        self._guard = threading.RLock()
        with ExitStack() as opened:
            try:
                for one in (folder, self._files, self._lines):
                    one.mkdir(mode=0o700, parents=True, exist_ok=True)
                lock = opened.enter_context((folder / "lock").open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                base = sqlite3.connect(folder / "jobs.db", check_same_thread=False, isolation_level=None)
                self._base = opened.enter_context(closing(base))
                (found,) = base.execute("PRAGMA user_version").fetchone()
                if found not in (0, FORMAT):
                    raise ConfigError(f"{folder} has jobs of format {found}, not {FORMAT}.", remedy=_ANOTHER)
                if not found and any(_OURS.fullmatch(path.name) for path in self._files.iterdir()):
                    cause = f"{folder / 'jobs.db'} is empty or new, but {self._files} has files of jobs."
                    raise ConfigError(cause, remedy=_RESTORE)
                (folder / "jobs.db").chmod(0o600)  # the folder may be open to others
                base.execute("PRAGMA journal_mode = WAL")
                base.execute("PRAGMA synchronous = FULL")
                base.executescript(_SCHEMA)
                _sort_in(base, self._lines)
                if found != FORMAT:  # a full disk takes no write, and a start on it is to make room
                    base.execute(f"PRAGMA user_version = {FORMAT}")
                sync(folder)
                self._tidy()
            except BlockingIOError:
                raise ConfigError(f"Another process has the jobs in {folder}.", remedy=_ANOTHER) from None
            except (OSError, sqlite3.Error) as error:
                is_full = getattr(error, "errno", 0) in DISK_FULL or getattr(error, "sqlite_errorcode", 0) in _FULL
                remedy = _FREE_SPACE if is_full else _ANOTHER
                raise ConfigError(f"The folder of jobs {folder} can't be used: {error}.", remedy=remedy) from None
            self._opened = opened.pop_all()

    def close(self) -> None:
        with self._guard:
            self._opened.close()

    def _tidy(self) -> None:
        """Delete contents without a file or unfinished batch, files without content, and internal ones of no batch."""
        unfinished = self.unfinished()
        read = {batch.input_file for batch in unfinished}
        for row in self._base.execute("SELECT * FROM batches"):
            batch = self._batch(row)
            read.update((batch.output_file, batch.error_file))
        there = {path.name for path in self._files.iterdir()}
        files = self._base.execute("SELECT id, purpose FROM files").fetchall()
        kept = {one for one, purpose in files if one in there and (purpose != INTERNAL or one in read)}
        gone = [one for one, _ in files if one not in kept]
        kept.update(*[(batch.output_file, batch.error_file) for batch in unfinished])
        ids = {batch.id for batch in unfinished}
        remove(path for path in self._files.iterdir() if _OURS.fullmatch(path.name) and path.name not in kept)
        remove(path for path in self._lines.iterdir() if _OURS.fullmatch(path.name) and path.name.partition("-")[0] not in ids)
        with suppress(sqlite3.Error), self._transaction():  # on a full disk, the next start deletes them
            self._delete(gone)

    # files

    def content(self, file_id: str) -> Path:
        """Return the path of a file's content. `file_id`: of a known file, never as a client sent it."""
        return self._files / file_id

    def lines(self, batch: Batch) -> Path:
        return self._lines / batch.id

    def file(self, file_id: str, owner: Owner) -> File | None:
        with self._guard:
            row = self._base.execute("SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, _text(owner))).fetchone()
        return None if row is None else _file(row)

    def files(
        self, owner: Owner, *, purpose: str | None = None, after: str | None = None, limit: int, ascending: bool = False
    ) -> list[File]:
        """Return up to `limit` files of an owner, newest first or `ascending`. `after`: id of the previous page's last file."""
        where, values = f"owner = ? AND purpose != '{INTERNAL}'", [_text(owner)]
        if purpose is not None:
            where, values = f"{where} AND purpose = ?", [*values, purpose]
        return [_file(row) for row in self._page("files", where, values, after, limit, ascending)]

    def _page(
        self, table: str, where: str, values: Sequence[str], after: str | None, limit: int, ascending: bool
    ) -> list[tuple[Any, ...]]:
        order, beyond = ("ASC", ">") if ascending else ("DESC", "<")
        if after is not None:
            where += f" AND number {beyond} (SELECT number FROM {table} WHERE id = ?)"  # noqa: S608 (no word is a client's)
            values = [*values, after]
        query = f"SELECT * FROM {table} WHERE {where} ORDER BY number {order} LIMIT ?"  # noqa: S608 (as above)
        with self._guard:
            return self._base.execute(query, (*values, limit)).fetchall()

    def num_bytes(self, owner: Owner) -> int:
        """Return the bytes in the files of an owner's key, including what is being uploaded, or written by its batches."""
        with self._guard:
            _, found = self._sums(owner)
            unfinished = self._unfinished_of(owner)
            written = [self.content(one) for batch in unfinished for one in (batch.output_file, batch.error_file)]
            written += map(self.lines, unfinished)
            uploaded = sum([upload.num_bytes for upload in self._uploads_of(owner)])
            return found + uploaded + sum(map(size_of, written))

    def _uploads_of(self, owner: Owner) -> list[Upload]:
        """Return the unfinished uploads of an owner's key."""
        return [upload for upload in self._uploads if upload.owner.key == owner.key]

    def _unfinished_of(self, owner: Owner) -> list[Batch]:
        """Return the unfinished batches of an owner's key."""
        query = f"SELECT * FROM batches WHERE {_OF_KEY} AND NOT is_ended"  # noqa: S608 (no word is a client's)
        with self._guard:
            return [self._batch(row) for row in self._base.execute(query, _bounds(owner))]

    def _check_number(self, owner: Owner) -> None:
        num, _ = self._sums(owner)
        if num >= MAX_FILES:
            raise NoRoom(f"There are {num} files already. {_MAKE_ROOM}")

    def _sums(self, owner: Owner) -> tuple[int, int]:
        """Return number and bytes of the files of an owner's key."""
        query = f"SELECT count(*), coalesce(sum(num_bytes), 0) FROM files WHERE {_OF_KEY}"  # noqa: S608 (no word is a client's)
        num, found = self._base.execute(query, _bounds(owner)).fetchone()
        return num, found

    def upload(self, owner: Owner) -> Upload:
        """Return an `Upload`, which the caller closes. Its file is then deleted unless `keep` was called.

        Raises NoRoom and Busy.
        """
        with self._guard:
            self._check_number(owner)
            if len(self._uploads_of(owner)) >= MAX_UPLOADS:
                raise Busy(f"{MAX_UPLOADS} uploads have not ended yet.")
            file_id = new_id("file-")
            upload = Upload(self, owner, file_id, (self._files / file_id).open("xb"))
            self._uploads.add(upload)
        return upload

    def check_room(self, owner: Owner) -> None:
        """Raise NoRoom if the files of an owner's key have `max_bytes` or more."""
        if (found := self.num_bytes(owner)) >= self.max_bytes:
            raise NoRoom(f"The files have {found} bytes, and {self.max_bytes} are kept (--jobs-bytes). {_MAKE_ROOM}")

    def claim(self, upload: Upload, num_bytes: int) -> None:
        """Reserve room for further bytes of an upload, until `release`. Raises NoRoom."""
        with self._guard:
            if (found := self.num_bytes(upload.owner) + num_bytes) > self.max_bytes:
                most = f"at most {self.max_bytes} are kept (--jobs-bytes)"
                raise NoRoom(f"The files would have {found} bytes; {most}. {_MAKE_ROOM}")
            upload.num_bytes += num_bytes

    def release(self, upload: Upload) -> None:
        """Stop counting an upload and its bytes."""
        with self._guard:
            self._uploads.discard(upload)

    def add(self, file: File) -> None:
        """Add a file whose content is on the disk."""
        row = (file.id, _text(file.owner), file.name, file.purpose, file.num_bytes, file.created_s, file.expires_s)
        with self._guard:
            self._base.execute(
                "INSERT INTO files (id, owner, name, purpose, num_bytes, created_s, expires_s) VALUES (?, ?, ?, ?, ?, ?, ?)",
                row,
            )

    def delete(self, file: File) -> None:
        """Delete a file. Raises InUse."""
        with self._guard:
            if any(batch.input_file == file.id for batch in self.unfinished()):
                raise InUse
            self._delete([file.id])

    def _delete(self, ids: Sequence[str]) -> None:
        remove(map(self.content, ids))
        self._base.executemany("DELETE FROM files WHERE id = ?", [(file_id,) for file_id in ids])

    def expire(self, now_s: int) -> None:
        """Delete the files whose time has come, unless an unfinished batch reads them."""
        with self._guard:
            ids = [file_id for (file_id,) in self._base.execute("SELECT id FROM files WHERE expires_s <= ?", (now_s,))]
        if not ids:
            return
        with self._transaction():
            in_use = {batch.input_file for batch in self.unfinished()}
            self._delete([file_id for file_id in ids if file_id not in in_use])

    # batches

    def create(self, batch: Batch) -> Batch:
        """Add a batch and return it, or return the one that its owner already has with this id. Raises NoRoom and NoFile."""
        with self._transaction() as base:
            if (known := self.batch(batch.id, batch.owner, batch.kind)) is not None:
                return known
            self._check_number(batch.owner)
            self.check_room(batch.owner)
            if len(self._unfinished_of(batch.owner)) >= MAX_UNFINISHED:
                raise NoRoom(f"{MAX_UNFINISHED} batches have not ended yet. Wait for one, or cancel it.")
            if self.file(batch.input_file, batch.owner) is None:
                raise NoFile
            self.put(batch)
            base.execute(
                f"DELETE FROM batches WHERE {_OF_KEY} AND is_ended AND number <= "  # noqa: S608 (no word is a client's)
                f"(SELECT number FROM batches WHERE {_OF_KEY} AND is_ended ORDER BY number DESC LIMIT 1 OFFSET ?)",
                (*_bounds(batch.owner), *_bounds(batch.owner), MAX_ENDED),
            )
        return batch

    def put(self, batch: Batch) -> None:
        """Add or replace a batch."""
        told = {one.name: getattr(batch, one.name) for one in fields(batch) if one.name not in ("id", "owner", "kind")}
        with self._guard:
            self._base.execute(
                "INSERT INTO batches (id, owner, kind, is_ended, record) VALUES (?, ?, ?, ?, ?) "
                "ON CONFLICT (id) DO UPDATE SET is_ended = excluded.is_ended, record = excluded.record",
                (batch.id, _text(batch.owner), batch.kind, batch.is_ended, fast_json.dumps(told)),
            )

    def end(self, batch: Batch, files: Sequence[File]) -> None:
        """Record the end of a batch and add its files, in one transaction. Then delete its lines."""
        with self._transaction():
            for file in files:
                self.add(file)
            self.put(batch)
            self._note([(f"batch.{batch.status}", batch.id)], batch.times_s[batch.status])
        remove(self._lines.glob(f"{batch.id}*"))

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with self._guard:
            self._undo()
            self._base.execute("BEGIN IMMEDIATE")
            try:
                yield self._base
                self._base.execute("COMMIT")
            except BaseException:
                with suppress(sqlite3.Error):  # if this fails, the next transaction rolls back
                    self._undo()
                raise

    def _undo(self) -> None:
        if self._base.in_transaction:
            self._base.execute("ROLLBACK")

    def batch(self, batch_id: str, owner: Owner, kind: str) -> Batch | None:
        with self._guard:
            row = self._base.execute(
                "SELECT * FROM batches WHERE id = ? AND owner = ? AND kind = ?", (batch_id, _text(owner), kind)
            ).fetchone()
        return None if row is None else self._batch(row)

    def batches(self, owner: Owner, kind: str, *, after: str | None = None, limit: int, ascending: bool = False) -> list[Batch]:
        """Return batches of an owner, as `files`."""
        values = [_text(owner), kind]
        return [self._batch(row) for row in self._page("batches", "owner = ? AND kind = ?", values, after, limit, ascending)]

    def unfinished(self) -> list[Batch]:
        with self._guard:
            return [self._batch(row) for row in self._base.execute("SELECT * FROM batches WHERE NOT is_ended ORDER BY number")]

    def _batch(self, row: Sequence[Any]) -> Batch:
        _, batch_id, owner, kind, _, record = row
        try:
            return Batch(id=batch_id, owner=_owner(owner), kind=kind, **fast_json.loads(record))
        except (TypeError, ValueError) as error:
            raise unreadable(self.folder, error) from None

    def delete_batch(self, batch: Batch) -> None:
        with self._guard:
            self._base.execute("DELETE FROM batches WHERE id = ?", (batch.id,))

    # responses, which `serve.responses` keeps in memory, too

    def responses(self) -> list[tuple[Owner, str, bytes, int]]:
        """Return owner, id, record and Unix time of the last use of each response, least recent first."""
        with self._guard:
            rows = self._base.execute("SELECT owner, id, record, used_s FROM responses ORDER BY used_s, number").fetchall()
        return [(_owner(owner), *rest) for owner, *rest in rows]

    def write_responses(
        self,
        changes: Mapping[tuple[Owner, str], bytes | None],
        ended: Sequence[tuple[str, str]],
        now_s: int,
        uses: Mapping[tuple[Owner, str], int],
    ) -> None:
        """Write records of responses in one transaction. A record of None deletes the response.

        `ended`: kinds and subjects of events. `uses`: Unix times of the last use of responses.
        """
        deleted = [(_text(owner), response_id) for owner, response_id in changes]
        added = [
            (_text(owner), response_id, record, now_s) for (owner, response_id), record in changes.items() if record is not None
        ]
        used = [(used_s, _text(owner), response_id) for (owner, response_id), used_s in uses.items()]
        with self._transaction() as base:
            base.executemany("DELETE FROM responses WHERE owner = ? AND id = ?", deleted)
            base.executemany("INSERT INTO responses (owner, id, record, used_s) VALUES (?, ?, ?, ?)", added)
            base.executemany("UPDATE responses SET used_s = ? WHERE owner = ? AND id = ?", used)
            self._note(ended, now_s)

    # events

    def _note(self, ended: Sequence[tuple[str, str]], now_s: int) -> None:
        if not self._notes_events or not ended:
            return
        rows = [(kind, subject, now_s, now_s) for kind, subject in ended]
        self._base.executemany(
            "INSERT INTO events (kind, subject, created_s, due_s, num_attempts) VALUES (?, ?, ?, ?, 0)", rows
        )
        self._base.execute(
            "DELETE FROM events WHERE number <= (SELECT number FROM events ORDER BY number DESC LIMIT 1 OFFSET ?)",
            (MAX_EVENTS,),
        )

    def due_events(self, now_s: int, limit: int) -> list[Event]:
        with self._guard:
            rows = self._base.execute("SELECT * FROM events WHERE due_s <= ? ORDER BY number LIMIT ?", (now_s, limit))
            return [Event(*row) for row in rows]

    def put_off(self, event: Event, due_s: int) -> None:
        with self._guard:
            self._base.execute(
                "UPDATE events SET due_s = ?, num_attempts = num_attempts + 1 WHERE number = ?", (due_s, event.number)
            )

    def forget(self, event: Event) -> None:
        with self._guard:
            self._base.execute("DELETE FROM events WHERE number = ?", (event.number,))


@dataclass(slots=True, eq=False)
class Upload:
    """A file that is being written."""

    store: Store
    owner: Owner
    file_id: str
    stream: BinaryIO
    num_bytes: int = 0
    is_kept: bool = False

    def write(self, data: bytes | bytearray) -> None:
        """Append bytes. Raises NoRoom and OSError."""
        self.store.claim(self, len(data))
        self.stream.write(data)

    def keep(self, name: str, purpose: str, now_s: int, expires_s: int | None = None) -> File:
        """Wait until the content is on the disk, then add the file to the store. Raises OSError and sqlite3.Error."""
        self.stream.flush()
        os.fsync(self.stream.fileno())
        sync(self.store.content(self.file_id).parent)
        file = File(self.file_id, self.owner, name, purpose, self.num_bytes, now_s, expires_s)
        self.store.add(file)
        self.is_kept = True
        return file

    def close(self) -> None:
        """End the upload. Unless the file was kept, it is deleted."""
        self.store.release(self)
        with suppress(OSError):  # the rest of a file for which the disk had no room
            self.stream.close()
        if not self.is_kept:
            remove([self.store.content(self.file_id)])


def _sort_in(base: sqlite3.Connection, folder: Path) -> None:
    """Have SQLite write what it sorts into this folder, unless SQLITE_TMPDIR names one. Its default may be in memory.

    SQLite has one such folder for the process, which must not change while other threads use SQLite. It calls the pragma
    deprecated, but reads the variable only when Python imports `sqlite3`.
    """
    if not os.environ.get("SQLITE_TMPDIR"):
        base.execute("PRAGMA temp_store_directory = '{}'".format(str(folder).replace("'", "''")))


def _text(owner: Owner) -> str:
    return "\n".join(owner)


def _bounds(owner: Owner) -> tuple[str, str]:
    """Return values for `_OF_KEY`: between them are the texts of all owners with this key."""
    return f"{owner.key}\n", f"{owner.key}\v"


def _owner(text: str) -> Owner:
    key, _, tenant = text.partition("\n")
    return Owner(key, tenant)


def _file(row: Sequence[Any]) -> File:
    _, file_id, owner, *rest = row
    return File(file_id, _owner(owner), *rest)
