"""The folder of files and batches: what lasts, what is deleted, who sees what, and disks that fail."""

from __future__ import annotations

import errno
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.jobs import store as module
from penstock.jobs.store import INTERNAL, UPLOAD, Batch, Busy, File, InUse, NoFile, NoRoom, Store, new_id
from penstock.types.errors import ConfigError
from penstock.types.request import Owner
from support.failing_disk import FailingDisk, open_files

ANN, BOB = Owner("ann", "ann"), Owner("bob", "bob")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "jobs", max_bytes=1000)
    yield store
    store.close()


def again(store: Store) -> Store:
    """The store as the next process finds it."""
    store.close()
    return Store(store.folder, max_bytes=store.max_bytes)


def uploaded(store: Store, data=b"{}", owner: Owner = ANN, **fields) -> File:
    with closing(store.upload(owner)) as upload:
        upload.write(data)
        return upload.keep("in.jsonl", UPLOAD, fields.pop("now_s", 100), **fields)


def batch_of(file: File, **fields) -> Batch:
    made = Batch(id=new_id("batch_"), owner=file.owner, kind="k", url="/u", input_file=file.id, window_s=60, created_s=100)
    return replace(made, output_file=new_id("file-"), error_file=new_id("file-"), **{"errors": [], **fields})


def contents(store: Store) -> list[str]:
    return sorted(path.name for part in ("files", "lines") for path in (store.folder / part).iterdir())


def test_files_and_batches_are_there_after_a_restart(store):
    file = uploaded(store, b"abc", expires_s=500)
    batch = batch_of(file, metadata={"a": "b"}, errors=[{"code": "c", "line": 1, "message": "m", "param": None}])
    store.create(batch)
    store = again(store)
    assert store.file(file.id, ANN) == file
    assert store.content(file.id).read_bytes() == b"abc"
    assert store.unfinished() == [batch]
    store.close()


def test_others_see_nothing(store):
    file = uploaded(store)
    batch = batch_of(file)
    store.create(batch)
    for other in (BOB, Owner("ann", "bob"), Owner("", "ann"), Owner("ann", "")):
        assert store.file(file.id, other) is None
        assert store.batch(batch.id, other, "k") is None
        assert store.files(other, limit=9) == store.batches(other, "k", limit=9) == []
    assert store.batch(batch.id, ANN, "another kind") is None
    assert store.batch(batch.id, ANN, "k") == batch


def test_pages_have_all_files_once_in_both_directions(store):
    ids = [uploaded(store, owner=owner).id for _ in range(5) for owner in (ANN, BOB)][::2]
    for ascending in (True, False):
        found, after = [], None
        while page := store.files(ANN, after=after, limit=2, ascending=ascending):
            found += [file.id for file in page]
            after = found[-1]
        assert found == (ids if ascending else ids[::-1])
    assert store.files(ANN, purpose="batch_output", limit=9) == []
    assert len(store.files(ANN, purpose=UPLOAD, limit=9)) == 5


def test_a_key_has_one_quota_for_all_its_tenants(store):
    uploaded(store, b"a" * 600, owner=Owner("ann", "x"))
    with pytest.raises(NoRoom, match="1001 bytes"):
        uploaded(store, b"a" * 401, owner=Owner("ann", "y"))
    uploaded(store, b"a" * 400, owner=Owner("ann", "y"))
    uploaded(store, b"a" * 1000, owner=Owner("ann2", "y"))
    assert [store.num_bytes(Owner(key, "z")) for key in ("ann", "ann2", "an")] == [1000, 1000, 0]


def test_what_is_being_uploaded_counts_until_it_is_given_up(store):
    with closing(store.upload(ANN)) as first, closing(store.upload(ANN)) as second:
        first.write(b"a" * 700)
        with pytest.raises(NoRoom):
            second.write(b"a" * 400)
        second.write(b"a" * 300)
        assert store.num_bytes(ANN) == 1000
    assert store.num_bytes(ANN) == 0
    assert contents(store) == []
    file = uploaded(store, b"a" * 1000)
    assert store.num_bytes(ANN) == 1000
    store.delete(file)
    assert store.num_bytes(ANN) == 0


def test_a_key_that_has_its_bytes_begins_no_batch(store):
    file, other = uploaded(store, b"a" * 500), uploaded(store, owner=BOB)
    first = batch_of(file)
    store.create(first)
    store.content(first.output_file).write_bytes(b"a" * 300)
    assert store.num_bytes(ANN) == 800
    with pytest.raises(NoRoom, match="1100 bytes"):
        uploaded(store, b"a" * 300)
    store.create(batch_of(replace(file, owner=ANN)))
    store.content(first.error_file).write_bytes(b"a" * 200)
    with pytest.raises(NoRoom, match="1000 bytes"):
        store.create(batch_of(file))
    store.create(batch_of(other))
    store.content(first.output_file).write_bytes(b"")
    store.create(batch_of(file))


def test_a_batch_that_can_not_be_begun_leaves_nothing(store, monkeypatch):
    """The database takes the batch, and fails when it is to forget older ones."""
    file = uploaded(store)
    store._base.execute("CREATE TRIGGER no BEFORE DELETE ON batches BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    monkeypatch.setattr(module, "MAX_ENDED", 0)
    first = batch_of(file)
    store.create(first)
    store.end(first.with_status("completed", 1), [])
    with pytest.raises(sqlite3.Error, match="disk full"):
        store.create(batch_of(file))
    assert store.unfinished() == []


def test_others_on_the_machine_read_nothing(tmp_path):
    (tmp_path / "jobs").mkdir(mode=0o755)
    store = Store(tmp_path / "jobs", max_bytes=1000)
    store.create(batch_of(uploaded(store)))
    modes = {path.name: path.stat().st_mode & 0o077 for path in store.folder.iterdir() if path.name != "lock"}
    assert modes == dict.fromkeys(("jobs.db", "jobs.db-wal", "jobs.db-shm", "files", "lines"), 0)
    store.close()


def test_numbers_of_files_and_of_batches_are_limited(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_UNFINISHED", 2)
    files = [uploaded(store), uploaded(store, owner=Owner("ann", "other"))]
    with monkeypatch.context() as patch:
        patch.setattr(module, "MAX_FILES", 2)
        with pytest.raises(NoRoom, match="2 files"):
            uploaded(store)
        with pytest.raises(NoRoom, match="2 files"):  # its answers would be more
            store.create(batch_of(files[0]))
    first, *_ = batches = [batch_of(file) for file in files]
    for batch in batches:
        store.create(batch)
    with pytest.raises(NoRoom, match="2 batches"):
        store.create(batch_of(files[0]))
    store.put(first.with_status("in_progress", 101))  # a known one is always replaced
    store.end(first.with_status("completed", 102), [])
    store.create(batch_of(files[0]))


def test_unfinished_uploads_of_a_key_are_limited(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_UPLOADS", 2)
    with closing(store.upload(ANN)):
        with closing(store.upload(Owner("ann", "other"))), pytest.raises(Busy, match="2 uploads"):
            store.upload(ANN)
        uploaded(store, owner=BOB)
        assert len(contents(store)) == 2
        uploaded(store)


def test_only_the_latest_ended_batches_are_remembered(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    file, others = uploaded(store), uploaded(store, owner=BOB)
    batches = [batch_of(file) for _ in range(8)]
    store.create(batch_of(others))
    for batch in batches:
        store.create(batch)
        if batch is not batches[0]:
            store.end(batch.with_status("completed", 102), [])
    store.create(batch_of(file))
    found = [batch.id for batch in store.batches(ANN, "k", limit=99)]
    assert found[1:] == [one.id for one in (*batches[:4:-1], batches[0])]  # the first has not ended
    assert len(store.batches(BOB, "k", limit=99)) == 1


def test_a_key_has_one_limit_of_ended_batches_for_all_its_tenants(store, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED", 3)
    owners = [Owner("ann", f"tenant{nth}") for nth in range(8)]
    for owner in owners:
        batch = batch_of(uploaded(store, owner=owner))
        store.create(batch)
        store.end(batch.with_status("failed", 102), [])
    store.create(batch_of(uploaded(store)))
    assert [len(store.batches(owner, "k", limit=99)) for owner in owners] == [0] * 5 + [1] * 3


def test_a_file_that_a_batch_reads_is_neither_deleted_nor_expires(store):
    file = uploaded(store, expires_s=200)
    batch = batch_of(file)
    store.create(batch)
    with pytest.raises(InUse):
        store.delete(file)
    store.expire(200)
    assert store.content(file.id).exists()
    store.end(batch.with_status("failed", 201), [])
    store.expire(199)
    assert store.file(file.id, ANN) == file
    store.expire(200)
    assert store.file(file.id, ANN) is None
    assert contents(store) == []


def test_no_batch_begins_without_its_file(store):
    file = uploaded(store)
    store.delete(file)
    with pytest.raises(NoFile):
        store.create(batch_of(file))
    with pytest.raises(NoFile):
        store.create(batch_of(replace(uploaded(store), owner=BOB)))
    assert store.unfinished() == []


def test_an_end_adds_its_files_and_deletes_the_lines(store):
    batch = batch_of(uploaded(store))
    store.create(batch)
    for suffix in ("", "-wal", "-shm", "-unsorted"):
        store.lines(batch).with_name(batch.id + suffix).touch()
    output = File(batch.output_file, ANN, "out", "batch_output", 2, 102)
    store.content(output.id).write_bytes(b"{}")
    ended = batch.with_status("completed", 102)
    store.end(ended, [output])
    assert store.unfinished() == []
    assert store.file(output.id, ANN) == output
    assert contents(store) == sorted([batch.input_file, output.id])
    store = again(store)
    assert store.batch(batch.id, ANN, "k") == ended
    store.close()


def test_a_batch_that_has_ended_is_not_begun_again(store):
    """A request that is repeated with its `Idempotency-Key` may come when the first has ended."""
    batch = batch_of(uploaded(store))
    assert store.create(batch) is batch
    ended = batch.with_status("completed", 102)
    store.end(ended, [])
    assert store.create(replace(batch, output_file=new_id("file-"))) == ended
    assert store.batch(batch.id, ANN, "k") == ended


def test_an_end_that_fails_adds_nothing(store):
    file = uploaded(store)
    batch = batch_of(file)
    store.create(batch)
    with pytest.raises(sqlite3.IntegrityError):
        store.end(batch.with_status("completed", 102), [File(batch.output_file, ANN, "o", "p", 2, 1), file])
    assert store.unfinished() == [batch]
    assert store.files(ANN, limit=9) == [file]
    store.end(batch.with_status("completed", 102), [])


def test_a_start_deletes_what_nobody_has_and_nothing_else(store):
    batch = batch_of(uploaded(store))
    store.create(batch)
    kept = [store.content(batch.output_file), store.lines(batch), store.lines(batch).with_name(f"{batch.id}-wal")]
    theirs = [store.folder / "files" / "thesis.txt", store.folder / "lines" / "poem", store.folder / "files" / "folder"]
    left = [
        store.content(new_id("file-")),
        store.folder / "lines" / new_id("batch_"),
        store.folder / "lines" / new_id("msgbatch_"),
    ]
    left.append(left[-1].with_name(f"{left[-1].name}-wal"))
    for path in (*kept, *theirs[:2], *left):
        path.touch()
    theirs[2].mkdir()
    store = again(store)
    assert all(path.exists() for path in (*kept, *theirs, store.content(batch.input_file)))
    assert not any(path.exists() for path in left)
    store.close()


def test_a_start_deletes_hidden_files_that_no_batch_names(store):
    """As after a kill between an upload and its batch, or between the end of a batch and the end of its input."""
    files = []
    for _ in range(4):
        with closing(store.upload(ANN)) as upload:
            upload.write(b"{}")
            files.append(upload.keep("requests.jsonl", INTERNAL, 100))
    read, answers, done, orphan = files
    store.create(batch_of(read))
    store.create(ended := replace(batch_of(done), output_file=answers.id))
    store.end(ended.with_status("completed", 120), [])
    store = again(store)
    assert [store.file(one.id, ANN) is not None for one in files] == [True, True, False, False]
    assert not store.content(orphan.id).exists()
    assert store.num_bytes(ANN) == 4
    store.close()


def test_two_processes_can_not_have_one_folder(store):
    with pytest.raises(ConfigError, match="Another process"):
        Store(store.folder, max_bytes=1)
    uploaded(store)  # the first goes on
    again(store).close()


@pytest.mark.parametrize("damage", ["format", "no database", "empty", "gone", "a file", "unreadable"])
def test_a_folder_that_can_not_be_used_is_refused_and_left_alone(tmp_path, damage):
    folder = tmp_path / "jobs"
    if damage == "a file":
        folder.write_text("mine")
    else:
        Store(folder, max_bytes=1).close()
        content = folder / "files" / new_id("file-")
        content.touch()
    if damage == "format":
        with sqlite3.connect(folder / "jobs.db") as base:
            base.execute("PRAGMA user_version = 99")
        base.close()
    elif damage == "no database":
        (folder / "jobs.db").write_bytes(b"a poem" * 1000)
    elif damage == "empty":
        (folder / "jobs.db").write_bytes(b"")
    elif damage == "gone":
        (folder / "jobs.db").unlink()
    elif damage == "unreadable":
        (folder / "jobs.db").unlink()
        (folder / "jobs.db").mkdir()
    before = open_files()
    with pytest.raises(ConfigError, match="jobs"):
        Store(folder, max_bytes=1)
    assert open_files() == before
    assert damage == "a file" or content.exists()


@pytest.mark.parametrize("record", [b'{"of_a_newer_version": 1}', b"{}", b'{"url": "/v1', b"", b"[]"])
def test_a_record_that_can_not_be_read_is_told(store, record):
    store.create(batch_of(uploaded(store)))
    store.close()
    with closing(sqlite3.connect(store.folder / "jobs.db")) as base:
        base.execute("UPDATE batches SET record = ?", (record,))
        base.commit()
    with pytest.raises(ConfigError, match=r"jobs\.db has a record .* damaged or a newer version .*Restore"):
        again(store)


def test_nothing_stays_open_or_beside_the_database(tmp_path):
    before = open_files()
    store = Store(tmp_path / "jobs", max_bytes=1000)
    batch = batch_of(uploaded(store))
    store.create(batch)
    store.end(batch.with_status("failed", 1), [])
    store.close()
    assert open_files() == before
    assert sorted(path.name for path in store.folder.iterdir()) == ["files", "jobs.db", "lines", "lock"]


@pytest.mark.parametrize(
    "name", ["", "a\0b", "x" * 255, "../../etc/passwd", 'a"; DROP TABLE files; --', "\r\nX: y", "ü\U0001f600"]
)
def test_names_are_texts_and_ids_are_no_paths(store, name):
    with closing(store.upload(ANN)) as upload:
        file = upload.keep(name, UPLOAD, 1)
    store = again(store)
    assert store.file(file.id, ANN).name == name
    assert store.file(name, ANN) is store.batch(name, ANN, "k") is None
    assert store.files(ANN, after=name, limit=9) == []
    store.close()


def test_contents_are_on_the_disk_before_a_file_is_known(store, monkeypatch):
    synced, add = [], store.add
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(str(Path(f"/proc/self/fd/{number}").readlink())))
    monkeypatch.setattr(store, "add", lambda file: (synced.append("added"), add(file)))
    file = uploaded(store)
    assert synced == [str(store.content(file.id)), str(store.folder / "files"), "added"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_an_upload_that_the_disk_refuses_leaves_nothing(tmp_path, code):
    """The disk fails at each write, one after another. Either the whole file is there, or nothing is."""
    disk, nth, num_failed = FailingDisk(), 0, 0
    while not num_failed or disk.has_failed:
        store = Store(tmp_path / f"jobs{nth}", max_bytes=1 << 20)
        with disk.failing(nth, code):
            try:
                file = uploaded(store, b"a" * 100_000)
            except (OSError, sqlite3.Error):
                file = None
        assert (file is None) == disk.has_failed
        num_failed += disk.has_failed
        assert store.files(ANN, limit=9) == ([] if file is None else [file])
        assert contents(store) == ([] if file is None else [file.id])
        assert store.num_bytes(ANN) == (0 if file is None else 100_000)
        store.close()
        nth += 1
    assert num_failed >= 3


def test_a_full_database_changes_nothing(store):
    base = store._base
    file = uploaded(store)
    batch = batch_of(file)
    store.create(batch)
    base.execute(f"PRAGMA max_page_count = {base.execute('PRAGMA page_count').fetchone()[0]}")
    big = {str(nth): "x" * 500 for nth in range(100)}
    for change in (
        lambda: store.put(replace(batch, metadata=big)),
        lambda: store.create(batch_of(file, metadata=big)),
        lambda: store.end(replace(batch, metadata=big).with_status("completed", 1), [File("f", ANN, "n", "p", 1, 1)]),
    ):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            change()
        assert store.unfinished() == [batch]
        assert store.files(ANN, limit=9) == [file]
    base.execute("PRAGMA max_page_count = 1000000")
    store.end(batch.with_status("completed", 1), [])
    assert store.unfinished() == []


def test_a_disk_that_deletes_nothing_does_not_keep_a_batch_from_its_end(store, monkeypatch):
    file = uploaded(store)
    batch = batch_of(file)
    store.create(batch)
    store.lines(batch).touch()

    def refuse(path, missing_ok=False):
        raise OSError(errno.EIO, "no")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        store.end(batch.with_status("completed", 1), [])
        store.delete(file)
    assert contents(store) == sorted([file.id, batch.id])
    store = again(store)
    assert contents(store) == []
    store.close()


@pytest.mark.parametrize("expires", [False, True])
def test_a_deletion_frees_the_disk_before_it_changes_the_database(store, expires):
    """A full disk takes no row. The content is gone, and the row follows when the deletion is repeated, or at a start."""
    file, started = uploaded(store, expires_s=200), uploaded(store, expires_s=200)
    store._base.execute("CREATE TRIGGER no BEFORE DELETE ON files BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    for one in (file, started):
        with pytest.raises(sqlite3.Error, match="disk full"):
            store.expire(200) if expires else store.delete(one)
    assert contents(store) == []
    assert [store.file(one.id, ANN) for one in (file, started)] == [file, started]
    store._base.execute("DROP TRIGGER no")
    store.delete(file)
    assert store.file(file.id, ANN) is None
    store = again(store)
    assert store.files(ANN, limit=9) == []
    assert store.num_bytes(ANN) == 0
    store.close()


def test_a_start_writes_nothing_to_the_database(store):
    """It would fail on a full disk, and only a server that runs can delete files."""
    uploaded(store)
    store = again(store)
    assert (store.folder / "jobs.db-wal").stat().st_size == 0
    store.close()


def test_a_start_on_a_full_disk_deletes_contents_and_leaves_their_rows_to_the_next(store):
    """After a kill there may be contents without a file, and internal files without a batch."""
    with closing(store.upload(ANN)) as upload:
        file = upload.keep("requests.jsonl", INTERNAL, 100)
    store.content(new_id("file-")).touch()
    store._base.execute("CREATE TRIGGER no BEFORE DELETE ON files BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    store = again(store)
    assert contents(store) == []
    assert store.file(file.id, ANN) == file
    store._base.execute("DROP TRIGGER no")
    store = again(store)
    assert store.file(file.id, ANN) is None
    store.close()


def test_an_error_of_a_full_disk_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SCHEMA", "PRAGMA max_page_count = 1; CREATE TABLE more (number INTEGER);")
    with pytest.raises(ConfigError, match="full") as sqlite:
        Store(tmp_path / "jobs", max_bytes=1)

    def refuse(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.undo()
    monkeypatch.setattr(module, "sync", refuse)
    with pytest.raises(ConfigError, match="No space") as system:
        Store(tmp_path / "jobs", max_bytes=1)
    assert sqlite.value.remedy == system.value.remedy == module._FREE_SPACE
