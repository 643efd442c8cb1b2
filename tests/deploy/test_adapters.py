"""The registry of adapters: which names there are, what is in memory, and what becomes of files that change, fail or go."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.clock import Clock, VirtualClock, WallClock
from penstock.deploy import adapters as registry_of_adapters
from penstock.deploy.adapters import Adapters
from penstock.models.adapter_files import READ_BYTES, AdapterFiles
from penstock.types.adapter import CONFIG_FILE, WEIGHTS_FILE, AdapterOutlook, AdapterRef, AdapterState, PackedAdapter
from penstock.types.errors import ConfigError, ModelError, Rejected, RejectReason
from support.tiny_adapters import write_adapter

ONE = {"model.layers.0.self_attn.q_proj": (np.ones((1, 4), np.float32), np.ones((4, 1), np.float32))}
WAIT_S = 30.0
DEEP = Path("folder", "too", "deep")
"""A place in the folder of adapters that no name leads to."""


@dataclass(frozen=True)
class Image:
    name: str
    num_pages: int = 2
    num_bytes: int = 100


@dataclass
class Disk:
    """Reads names of folders in place of adapters, and stops before it does if it is told to."""

    loads: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fault: Callable[[Path], Exception | None] = lambda _: None
    num_values: int = 0
    """Numbers that each adapter has."""

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, path: Path, files: AdapterFiles) -> PackedAdapter:
        self.loads.append(path.name)
        self.began.release()
        assert self.gate.wait(WAIT_S)
        if (error := self.fault(path)) is not None:
            raise error
        files.check(path)
        files.read(path / CONFIG_FILE, 1 << 20)
        files.read(path / WEIGHTS_FILE, 1 << 20)
        files.take(self.num_values)
        return Image(path.name)

    def wait(self, num: int = 1) -> None:
        """Until so many more loads have ended."""
        for _ in range(num):
            assert self.ended.acquire(timeout=WAIT_S)


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


def connected(disk: Disk, *, max_bytes: int = 1 << 30, **arguments: Any) -> Adapters:
    adapters = Adapters(**arguments)
    adapters.connect(disk.read, max_bytes=max_bytes)
    return adapters


@contextmanager
def registry(disk: Disk, tmp_path: Path, *names: str, clock: Clock | None = None, most: int = 64) -> Iterator[Adapters]:
    modules = {name: write_adapter(tmp_path / name, ONE) for name in names}
    adapters = connected(disk, modules=modules, folder=tmp_path / "folder", max_in_memory=most, clock=clock or VirtualClock())
    adapters.listen(disk.ended.release)
    try:
        yield adapters
    finally:
        disk.gate.set()
        adapters.close()


def found(adapters: Adapters, name: str) -> AdapterRef:
    ref = adapters.find(name)
    assert ref is not None
    return ref


def load(adapters: Adapters, name: str, path: Path, *, may_replace: bool = False) -> AdapterRef:
    return adapters.load(name, path, may_replace=may_replace).result(WAIT_S)


def is_there(adapters: Adapters, ref: AdapterRef) -> bool:
    return adapters.state(ref.number).packed is not None


def test_nothing_is_read_before_somebody_wants_it_and_then_once(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, "a", "b") as adapters:
        ref = found(adapters, "a")
        assert found(adapters, "a") is ref
        assert adapters.find("c") is None
        assert not is_there(adapters, ref)
        assert disk.loads == []
        disk.gate.clear()
        for _ in range(3):
            adapters.want(ref)
        assert disk.began.acquire(timeout=WAIT_S)
        adapters.want(ref, is_urgent=True)
        disk.gate.set()
        disk.wait()
        assert adapters.state(ref.number).packed == Image("a")
        adapters.want(ref)
        assert disk.loads == ["a"]
        assert adapters.stats.num_loads == adapters.stats.num_in_memory == 1
        assert (adapters.stats.num_bytes, adapters.outlook(ref.number).num_pages) == (100, 2)


def test_the_outlook_of_an_adapter_tells_pages_and_the_loads_until_it_is_there(
    disk: Disk, clock: VirtualClock, tmp_path: Path
) -> None:
    names = "abcd"
    with registry(disk, tmp_path, *names, clock=clock) as adapters:
        a, b, c, d = (found(adapters, name) for name in names)
        assert adapters.outlook(a.number) == AdapterOutlook()
        disk.gate.clear()
        adapters.want(a)
        assert disk.began.acquire(timeout=WAIT_S)
        clock.advance(3_000)
        disk.gate.set()
        disk.wait()
        assert adapters.outlook(a.number) == AdapterOutlook(2, 2, 0)
        assert adapters.outlook(b.number) == AdapterOutlook(0, 2, 3_000), "it would be the next"
        disk.gate.clear()
        adapters.want(b)
        assert disk.began.acquire(timeout=WAIT_S)
        for ref in (c, d):
            adapters.want(ref)
        adapters.want(d, is_urgent=True)
        assert [adapters.outlook(ref.number).load_ns for ref in (b, d, c)] == [3_000, 6_000, 9_000]
        disk.gate.set()
        disk.wait(3)


def test_ten_thousand_names_cost_an_entry_each(disk: Disk, tmp_path: Path) -> None:
    """None of the paths is there: nobody looks before a request names one."""
    modules = {f"m{i}": tmp_path / f"m{i}" for i in range(10_000)}
    adapters = connected(disk, modules=modules)
    assert adapters.stats.num_registered == 10_000
    assert adapters.stats.num_in_memory == len(disk.loads) == 0


def test_urgent_ones_come_first_and_the_others_in_their_order(disk: Disk, tmp_path: Path) -> None:
    names = "abcdef"
    with registry(disk, tmp_path, *names) as adapters:
        refs = {name: found(adapters, name) for name in names}
        disk.gate.clear()
        adapters.want(refs["a"])
        assert disk.began.acquire(timeout=WAIT_S)
        for name in "bcd":
            adapters.want(refs[name])
        for name in "ecf":
            adapters.want(refs[name], is_urgent=True)
        disk.gate.set()
        disk.wait(6)
        assert disk.loads == list("aecfbd")


def test_memory_has_room_for_those_that_were_asked_for_last(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, *"abcd", most=2) as adapters:
        refs = {name: found(adapters, name) for name in "abcd"}
        for name in "ab":
            adapters.want(refs[name])
            disk.wait()
            assert is_there(adapters, refs[name])
        assert is_there(adapters, refs["a"])
        adapters.want(refs["c"])
        disk.wait()
        assert [is_there(adapters, refs[name]) for name in "abc"] == [True, False, True]
        assert (adapters.stats.num_in_memory, adapters.stats.num_evictions) == (2, 1)
        adapters.want(refs["b"])
        disk.wait()
        assert disk.loads == list("abcb")


def test_what_is_wanted_early_does_not_push_out_what_nobody_had_yet(disk: Disk, tmp_path: Path) -> None:
    """A long queue would read each adapter twice otherwise, once for nothing."""
    with registry(disk, tmp_path, *"abcd", most=2) as adapters:
        refs = {name: found(adapters, name) for name in "abcd"}
        for name in "abc":
            adapters.want(refs[name])
        disk.wait(2)
        adapters.want(refs["d"], is_urgent=True)
        disk.wait()
        assert disk.loads == list("abd")
        assert is_there(adapters, refs["d"])
        disk.wait()
        assert disk.loads == list("abdc")
        assert is_there(adapters, refs["b"])


def test_a_fault_is_told_for_a_while_and_then_it_is_tried_again(disk: Disk, tmp_path: Path, clock: VirtualClock) -> None:
    disk.fault = lambda path: ModelError(f"{path}: broken.", remedy="Mend it.")
    with registry(disk, tmp_path, "a", clock=clock) as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        told = adapters.failure("a")
        assert told is not None
        assert (told.detail, told.reason) == ("a: broken. Mend it.", RejectReason.INVALID)
        assert adapters.state(ref.number) == AdapterState(None, told.detail, told.reason)
        adapters.want(ref)
        assert found(adapters, "a") is ref
        clock.advance(10_000_000_001)
        assert adapters.failure("a") is None
        assert adapters.state(ref.number) == AdapterState()
        disk.fault = lambda _: None
        again = found(adapters, "a")
        adapters.want(again)
        disk.wait()
        assert is_there(adapters, again)
        assert disk.loads == ["a", "a"]
        assert adapters.stats.num_failures == 1


def test_a_folder_that_was_mended_is_read_at_once(disk: Disk, tmp_path: Path) -> None:
    disk.fault = lambda path: ModelError(f"{path}: broken.", remedy="Mend it.")
    with registry(disk, tmp_path, "a") as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        write_adapter(tmp_path / "a", ONE, lora_alpha=7)
        assert found(adapters, "a").number > ref.number


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("ours"), ModelError("x" * 5000)])
def test_whatever_goes_wrong_others_are_loaded_after_it(disk: Disk, tmp_path: Path, error: Exception) -> None:
    disk.fault = lambda path: error if path.name == "a" else None
    with registry(disk, tmp_path, "a", "b") as adapters:
        refs = [found(adapters, name) for name in "ab"]
        for ref in refs:
            adapters.want(ref)
        disk.wait(2)
        told = adapters.failure("a")
        assert told is not None
        assert 0 < len(told.detail) <= 1000
        assert told.reason is (RejectReason.INVALID if isinstance(error, ModelError) else RejectReason.UNAVAILABLE)
        assert is_there(adapters, refs[1])


def test_an_adapter_is_what_was_read_first_and_its_fingerprint_is_the_hash_of_that(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, "a", "b") as adapters:
        refs = [found(adapters, name) for name in "ab"]
        write_adapter(tmp_path / "a", ONE, lora_alpha=7)
        write_adapter(tmp_path / "b", ONE, lora_alpha=7)
        for ref in refs:
            adapters.want(ref)
        disk.wait(2)
        assert [is_there(adapters, ref) for ref in refs] == [True, True]
        assert len(refs[0].fingerprint) == 16
        assert refs[0].fingerprint == refs[1].fingerprint, "the same content elsewhere"


def test_a_file_of_the_same_size_and_time_is_another_adapter_when_it_is_read(disk: Disk, tmp_path: Path) -> None:
    """As one that is rewritten in place within the granularity of the clock."""
    with registry(disk, tmp_path, "a", "b", most=1) as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        assert is_there(adapters, ref)
        rewrite(tmp_path / "a")
        again = load(adapters, "a", tmp_path / "a", may_replace=True)
        assert again.fingerprint != ref.fingerprint
        assert found(adapters, "a") is again


def rewrite(folder: Path) -> None:
    """Another content, and nothing that `stat` tells of the time or the size."""
    path = folder / WEIGHTS_FILE
    data, status = bytearray(path.read_bytes()), path.stat()
    data[-1] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns


def test_files_that_changed_while_requests_wait_fail_and_nobody_who_waits_is_to_blame(disk: Disk, tmp_path: Path) -> None:
    """Cached prefixes of the first one would be read with the second one's weights."""
    with registry(disk, tmp_path, "a", "b", most=1) as adapters:
        ref, other = found(adapters, "a"), found(adapters, "b")
        for one in (ref, other):
            adapters.want(one, is_urgent=True)
            disk.wait()
            assert is_there(adapters, one)
        rewrite(tmp_path / "a")
        adapters.want(ref, is_urgent=True)
        disk.wait()
        state = adapters.state(ref.number)
        assert "files changed while it was used" in state.failure
        assert state.reason is RejectReason.UNAVAILABLE
        again = found(adapters, "a")
        assert again.number > ref.number
        adapters.want(again, is_urgent=True)
        disk.wait()
        assert is_there(adapters, again)
        assert again.fingerprint != ref.fingerprint


def test_an_adapter_that_another_process_could_not_load_is_read_again_only_if_its_files_changed(
    disk: Disk, tmp_path: Path
) -> None:
    with registry(disk, tmp_path, "a") as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        adapters.doubt(ref)
        assert adapters.known("a") is None
        assert found(adapters, "a") is ref
        assert adapters.known("a") is ref
        rewrite(tmp_path / "a")
        assert found(adapters, "a") is ref, "nobody doubts it"
        adapters.doubt(ref)
        again = found(adapters, "a")
        adapters.want(again)
        disk.wait()
        assert again.fingerprint != ref.fingerprint
        adapters.doubt(ref)
        assert adapters.known("a") is again, "an older one is in doubt"


def test_what_was_read_once_and_is_gone_is_no_fault_of_those_who_wait(disk: Disk, tmp_path: Path) -> None:
    write_adapter(tmp_path / "folder" / "gone", ONE)
    with registry(disk, tmp_path, "b", most=1) as adapters:
        ref, other = found(adapters, "gone"), found(adapters, "b")
        for one in (ref, other):
            adapters.want(one, is_urgent=True)
            disk.wait()
            assert is_there(adapters, one)
        shutil.rmtree(tmp_path / "folder" / "gone")
        adapters.want(ref, is_urgent=True)
        disk.wait()
        assert "there is no such file" in adapters.state(ref.number).failure
        assert adapters.state(ref.number).reason is RejectReason.UNAVAILABLE
        assert adapters.find("gone") is None
        assert not adapters.has("gone")


def test_requests_keep_the_adapter_that_they_began_with(disk: Disk, tmp_path: Path) -> None:
    """Unloaded, or replaced in place, while others fill the memory: it is the last to leave."""
    with registry(disk, tmp_path, *"bcdef", most=3) as adapters:
        path = write_adapter(tmp_path / DEEP / "new", ONE)
        first = load(adapters, "new", path)
        write_adapter(path, ONE, lora_alpha=7)
        second = load(adapters, "new", path, may_replace=True)
        shutil.rmtree(path)
        adapters.unload("new")
        for name in "bcdef":
            ref = found(adapters, name)
            adapters.want(ref, is_urgent=True)
            while not is_there(adapters, ref):
                disk.wait()
        assert [is_there(adapters, ref) for ref in (first, second)] == [True, True]
        numbers = [first.number, second.number]
        del first, second
        assert adapters.stats.num_in_memory == 1, "nobody has them"
        assert not adapters._by_number.keys() & numbers


def test_memory_stays_bounded_whatever_is_held(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, most=2) as adapters:
        held = []
        for idx in range(5):
            held.append(load(adapters, "new", write_adapter(tmp_path / DEEP / f"new{idx}", ONE)))
            adapters.unload("new")
        assert adapters.stats.num_in_memory == 2
        adapters.want(held[0], is_urgent=True)
        for _ in range(6):
            disk.wait()
        assert is_there(adapters, held[0]), "it is read again"


def test_names_are_looked_up_in_the_folder_and_never_outside(disk: Disk, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    write_adapter(folder / "one", ONE)
    write_adapter(folder / "team" / "two", ONE)
    write_adapter(tmp_path / "outside", ONE)
    (folder / "three.gguf").write_bytes(b"GGUF")
    (folder / "empty").mkdir()
    (folder / "leak").symlink_to(tmp_path / "outside")
    (folder / "loop").symlink_to(folder / "loop")
    with registry(disk, tmp_path) as adapters:
        assert adapters.registered() == {}
        for name in ("one", "team/two", "three", "three.gguf"):
            assert adapters.find(name) is not None, name
        names = ["empty", "leak", "loop", "../outside", "team/../one", "/one", str(folder / "one"), "one/", "", ".", "x" * 500]
        for name in [*names, "one\0", "team//two", "a/b/c", "ONE", "~", "\ud800"]:
            assert adapters.find(name) is None, name
        assert list(adapters.registered()) == ["one", "team/two", "three", "three.gguf"]
        for path in (tmp_path / "outside", folder / ".." / "outside", folder / "leak", folder / "a\0b", tmp_path / "nothing"):
            with pytest.raises(ModelError, match="--lora-dir"):
                load(adapters, "mine", path)
        load(adapters, "mine", folder / "team" / "two")


def test_loading_by_name_tells_what_is_wrong(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / DEEP / "new", ONE)
    with registry(disk, tmp_path, "a") as adapters:
        ref = load(adapters, "new", path)
        assert is_there(adapters, ref)
        assert adapters.find("new") is ref
        with pytest.raises(ConfigError, match="'new' already"):
            load(adapters, "new", path)
        other = load(adapters, "new", write_adapter(tmp_path / DEEP / "other", ONE), may_replace=True)
        assert other.number > ref.number
        assert adapters.find("new") is other
        disk.fault = lambda path: ModelError(f"{path}: broken.")
        with pytest.raises(ModelError, match="broken"):
            load(adapters, "new", path, may_replace=True)
        with pytest.raises(ModelError, match="broken"):
            load(adapters, "bad", path)
        assert adapters.find("new") is other
        assert adapters.find("bad") is None
        for name in ("", "x" * 201, "two\nlines"):
            with pytest.raises(ConfigError, match="can't be the name of an adapter"):
                load(adapters, name, path)


def test_a_name_that_failed_is_not_listed_and_can_be_loaded(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "folder" / "new", ONE)
    disk.fault = lambda path: ModelError(f"{path}: broken.")
    with registry(disk, tmp_path, "set") as adapters:
        adapters.want(module := found(adapters, "set"))
        disk.wait()
        with pytest.raises(ConfigError, match="'set' already"):
            load(adapters, "set", path)
        assert adapters.path(module) == tmp_path / "set"
        ref = found(adapters, "new")
        assert list(adapters.registered()) == ["set", "new"]
        adapters.want(ref)
        disk.wait()
        assert list(adapters.registered()) == ["set"]
        disk.fault = lambda _: None
        assert is_there(adapters, load(adapters, "new", path))
        assert list(adapters.registered()) == ["set", "new"]
        with pytest.raises(ConfigError, match="'new' already"):
            load(adapters, "new", path)


def test_an_adapter_that_was_unloaded_stays_for_those_who_have_it(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / DEEP / "new", ONE)
    with registry(disk, tmp_path) as adapters:
        ref = load(adapters, "new", path)
        assert adapters.unload("new")
        assert not adapters.unload("new")
        assert adapters.find("new") is None
        assert is_there(adapters, ref)
        again = load(adapters, "new", path)
        assert (again.number != ref.number, again.fingerprint == ref.fingerprint) == (True, True)


def test_a_thousand_loads_and_unloads_leave_nothing_behind(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / DEEP / "new", ONE)
    with registry(disk, tmp_path, most=4) as adapters:
        first = load(adapters, "new", path)
        adapters.unload("new")
        for _ in range(1000):
            load(adapters, "new", path)
            adapters.unload("new")
        assert is_there(adapters, first)
        assert adapters.stats.num_in_memory == 1
        assert adapters.stats.num_registered == 0
        assert list(adapters._by_number) == [first.number]
        assert not adapters._asked


def test_a_model_that_is_put_aside_keeps_the_names(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, "a") as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        adapters.close()
        assert not is_there(adapters, ref)
        adapters.want(ref)
        adapters.connect(disk.read, max_bytes=1 << 30)
        adapters.listen(disk.ended.release)
        assert found(adapters, "a") is ref
        adapters.want(ref)
        disk.wait()
        assert is_there(adapters, ref)


def test_files_that_changed_are_another_adapter_when_the_model_comes_back(disk: Disk, tmp_path: Path) -> None:
    """But another process's adapter is the content that it read."""
    with registry(disk, tmp_path, "a") as adapters:
        prints = [load(adapters, "b", write_adapter(tmp_path / "folder" / "b", ONE)).fingerprint]
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait(2)
        del ref
        adapters.with_content(prints[0], tmp_path / "a")
        for folder in (tmp_path / "a", tmp_path / "folder" / "b"):
            write_adapter(folder, ONE, lora_alpha=7)
        adapters.close()
        adapters.connect(disk.read, max_bytes=1 << 30)
        adapters.listen(disk.ended.release)
        for name in "ab":
            ref = found(adapters, name)
            adapters.want(ref)
            disk.wait()
            assert is_there(adapters, ref)
            prints.append(ref.fingerprint)
        other = adapters.with_content(prints[0], tmp_path / "a")
        adapters.want(other)
        disk.wait()
        assert "files changed while it was used" in adapters.state(other.number).failure
    assert len(set(prints)) == 2


def test_memory_has_room_for_so_many_bytes_those_of_reading_included(disk: Disk, tmp_path: Path) -> None:
    disk.num_values = 100
    need = 100 * READ_BYTES
    adapters = connected(disk, modules={name: write_adapter(tmp_path / name, ONE) for name in "abc"}, max_bytes=need + 100)
    adapters.listen(disk.ended.release)
    refs = [found(adapters, name) for name in "abc"]
    for ref in refs:
        adapters.want(ref)
        disk.wait()
        adapters.state(ref.number)
    assert [is_there(adapters, ref) for ref in refs] == [False, True, True]
    adapters.close()
    adapters.connect(disk.read, max_bytes=need - 1)
    adapters.listen(disk.ended.release)
    adapters.want(refs[0])
    disk.wait()
    told = adapters.state(refs[0].number).failure
    assert re.search(r"reading the adapter takes up to 1.56 KiB, and adapters may take 1.56 KiB.*--max-cpu-loras", told), told
    adapters.close()


def test_closing_ends_those_who_wait_for_a_load(disk: Disk, tmp_path: Path) -> None:
    adapters = connected(disk, folder=tmp_path)
    adapters.close()
    with pytest.raises(Rejected, match="the model leaves"):
        load(adapters, "a", write_adapter(tmp_path / "a", ONE))
    adapters.connect(disk.read, max_bytes=1 << 30)
    disk.gate.clear()
    done = adapters.load("a", write_adapter(tmp_path / "a", ONE))
    assert disk.began.acquire(timeout=WAIT_S)
    threading.Timer(0.05, disk.gate.set).start()
    adapters.close()
    with pytest.raises(Rejected, match="the model leaves"):
        done.result(WAIT_S)
    assert not adapters.has("a")


def test_no_room_at_all_is_refused(disk: Disk) -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras"):
        Adapters(max_in_memory=0)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (OSError(5, "Input/output error"), RejectReason.UNAVAILABLE),
        (TimeoutError("reading took more than 30 s"), RejectReason.UNAVAILABLE),
        (FileNotFoundError(2, "No such file"), RejectReason.INVALID),
    ],
)
def test_a_disk_that_fails_is_no_fault_of_who_asks(disk: Disk, tmp_path: Path, cause: OSError, reason: RejectReason) -> None:
    fault = ModelError("it can't be read")
    fault.__cause__ = cause
    disk.fault = lambda _: fault
    with registry(disk, tmp_path, "a") as adapters:
        adapters.want(ref := found(adapters, "a"))
        disk.wait()
        assert adapters.state(ref.number) == AdapterState(None, str(fault), reason)


def test_what_nobody_waits_for_any_more_is_not_read(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, "a", "refused", "c") as adapters:
        disk.gate.clear()
        refs = [found(adapters, name) for name in "ac"]
        adapters.want(refs[0])
        assert disk.began.acquire(timeout=WAIT_S)
        adapters.want(found(adapters, "refused"))
        adapters.want(refs[1])
        disk.gate.set()
        disk.wait(2)
        assert disk.loads == ["a", "c"]


def test_a_name_that_is_unloaded_while_it_is_looked_up_does_not_come_back(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(disk, tmp_path, "a") as adapters:
        assert adapters.known("a") is not None
        adapters._names["a"].failure = "its files may be others by now"
        monkeypatch.setattr(registry_of_adapters, "_stamp", lambda _: adapters.unload("a"))
        assert adapters.find("a") is None
        assert not adapters.has("a")


@pytest.mark.parametrize("is_unloaded", [False, True], ids=["it-failed", "the-model-was-unloaded"])
def test_a_folder_that_became_a_file_is_found_there(disk: Disk, tmp_path: Path, is_unloaded: bool) -> None:
    folder = write_adapter(tmp_path / "folder" / "a", ONE)
    with registry(disk, tmp_path) as adapters:
        ref = found(adapters, "a")
        shutil.rmtree(folder)
        folder.with_suffix(".gguf").touch()
        if is_unloaded:
            del ref
            adapters.close()
        else:
            adapters.want(ref)
            disk.wait()
            assert adapters.failure("a") is not None
        assert adapters.path(found(adapters, "a")) == folder.with_suffix(".gguf")
        assert adapters.registered() == {"a": folder.with_suffix(".gguf")}


def test_a_thread_that_is_stuck_is_left_and_another_one_reads(disk: Disk, tmp_path: Path, clock: VirtualClock) -> None:
    with registry(disk, tmp_path, *"abcdefgh", clock=clock) as adapters:
        refs = [found(adapters, name) for name in "abcdefgh"]
        disk.gate.clear()
        for num, ref in enumerate(refs, 1):
            adapters.want(ref)
            if num <= 4:
                assert disk.began.acquire(timeout=WAIT_S)
            clock.advance(5_000_000_000)
        assert disk.loads == list("abcd"), "four threads at most"
        disk.gate.set()
        disk.wait(8)
        assert sorted(disk.loads) == list("abcdefgh")
        assert all(is_there(adapters, ref) for ref in refs)


def test_what_was_wanted_when_a_thread_got_stuck_is_read_by_another_though_nobody_asks_again(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_of_adapters, "_STUCK_NS", 50_000_000)
    with registry(disk, tmp_path, "a", "b", clock=WallClock()) as adapters:
        hung = threading.Event()
        disk.fault = lambda path: None if path.name == "b" else _wait(hung)
        refs = [found(adapters, name) for name in "ab"]
        for ref in refs:
            adapters.want(ref)
        try:
            disk.wait()
            assert [is_there(adapters, ref) for ref in refs] == [False, True]
        finally:
            hung.set()
        disk.wait()
        assert is_there(adapters, refs[0])


def test_a_thread_that_was_stuck_when_the_model_left_evicts_nothing_of_the_next(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_of_adapters, "_STUCK_NS", 50_000_000)
    disk.num_values = 100
    with registry(disk, tmp_path, "a", "b", clock=WallClock()) as adapters:
        hung = threading.Event()
        disk.fault = lambda path: None if path.name == "b" else _wait(hung)
        refs = [found(adapters, name) for name in "ab"]
        adapters.want(refs[0])
        assert disk.began.acquire(timeout=WAIT_S)
        (stuck,) = adapters._threads
        adapters.close()
        adapters.connect(disk.read, max_bytes=disk.num_values * READ_BYTES)
        adapters.listen(disk.ended.release)
        adapters.want(refs[1])
        disk.wait()
        hung.set()
        stuck.join(WAIT_S)
        assert [is_there(adapters, ref) for ref in refs] == [False, True]
        assert adapters.stats.num_evictions == 0


def test_a_refused_thread_leaves_the_reading_to_those_that_there_are(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As at the limit of a container's processes."""
    disk.gate.clear()
    with registry(disk, tmp_path, "a", "b") as adapters:
        refs = [found(adapters, name) for name in "ab"]
        adapters.want(refs[0])
        assert disk.began.acquire(timeout=WAIT_S)
        monkeypatch.setattr(threading.Thread, "start", refuse_thread)
        adapters.want(refs[1])
        monkeypatch.undo()
        assert "can't start new thread" in caplog.text
        disk.gate.set()
        disk.wait(2)
        assert [is_there(adapters, ref) for ref in refs] == [True, True]


def refuse_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def _wait(event: threading.Event) -> None:
    assert event.wait(WAIT_S)


def test_so_many_loads_by_name_at_once(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / DEEP / "new", ONE)
    with registry(disk, tmp_path) as adapters:
        disk.gate.clear()
        pending = [adapters.load(f"n{idx}", path) for idx in range(registry_of_adapters.MAX_ASKED)]
        with pytest.raises(Rejected, match="64 adapters are being loaded by name already") as caught:
            adapters.load("more", path)
        assert caught.value.reason is RejectReason.QUEUE_FULL
        assert [one.cancel() for one in pending[1:]] == [True] * 63, "who does not wait any more"
        disk.gate.set()
        assert pending[0].result(WAIT_S) is adapters.find("n0")
        disk.wait(64)
        assert list(adapters.registered()) == ["n0"]
        assert adapters.stats.num_in_memory == 1
        assert len(adapters._by_number) == 1


def test_names_are_bounded_and_those_of_the_folder_make_way(
    disk: Disk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_of_adapters, "MAX_NAMES", 3)
    for name in "abcdef":
        write_adapter(tmp_path / "folder" / name, ONE)
    path = write_adapter(tmp_path / DEEP / "new", ONE)
    with registry(disk, tmp_path, "mine") as adapters:
        held = found(adapters, "a")
        numbers = [found(adapters, name).number for name in "bcb"]
        assert list(adapters.registered()) == ["mine", "a", "b"], "a is held, and b came again"
        assert len(set(numbers)) == 3
        load(adapters, "new", path)
        assert list(adapters.registered()) == ["mine", "a", "new"]
        with pytest.raises(ConfigError, match="There are already 3 names of adapters"):
            adapters.find("c")
        with pytest.raises(ConfigError, match="There are already 3 names of adapters"):
            load(adapters, "newer", path)
        assert adapters.find("a") is held
        load(adapters, "new", path, may_replace=True)
        assert len(adapters._by_number) <= 3 + 1
