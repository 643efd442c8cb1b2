"""Files of packed weights: the same bits as converted weights, and never anything of a file that is not sound."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from penstock.backends.native._native import Engine, SourceFormat, Team
from penstock.backends.native.executor import NativeExecutor
from penstock.backends.native.lowering import SOURCE_FORMATS
from penstock.models import architectures
from penstock.models.catalog import resolve
from penstock.models.formats import stored_bytes
from penstock.models.load import load_model
from penstock.models.packed_file import LAYOUT, Form, Packed, PackedError, PackedFile, open_packed, write_packed
from support.native_variants import VARIANTS
from support.parity.tiny import write_case
from support.parity.tiny_cases import CASES
from support.tiny_models import TinyLlama, write_gguf

IDENTITY = {"version": "1", "weights": "ab"}
TOKENS = [5, 6, 7, 8, 9, 10, 11]
PREFIX = struct.Struct("<16sQ32s")
FORM = Form("BF16", 32, 32, by_row=False)


def make(path: Path, packed: PackedFile | None = None, **options: object) -> NativeExecutor:
    model = load_model(resolve(str(path), path.parent))
    sizes = {"num_blocks": 8, "block_size": 16, "max_rows": 4, "max_step_tokens": 32, "max_model_len": 32}
    return NativeExecutor(model, architectures.describe(model.spec), **sizes, num_threads=2, packed=packed, **options)  # type: ignore[arg-type]


def pack(path: Path, file: Path, **options: object) -> None:
    with closing(make(path, **options)) as executor:
        write_packed(file, IDENTITY, executor.packed)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file of one matrix, with a record of its check."""
    path = tmp_path / "packed" / "one.packed"
    rows = np.arange(2048, dtype=np.uint16).view(np.uint8)
    write_packed(path, IDENTITY, {"w": Packed(FORM, [rows]), "v": Packed(FORM, [rows[:100], rows[:64]])})
    path.chmod(0o600)  # tests damage it
    with open_packed(path, IDENTITY):
        return path


def fault(path: Path, identity: dict[str, str] | None = None) -> str:
    with pytest.raises(PackedError) as error, open_packed(path, IDENTITY if identity is None else identity):
        pass
    return str(error.value)


def rewritten(file: Path, change: Callable[[str], str]) -> Path:
    """The file with another header, whose digest is right."""
    data = file.read_bytes()
    magic, length, _ = PREFIX.unpack(data[: PREFIX.size])
    text = change(data[PREFIX.size : PREFIX.size + length].decode()).encode(errors="surrogateescape")
    begin = -(-(PREFIX.size + len(text)) // 64) * 64
    head = PREFIX.pack(magic, len(text), blake2b(text, digest_size=32).digest()) + text
    file.write_bytes(head.ljust(begin, b"\0") + data[-(-(PREFIX.size + length) // 64) * 64 :])
    return file


# --- the same bits ---


@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q4_1", "Q8_0", "BF16", "F32"])
def test_logits_of_mapped_weights_are_those_of_converted_ones(matrix_type: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(), matrix_type=matrix_type)
    check_same(path, tmp_path / "packed" / "tiny.packed")


def test_logits_of_mapped_experts_are_those_of_converted_ones(tmp_path: Path) -> None:
    check_same(write_case(CASES["mixtral_gguf"], tmp_path), tmp_path / "packed" / "tiny.packed")


def check_same(path: Path, file: Path) -> None:
    pack(path, file)
    with closing(make(path)) as converted:
        expected, num_bytes = converted.forward_logits(TOKENS), converted.weight_bytes
    with open_packed(file, IDENTITY) as packed:
        mapped = make(path, packed)
    with closing(mapped):
        assert mapped.weight_bytes == num_bytes
        assert np.array_equal(mapped.forward_logits(TOKENS), expected)


def test_a_file_serves_all_instruction_sets(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", TinyLlama(), matrix_type="Q4_1")
    file = tmp_path / "packed" / "tiny.packed"
    pack(path, file, variant="portable")
    for variant in VARIANTS:
        with open_packed(file, IDENTITY) as packed, closing(make(path, packed, variant=variant)) as mapped:
            found = mapped.forward_logits(TOKENS)
        with closing(make(path, variant=variant)) as converted:
            assert np.array_equal(found, converted.forward_logits(TOKENS))


@pytest.mark.parametrize(("by_row", "apart", "num_arrays"), [(False, [], 1), (True, [], 3), (True, [3, 8, 9, 31], 5)])
def test_integers_of_rows_are_mapped_as_they_are_packed(
    by_row: bool, apart: list[int], num_arrays: int, tmp_path: Path
) -> None:
    """A matrix of integers has three arrays, or five with columns apart. Their sizes need not be multiples of 64 bytes."""
    form = Form("F32", 40, 32, by_row, bool(apart))
    rows = np.random.default_rng(1).standard_normal((40, 32)).astype(np.float32).view(np.uint8)
    engine = new_engine()
    arrays = engine.packed_arrays(engine.add_matrix(SourceFormat.F32, 40, 32, rows, by_row=by_row, apart=apart))
    file = tmp_path / "packed" / "one.packed"
    write_packed(file, IDENTITY, {"w": Packed(form, arrays)})
    with open_packed(file, IDENTITY) as packed:
        other, place = new_engine(), packed.place("w", form)
        other.map_file(packed.fd)
        matrix = other.map_matrix(SourceFormat.F32, 40, 32, place.offset, place.num_bytes, by_row, bool(apart))
    found = other.packed_arrays(matrix)
    assert all(np.array_equal(one, two) for one, two in zip(found, arrays, strict=True))
    assert len(found) == num_arrays
    with pytest.raises(ValueError, match="packed already"):
        other.pack_rows(matrix, 0, rows)


def test_a_files_columns_apart_are_checked(tmp_path: Path) -> None:
    form, file, rows = Form("F32", 40, 32, True, True), tmp_path / "packed" / "one.packed", np.zeros((40, 128), np.uint8)
    source = new_engine()
    arrays = source.packed_arrays(source.add_matrix(SourceFormat.F32, 40, 32, rows, by_row=True, apart=[0, 1, 2, 3]))
    wrong = [*arrays[:3], np.array([0, 1, 2, 32], np.int32).view(np.uint8), arrays[4]]
    write_packed(file, IDENTITY, {"w": Packed(form, wrong)})
    with open_packed(file, IDENTITY) as packed:
        engine, place = new_engine(), packed.place("w", form)
        engine.map_file(packed.fd)
        with pytest.raises(ValueError, match="not one of the matrix's"):
            engine.map_matrix(SourceFormat.F32, 40, 32, place.offset, place.num_bytes, True, True)


def test_a_change_of_the_layout_has_another_number(tmp_path: Path) -> None:
    """If this fails, files of the version before would be read wrongly: raise LAYOUT, and put the new digests here."""
    engine, formats, experts = new_engine(), blake2b(digest_size=8), blake2b(digest_size=8)
    for fmt, source in SOURCE_FORMATS.items():
        num_bytes = stored_bytes(fmt, 40, 512)
        rows = (np.arange(num_bytes) * 7 + np.arange(num_bytes) // 32 * 3) % 64  # small enough for finite scales
        matrix = engine.add_matrix(source, 40, 512, rows.astype(np.uint8).reshape(40, -1))
        formats.update(engine.packed_arrays(matrix)[0].data)
    with closing(make(write_case(CASES["mixtral_gguf"], tmp_path))) as executor:
        for name, (form, arrays) in sorted(executor.packed.items()):
            experts.update(f"{name} {tuple(form)}".encode())
            experts.update(arrays[0].data)
    assert (LAYOUT, formats.hexdigest(), experts.hexdigest()) == (2, "20deec85e37750ee", "21160c4daf470a28")


# --- files that are not sound ---


def test_a_sound_file_is_read_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PackedFile) -> None:
        raise AssertionError

    monkeypatch.setattr(PackedFile, "check", refuse)
    with open_packed(file, IDENTITY) as packed:
        assert packed.place("w", FORM).num_bytes == 2048 * 2
    with pytest.raises(AssertionError), open_packed(file, IDENTITY, is_checked=True):
        pass
    assert sorted(one.name for one in file.parent.iterdir()) == [".one.packed.lock", "one.checked", "one.packed"]


def test_a_system_without_huge_pages_reads_a_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallPages(mmap.mmap):
        def madvise(self, option: int, *_: int) -> None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(mmap, "mmap", SmallPages)
    with open_packed(file, IDENTITY, is_checked=True) as packed:
        assert set(packed.places) == {"w", "v"}


def test_every_byte_that_is_changed_is_noticed(file: Path) -> None:
    whole = file.read_bytes()
    with open_packed(file, IDENTITY) as packed:
        places = list(packed.places.values())
    header_end = PREFIX.size + PREFIX.unpack(whole[: PREFIX.size])[1]
    inside = [index for place in places for index in (place.offset, place.offset + place.num_bytes - 1)]
    for index in (*range(header_end), *inside):
        changed = bytearray(whole)
        changed[index] ^= 1 << index % 8
        file.write_bytes(changed)
        assert ("is not a file of packed weights" if index < 16 else "is damaged") in fault(file)
    file.write_bytes(whole)
    with open_packed(file, IDENTITY) as packed:
        packed.check()


def test_a_change_that_keeps_the_time_is_noticed(file: Path) -> None:
    """Programs can set when a file was last modified, but not when the system last changed it."""
    status = file.stat()
    with file.open("r+b") as data:
        data.seek(-1, os.SEEK_END)
        data.write(b"\xff")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert "v is not what was written" in fault(file)


def test_a_failed_check_is_not_forgotten(file: Path) -> None:
    """A disk that loses bits leaves the times as they were: the next start must not map the file unread."""
    with file.open("r+b") as data:
        data.seek(-1, os.SEEK_END)
        data.write(b"\xff")
    status, record = file.stat(), file.with_suffix(".checked")
    record.write_text(f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}")
    with open_packed(file, IDENTITY):
        pass  # nothing of it is read
    with pytest.raises(PackedError, match="damaged"), open_packed(file, IDENTITY, is_checked=True):
        pass
    assert not record.exists()
    assert "damaged" in fault(file)


@pytest.mark.parametrize("num_bytes", [0, 8, 60, 300, -64, -1])
def test_a_file_that_ends_early_is_refused(num_bytes: int, file: Path) -> None:
    os.truncate(file, num_bytes if num_bytes >= 0 else file.stat().st_size + num_bytes)
    assert fault(file)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *((0, value) for value in ("-64", "32", str(1 << 62), "0.0", "", "9" * 5000, "x\t64")),
        *((1, value) for value in (str(1 << 40), "-64", "4096.0", "")),
        *((column, value) for column in (4, 5, 6) for value in ("x", "")),
    ],
)
def test_a_place_outside_of_the_file_is_refused(column: int, value: str, file: Path) -> None:
    def change(header: str) -> str:
        *others, last = header.split("\n")
        columns = last.split("\t")
        columns[column] = value
        return "\n".join([*others, "\t".join(columns)])

    assert "its header makes no sense" in fault(rewritten(file, change))


@pytest.mark.parametrize("header", ["a\tb\n\n1", "a\tb\n\n\t\t\t\t\t\t\t", "\n\nnull", "\udc80"])
def test_a_header_without_sense_is_refused(header: str, file: Path) -> None:
    assert "its header makes no sense" in fault(rewritten(file, lambda _: header))


@pytest.mark.parametrize("length", [1 << 24, (1 << 24) + 1, 1 << 63, (1 << 64) - 1])
def test_a_header_longer_than_the_file_is_refused(length: int, file: Path) -> None:
    data = file.read_bytes()
    file.write_bytes(data[:16] + length.to_bytes(8, "little") + data[24:])
    assert "is damaged" in fault(file)


@pytest.mark.parametrize("name", IDENTITY)
def test_a_file_made_of_something_else_is_refused(name: str, file: Path) -> None:
    words = {"version": "was made for version 1, not 2", "weights": "the model's files changed"}[name]
    assert f"{words}. `penstock pack`" in fault(file, IDENTITY | {name: "2"})


def test_a_matrix_of_another_form_is_refused(file: Path) -> None:
    with open_packed(file, IDENTITY) as packed:
        for name, form in (("u", FORM), *(("w", FORM._replace(**{key: 3})) for key in FORM._fields)):
            with pytest.raises(PackedError, match="u is missing" if name == "u" else "w is packed in another form"):
                packed.place(name, form)


@pytest.mark.parametrize(
    ("offset", "num_bytes"),
    [(0, 64), (0, 2048 * 2), (-64, 2048), (1, 2048), (1 << 62, 2048), (-(1 << 63), 2048), (1 << 40, 2048)],
)
def test_the_engine_reads_nothing_outside_of_the_file(offset: int, num_bytes: int, file: Path) -> None:
    engine = new_engine()
    with pytest.raises(ValueError, match="no file"):
        engine.map_matrix(SourceFormat.BF16, 32, 32, 0, 2048)
    with file.open("rb") as data:
        engine.map_file(data.fileno())
    with pytest.raises(ValueError, match="the file of packed weights"):
        engine.map_matrix(SourceFormat.BF16, 32, 32, offset, num_bytes)
    end = file.stat().st_size // 64 * 64
    with pytest.raises(ValueError, match="does not have this matrix"):
        engine.map_matrix(SourceFormat.BF16, 32, 32, end - 1984, 2048)
    engine.map_matrix(SourceFormat.BF16, 32, 32, end - 2048, 2048)


def test_an_empty_file_is_not_mapped(tmp_path: Path) -> None:
    with (tmp_path / "empty").open("w+b") as data, pytest.raises(OSError, match="empty"):
        new_engine().map_file(data.fileno())


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_can_write_is_refused(mode: int, file: Path) -> None:
    file.chmod(mode)
    assert f"{file} can be written by other users. Run `chmod go-w {file}`." in fault(file)
    file.chmod(0o600)
    file.parent.chmod(mode | 0o100)
    assert f"{file.parent} can be written by other users. Run `chmod go-w {file.parent}`." in fault(file)


def test_what_is_no_file_is_refused(file: Path) -> None:
    real = file.rename(file.with_name("real"))
    file.symlink_to(real)
    assert "can't be opened" in fault(file)
    file.unlink()
    os.mkfifo(file, 0o600)
    assert "is not a file" in fault(file)
    file.unlink()
    file.mkdir(0o700)
    assert "is not a file" in fault(file)
    file.rmdir()
    with pytest.raises(FileNotFoundError), open_packed(file, IDENTITY):
        pass


# --- writing ---


def test_a_full_disk_leaves_the_old_file(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, write = file.read_bytes(), os.write

    def fill(fd: int, data: memoryview) -> int:
        if len(data) < 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[:1000])

    monkeypatch.setattr(os, "write", fill)
    with pytest.raises(OSError, match="No space"):
        write_packed(file, {"weights": "2"}, {"w": Packed(FORM, [np.ones(4000, np.uint8)])})
    monkeypatch.undo()
    assert file.read_bytes() == old
    assert not file.with_name(".one.packed.part").exists()


def test_a_disk_without_room_is_left_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, opened = sorted(file.parent.iterdir()), []
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=4095))
    monkeypatch.setattr("penstock.models.packed_file._write", lambda *_: opened.append(1))
    with pytest.raises(OSError, match="No space left"):
        write_packed(file, IDENTITY, {"w": Packed(FORM, [np.zeros(4096, np.uint8)])})
    assert (opened, sorted({*file.parent.iterdir()} - {*before})) == ([], [])
    with open_packed(file, IDENTITY):
        pass


def test_what_a_killed_process_left_is_written_over(file: Path) -> None:
    file.with_name(".one.packed.part").write_bytes(b"x" * 10_000)
    write_packed(file, IDENTITY, {"w": Packed(FORM, [np.ones(64, np.uint8)])})
    assert file.stat().st_size < 1000
    assert file.stat().st_mode & 0o777 == 0o400
    with open_packed(file, IDENTITY):  # another inode, so that it was checked
        assert not file.with_name(".one.packed.part").exists()


def test_a_second_process_waits_for_the_first(file: Path) -> None:
    waits, matrices = threading.Event(), {"w": Packed(FORM, [np.zeros(2048, np.uint8)])}
    with file.with_name(".one.packed.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=write_packed, args=(file, {"weights": "2"}, matrices), kwargs={"on_wait": waits.set})
        thread.start()
        assert waits.wait(10)
        with open_packed(file, IDENTITY):
            fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(10)
    with open_packed(file, {"weights": "2"}):
        pass


def test_what_the_first_process_wrote_is_not_written_again(file: Path) -> None:
    waits, matrices, inode = threading.Event(), {"w": Packed(FORM, [np.zeros(2048, np.uint8)])}, file.stat().st_ino
    with file.with_name(".one.packed.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        thread = threading.Thread(target=write_packed, args=(file, IDENTITY, matrices), kwargs={"on_wait": waits.set})
        thread.start()
        assert waits.wait(10)
        fcntl.flock(lock, fcntl.LOCK_UN)
        thread.join(10)
    assert file.stat().st_ino == inode


def new_engine() -> Engine:
    return Engine(
        kv_shapes=[(1, 16)],
        vocab_size=32,
        num_blocks=2,
        block_size=16,
        max_rows=1,
        max_step_tokens=1,
        team=Team(1),
    )
