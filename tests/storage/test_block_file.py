"""The file of the disk tier: what was written is read, and whatever else is in it is noticed."""

from __future__ import annotations

import errno
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.storage.block_file import FILE_NAME, PAGE_BYTES, BlockFile, open_block_file
from penstock.types.errors import ConfigError, CorruptBlock

CONTENT_BYTES = 5000
SLOT_BYTES = 2 * PAGE_BYTES
FINGERPRINT = b"f" * 32


def make(path: Path, *, num_slots: int = 4, fingerprint: bytes = FINGERPRINT, content_bytes: int = CONTENT_BYTES) -> BlockFile:
    max_bytes = PAGE_BYTES + num_slots * SLOT_BYTES
    return BlockFile(path, max_bytes=max_bytes, content_bytes=content_bytes, fingerprint=fingerprint)


def name(idx: int) -> bytes:
    return bytes([idx]) * 16


def content(idx: int) -> memoryview:
    return memoryview(bytes((idx + position) % 251 for position in range(CONTENT_BYTES)))


def read(file: BlockFile, slot: int, idx: int) -> bytes:
    out = bytearray(CONTENT_BYTES)
    file.read(slot, name(idx), memoryview(out))
    return bytes(out)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file"


def test_what_was_written_is_read(path: Path) -> None:
    file = make(path)
    assert (file.num_slots, file.slot_bytes) == (4, SLOT_BYTES)
    for slot in (3, 0):
        file.write(slot, name(slot), content(slot))
    assert [read(file, slot, slot) for slot in (0, 3)] == [content(0), content(3)]
    file.close()


def test_it_never_gets_larger_than_asked_for(path: Path) -> None:
    file = make(path)
    for slot in range(4):
        file.write(slot, name(slot), content(slot))
    assert path.stat().st_size <= PAGE_BYTES + 4 * SLOT_BYTES
    with pytest.raises(ValueError, match="slot 4"):
        file.write(4, name(4), content(4))
    file.close()


def test_nobody_else_may_read_it(path: Path) -> None:
    path.touch(0o644)
    make(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_what_was_there_is_found_in_the_order_of_writing(path: Path) -> None:
    file = make(path)
    for slot in (2, 0, 1):
        file.write(slot, name(slot), content(slot))
    file.write(2, name(7), content(7))
    file.close()
    again = make(path)
    assert again.entries() == [(0, name(0)), (1, name(1)), (2, name(7))]
    assert read(again, 2, 7) == content(7)
    again.write(0, name(8), content(8))
    again.close()
    last = make(path)
    assert last.entries()[-1] == (0, name(8)), "numbers go on where they were"
    last.close()


def test_blocks_may_be_written_from_the_newest_to_the_oldest(path: Path) -> None:
    for slots in ((1, 0), (3, 2)):
        file = make(path)
        file.entries()
        file.expect_newest_first()
        for slot in slots:
            file.write(slot, name(slot), content(slot))
        file.close()
    again = make(path)
    assert [slot for slot, _ in again.entries()] == [0, 1, 2, 3]
    again.close()


@pytest.mark.parametrize("change", [{"fingerprint": b"g" * 32}, {"content_bytes": CONTENT_BYTES - 8}])
def test_contents_of_another_model_are_discarded_with_a_warning(
    path: Path, change: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    file = make(path)
    file.write(0, name(0), content(0))
    file.close()
    assert not caplog.records
    other = make(path, **change)  # type: ignore[arg-type]
    assert "discarding" in caplog.text
    assert other.entries() == []
    assert path.stat().st_size == len(path.read_bytes()) < PAGE_BYTES
    other.close()


def test_a_smaller_file_keeps_what_it_has_room_for(path: Path) -> None:
    file = make(path)
    for slot in range(4):
        file.write(slot, name(slot), content(slot))
    file.close()
    smaller = make(path, num_slots=2)
    assert [slot for slot, _ in smaller.entries()] == [0, 1]
    assert path.stat().st_size <= PAGE_BYTES + 2 * SLOT_BYTES
    smaller.close()


@pytest.mark.parametrize("position", [0, 5, 9, 20, 36, 45, 64, 64 + CONTENT_BYTES - 1])
def test_a_flipped_bit_is_noticed(path: Path, position: int) -> None:
    file = make(path)
    file.write(1, name(1), content(1))
    with path.open("r+b") as data:
        data.seek(PAGE_BYTES + SLOT_BYTES + position)
        (byte,) = data.read(1)
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 4]))
    with pytest.raises(CorruptBlock):
        read(file, 1, 1)
    file.close()


def test_what_has_another_name_is_not_read(path: Path) -> None:
    file = make(path)
    file.write(1, name(1), content(1))
    with pytest.raises(CorruptBlock):
        read(file, 1, 2)
    with pytest.raises(CorruptBlock):
        read(file, 0, 1)
    file.close()


@pytest.mark.parametrize("size", [0, 10, PAGE_BYTES, PAGE_BYTES + 30, PAGE_BYTES + 64 + 100])
def test_a_file_that_was_cut_short_is_no_harm(path: Path, size: int) -> None:
    file = make(path)
    file.write(0, name(0), content(0))
    os.truncate(path, size)
    with pytest.raises(CorruptBlock):
        read(file, 0, 0)
    file.write(0, name(0), content(0))
    assert read(file, 0, 0) == content(0)
    file.close()
    os.truncate(path, size)
    again = make(path)
    for slot, block_hash in again.entries():
        with pytest.raises(CorruptBlock):
            again.read(slot, block_hash, memoryview(bytearray(CONTENT_BYTES)))
    again.close()


def test_a_file_full_of_anything_is_no_harm(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 200)
    file = make(path)
    assert file.entries() == []
    file.close()


def test_a_file_that_is_removed_goes_on_until_the_end(path: Path) -> None:
    file = make(path)
    path.unlink()
    file.write(0, name(0), content(0))
    assert read(file, 0, 0) == content(0)
    file.close()
    again = make(path)
    assert again.entries() == []
    again.close()


def test_a_full_device_is_an_error_and_nothing_is_read_that_is_not_whole(path: Path) -> None:
    """In a process of its own, whose files may not get that large."""
    code = f"""
import resource, signal, sys
from pathlib import Path
from penstock.storage.block_file import BlockFile
from penstock.types.errors import CorruptBlock
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
size = {PAGE_BYTES + 4 * SLOT_BYTES}
file = BlockFile(Path(sys.argv[1]), max_bytes=size, content_bytes={CONTENT_BYTES}, fingerprint=b"f" * 32)
for limit in ({PAGE_BYTES + SLOT_BYTES}, {PAGE_BYTES + SLOT_BYTES + 1000}):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        file.write(1, b"n" * 16, memoryview(bytes({CONTENT_BYTES})))
    except OSError as error:
        print(error.errno)
    try:
        file.read(1, b"n" * 16, memoryview(bytearray({CONTENT_BYTES})))
    except CorruptBlock:
        print("corrupt")
"""
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EFBIG), "corrupt", str(errno.ENOSPC), "corrupt"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_one_process_at_a_time_has_it(tmp_path: Path) -> None:
    first = open_block_file(tmp_path, max_bytes=10**6, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT)
    with pytest.raises(ConfigError, match="in use by another server"):
        open_block_file(tmp_path, max_bytes=10**6, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT)
    first.close()
    first.close()
    open_block_file(tmp_path, max_bytes=10**6, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT).close()


def test_what_cannot_be_opened_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ConfigError, match=r"can't be opened.*--kv-disk-path"):
        open_block_file(tmp_path, max_bytes=10**6, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT)


def test_a_size_that_holds_nothing_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"9000 bytes do not hold one block of {SLOT_BYTES}"):
        open_block_file(tmp_path, max_bytes=9000, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_text("precious")
    (tmp_path / FILE_NAME).symlink_to(target)
    with pytest.raises(ConfigError, match="can't be opened"):
        open_block_file(tmp_path, max_bytes=10**6, content_bytes=CONTENT_BYTES, fingerprint=FINGERPRINT)
    assert target.read_text() == "precious"


def test_an_emptied_file_has_forgotten_everything_and_takes_nothing_from_who_had_it_before(path: Path) -> None:
    before = make(path)
    before.write(0, name(0), content(0))
    file = before.emptied()
    assert file.entries() == []
    with pytest.raises(CorruptBlock):
        read(file, 0, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        before.write(1, name(1), content(1))
    assert file.entries() == []
    before.close()
    file.write(2, name(2), content(2))
    assert read(file, 2, 2) == content(2)
    with pytest.raises(BlockingIOError):
        make(path)
    file.close()
