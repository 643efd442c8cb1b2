"""An index of documents: one SQLite file with the passages of a folder and their vectors.

Each transaction replaces the passages of whole files. So if a process is killed, every file has either its old passages or its
new ones. Several processes may update an index while others read it.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from penstock.search.documents import MAX_BYTES, Unreadable, find, read
from penstock.search.passages import Fit, Passage, as_read, cut, halved
from penstock.types.errors import ConfigError

F32 = NDArray[np.float32]
FORMAT = "3"
AT_ONCE = 256
"""Passages that are embedded, and written, together."""
LOCKED_S = 30.0
PROBE = "Is it an embedding model?"
"""A text whose vector is kept: a model that gives it another direction is not the one that made the index."""
MIN_COSINE = 0.95
"""Between the vectors of the probe by one model in several number types."""
Embed = Callable[[Sequence[str]], F32]
"""Returns the vectors of texts. [texts, width]"""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passages (
    id INTEGER PRIMARY KEY AUTOINCREMENT, path TEXT NOT NULL, heading TEXT NOT NULL, text TEXT NOT NULL, vector BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS passages_of_files ON passages (path);
"""


@dataclass(frozen=True, slots=True)
class Hit:
    path: str
    heading: str
    text: str
    score: float
    """Cosine of the angle to the question."""

    @property
    def as_read(self) -> str:
        return as_read(self.heading, self.text)


@dataclass(slots=True)
class Changes:
    num_new: int = 0
    """Files that are new or have changed."""
    num_same: int = 0
    num_gone: int = 0
    unreadable: dict[str, str] = field(default_factory=dict)
    """File or folder -> why it could not be read. Its earlier passages stay in the index."""


def create(path: Path, folder: Path, embedder: str, probe: F32 | None = None) -> None:
    """Create an index of a folder, or check that an existing one was made with this embedding model. Raises ConfigError.

    `probe`: the model's vector of `PROBE`, [width].
    """
    wanted = {"format": FORMAT, "embedder": embedder, "folder": str(folder.resolve())}
    with _opened(path) as base:
        if base.execute("SELECT 1 FROM sqlite_master").fetchone() is None:  # never add tables to another program's database
            with base:
                base.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
                base.executemany("INSERT OR IGNORE INTO about VALUES (?, ?)", wanted.items())
        found = _about(base, path)
        for key, how in (("embedder", "with the embedder"), ("folder", "from the folder")):
            if found[key] != wanted[key]:
                raise ConfigError(
                    f"{path} was made {how} {found[key]}, not {wanted[key]}.", remedy="Name another file with -o."
                )
        if probe is None:
            return
        if base.execute("SELECT 1 FROM passages").fetchone() is not None:
            _check_probe(found, path, probe)
            return
        with base:
            base.execute("INSERT OR REPLACE INTO about VALUES ('probe', ?)", (probe.tobytes().hex(),))


def _check_probe(about: Mapping[str, str], path: Path, probe: F32) -> None:
    try:
        made = np.frombuffer(bytes.fromhex(about.get("probe", "")), np.float32)
    except (TypeError, ValueError) as error:
        remedy = "Delete it and run `penstock index` again."
        raise ConfigError(f"{path} is damaged: its probe can't be read: {error}.", remedy=remedy) from error
    sizes = np.linalg.norm(made) * np.linalg.norm(probe)
    if len(made) and (len(made) != len(probe) or made @ probe < MIN_COSINE * sizes):
        raise ConfigError(
            f"{path} was made with another model than the one that is called {about['embedder']} now.",
            remedy="Delete it and run `penstock index` again, or use the earlier model.",
        )


def update(path: Path, folder: Path, embed: Embed, fit: Fit = lambda texts: [True] * len(texts)) -> Iterator[Changes]:
    """Bring an index up to date with the files in `folder`. Yield the changes so far after each write.

    Passages that do not `fit` are divided.

    Raises ConfigError, for example if the folder of an existing index has no documents now: it may not be mounted.
    """
    changes, unlisted = Changes(), list[str]()

    def on_error(error: OSError) -> None:
        name = os.path.relpath(error.filename, folder)
        unlisted.append("" if name == "." else name + "/")
        changes.unreadable[_printable(unlisted[-1])] = f"it can't be listed: {error.strerror}"

    with _opened(path) as base:
        known = dict(base.execute("SELECT path, digest FROM files"))
        seen: set[str] = set()
        pending: list[tuple[str, bytes, list[Passage]]] = []
        for file in find(folder, on_error):
            name = file.relative_to(folder).as_posix()
            seen.add(name)
            try:
                digest, passages = _read(file, name, known.get(name), fit)
            except (Unreadable, OSError) as error:
                changes.unreadable[_printable(name)] = str(error)
                continue
            if passages is None:
                changes.num_same += 1
                continue
            pending.append((name, digest, passages))
            if sum([len(passages) for _, _, passages in pending]) >= AT_ONCE:
                _write(base, path, pending, embed)
                changes.num_new += len(pending)
                pending.clear()
                yield changes
        _write(base, path, pending, embed)
        changes.num_new += len(pending)
        gone = [name for name in known.keys() - seen if not name.startswith(tuple(unlisted))]
        if gone and not seen:
            raise ConfigError(
                f"{folder} has no documents any more, and {path} was left as it is.",
                remedy="Check that the folder is mounted, or delete the index.",
            )
        with base:
            for name in gone:
                base.execute("DELETE FROM passages WHERE path = ?", (name,))
                base.execute("DELETE FROM files WHERE path = ?", (name,))
        changes.num_gone = len(gone)
        yield changes


def _read(file: Path, name: str, digest_before: bytes | None, fit: Fit) -> tuple[bytes, list[Passage] | None]:
    """Return a hash of a file, and its passages unless it is as before. Raises Unreadable and OSError."""
    if _printable(name) != name:
        raise Unreadable("its name is not UTF-8")
    if not file.is_file():
        raise Unreadable("it is not a file")
    if file.stat().st_size > (most := MAX_BYTES[file.suffix.lower()]):
        raise Unreadable(f"it has more than {most >> 20} MiB")
    data = file.read_bytes()
    digest = hashlib.blake2b(data, digest_size=16).digest()
    if digest == digest_before:
        return digest, None
    passages = [Passage(_printable(one.heading), _printable(one.text)) for one in cut(read(file, data))]
    return digest, [*halved(passages, fit)]


def _printable(text: str) -> str:
    """Replace what is not valid Unicode by a mark."""
    return text.encode("utf-8", "replace").decode()


def _write(base: sqlite3.Connection, path: Path, files: Sequence[tuple[str, bytes, list[Passage]]], embed: Embed) -> None:
    texts = [as_read(passage.heading, passage.text) for _, _, passages in files for passage in passages]
    if texts:
        vectors = embed(texts)
        vectors = (vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)).astype(np.float32)
    rows = iter(vectors if texts else ())
    with base:
        if texts:
            base.execute("INSERT OR IGNORE INTO about VALUES ('width', ?)", (str(vectors.shape[1]),))
            if (width := int(_about(base, path)["width"])) != vectors.shape[1]:
                raise ConfigError(f"{path} has vectors of {width} numbers, not {vectors.shape[1]}.", remedy="Make it anew.")
        for name, digest, passages in files:
            base.execute("DELETE FROM passages WHERE path = ?", (name,))
            base.execute("INSERT OR REPLACE INTO files VALUES (?, ?)", (name, digest))
            base.executemany(
                "INSERT INTO passages (path, heading, text, vector) VALUES (?, ?, ?, ?)",
                [(name, one.heading, one.text, next(rows).tobytes()) for one in passages],
            )


class Reader:
    """Searches an index, whose vectors it keeps in memory. Its methods raise ConfigError."""

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        """Callers must hold this lock if several threads use the reader."""
        self._path = path
        self._base: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        """Device and inode number of the open file."""
        self._version = -1
        self._ids = np.empty(0, np.int64)
        self._vectors = np.empty((0, 0), np.float32)
        self.embedder = ""
        self.probe: bytes | None = None
        """The vector of `PROBE` by the model that embeds the questions, float32, [width]. None: it may be any model."""
        self._about: Mapping[str, str] = {}
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise

    @property
    def num_passages(self) -> int:
        return len(self._ids)

    def refresh(self) -> None:
        """Read the vectors again if the index has changed, or is another file."""
        try:
            found = self._path.stat()
        except OSError:
            raise ConfigError(f"The index {self._path} does not exist.", remedy="`penstock index FOLDER` makes one.") from None
        with self._errors():
            if self._base is None or self._file != (found.st_dev, found.st_ino):
                self.close()
                # Open for writing only to roll back a killed process's transaction. Without permission, SQLite only reads.
                place = f"{self._path.resolve().as_uri()}?mode=rw"
                self._base = sqlite3.connect(place, uri=True, timeout=LOCKED_S, check_same_thread=False)
                self._file, self._version = (found.st_dev, found.st_ino), -1
            base = self._base
            if (version := base.execute("PRAGMA data_version").fetchone()[0]) == self._version:
                return
            base.execute("BEGIN")  # the queries below must see one state
            try:
                about = self._about = _about(base, self._path)
                self.embedder, width = about["embedder"], int(about.get("width", 0))
                (num,) = base.execute("SELECT count(*) FROM passages").fetchone()
                ids, vectors = np.empty(num, np.int64), np.empty((num, width), np.float32)
                for row, (passage_id, vector) in enumerate(base.execute("SELECT id, vector FROM passages")):
                    ids[row], vectors[row] = passage_id, np.frombuffer(vector, np.float32)
            finally:
                base.execute("COMMIT")
            self._ids, self._vectors, self._version = ids, vectors, version

    def nearest(self, questions: F32, num: int) -> list[list[Hit]]:
        """Return the nearest passages of each question, the nearest first. `questions`: [questions, width]"""
        self.refresh()
        if self.probe is not None:
            _check_probe(self._about, self._path, np.frombuffer(self.probe, np.float32))
        num = min(num, len(self._ids))
        if not num:
            return [[] for _ in questions]
        if questions.shape[1] != self._vectors.shape[1]:
            width = self._vectors.shape[1]
            raise ConfigError(f"{self._path} has vectors of {width} numbers, not {questions.shape[1]}.", remedy="Make it anew.")
        scores = (questions / np.maximum(np.linalg.norm(questions, axis=1, keepdims=True), 1e-12)) @ self._vectors.T
        found = []
        with self._errors():
            for row in scores:
                best = np.argpartition(-row, num - 1)[:num]
                ordered = best[np.argsort(-row[best], kind="stable")]
                found.append(self._hits([(int(self._ids[idx]), float(row[idx])) for idx in ordered]))
        return found

    def _hits(self, scored: Sequence[tuple[int, float]]) -> list[Hit]:
        hits = []
        assert self._base is not None, "it was refreshed"
        for passage_id, score in scored:
            row = self._base.execute("SELECT path, heading, text FROM passages WHERE id = ?", (passage_id,)).fetchone()
            if row is not None:  # otherwise the passage was replaced meanwhile
                path, heading, text = row
                hits.append(Hit(path, heading, text, score))
        return hits

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, LookupError) as error:
            raise ConfigError(
                f"{self._path} is not an index that can be read: {error}.", remedy="`penstock index FOLDER` makes one."
            ) from error

    def close(self) -> None:
        if self._base is not None:
            self._base.close()
            self._base = None


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """Open an index to write it. Raises ConfigError."""
    try:
        base = sqlite3.connect(path, timeout=LOCKED_S, check_same_thread=False)
        try:
            yield base
        finally:
            base.close()
    except sqlite3.Error as error:
        raise ConfigError(f"{path} can't be written as an index: {error}.", remedy="Name another file with -o.") from error


def _about(base: sqlite3.Connection, path: Path) -> dict[str, str]:
    about = dict(base.execute("SELECT key, value FROM about"))
    if about.get("format") != FORMAT or "embedder" not in about:
        raise ConfigError(f"{path} is not an index of format {FORMAT}.", remedy="Delete it, and run `penstock index FOLDER`.")
    return about
