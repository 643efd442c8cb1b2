"""The registry of adapters: which names there are, what is in memory, and what becomes of files that change, fail or go."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.clock import VirtualClock
from penstock.deploy.adapters import Adapters, fingerprint
from penstock.models.adapter import AdapterFactors
from penstock.types.adapter import AdapterOutlook, AdapterRef, PackedAdapter
from penstock.types.errors import ConfigError, ModelError
from tiny_adapters import write_adapter

ONE = {"model.layers.0.self_attn.q_proj": (np.ones((1, 4), np.float32), np.ones((4, 1), np.float32))}
WAIT_S = 30.0


@dataclass(frozen=True)
class Image:
    name: str
    num_pages: int = 2
    num_bytes: int = 100


@dataclass
class Disk:
    """Reads names of folders in place of factors, and stops before it does if it is told to."""

    loads: list[str] = field(default_factory=list)
    gate: threading.Event = field(default_factory=threading.Event)
    began: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    fault: Callable[[Path], Exception | None] = lambda _: None

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, path: Path) -> AdapterFactors:
        self.loads.append(path.name)
        self.began.release()
        assert self.gate.wait(WAIT_S)
        if (error := self.fault(path)) is not None:
            raise error
        return AdapterFactors({path.name: (np.zeros((1, 1), np.float32), np.zeros((1, 1), np.float32))})

    def pack(self, factors: AdapterFactors) -> PackedAdapter:
        return Image(next(iter(factors.by_weight)))

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
    adapters.connect(disk.read, disk.pack, max_bytes=max_bytes)
    return adapters


@contextmanager
def registry(disk: Disk, tmp_path: Path, *names: str, clock: VirtualClock | None = None, most: int = 64) -> Iterator[Adapters]:
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
        assert adapters.state(ref.number).failure == adapters.failure("a") == f"{tmp_path / 'a'}: broken. Mend it."
        adapters.want(ref)
        assert found(adapters, "a") is ref
        clock.advance(10_000_000_001)
        assert adapters.state(ref.number).failure == adapters.failure("a") == ""
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
        for name in "ab":
            adapters.want(found(adapters, name))
        disk.wait(2)
        assert 0 < len(adapters.failure("a")) <= 1000
        assert is_there(adapters, found(adapters, "b"))


def test_files_that_changed_since_the_first_use_are_another_adapter(disk: Disk, tmp_path: Path) -> None:
    """Cached prefixes of the first one would be read with the second one's weights."""
    with registry(disk, tmp_path, "a") as adapters:
        ref = found(adapters, "a")
        write_adapter(tmp_path / "a", ONE, lora_alpha=7)
        adapters.want(ref)
        disk.wait()
        assert "changed since it was first used" in adapters.state(ref.number).failure
        again = found(adapters, "a")
        assert (again.number > ref.number, again.fingerprint != ref.fingerprint) == (True, True)
        adapters.want(again)
        disk.wait()
        assert is_there(adapters, again)


def test_the_fingerprint_is_the_same_after_a_restart_and_another_for_other_content(tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "a", ONE)
    first = fingerprint(path)
    assert fingerprint(tmp_path / "." / "a") == first
    assert len(first) == 16
    (tmp_path / "link").symlink_to(path)
    assert fingerprint(tmp_path / "link") == first
    write_adapter(path, ONE, lora_alpha=7)
    assert fingerprint(path) != first
    assert fingerprint(write_adapter(tmp_path / "b", ONE)) != first
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for odd in (tmp_path / "none", tmp_path / "loop", tmp_path / "a\0b", tmp_path / "\ud800", tmp_path / "none.gguf"):
        assert len(fingerprint(odd)) == 16


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
        assert adapters.registered() == []
        for name in ("one", "team/two", "three", "three.gguf"):
            assert adapters.find(name) is not None, name
        names = ["empty", "leak", "loop", "../outside", "team/../one", "/one", str(folder / "one"), "one/", "", ".", "x" * 500]
        for name in [*names, "one\0", "team//two", "a/b/c", "ONE", "~", "\ud800"]:
            assert adapters.find(name) is None, name
        assert [one.name for one in adapters.registered()] == ["one", "team/two", "three", "three.gguf"]
        assert adapters.is_within(folder / "team" / "two")
        assert not any(adapters.is_within(path) for path in (tmp_path / "outside", folder / ".." / "outside", folder / "leak"))
        assert not adapters.is_within(folder / "a\0b")


def test_loading_by_name_tells_what_is_wrong(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "new", ONE)
    with registry(disk, tmp_path, "a") as adapters:
        ref = adapters.load("new", path)
        assert is_there(adapters, ref)
        assert adapters.find("new") is ref
        with pytest.raises(ConfigError, match="'new' already"):
            adapters.load("new", path)
        other = adapters.load("new", write_adapter(tmp_path / "other", ONE), may_replace=True)
        assert other.number > ref.number
        assert adapters.find("new") is other
        disk.fault = lambda path: ModelError(f"{path}: broken.")
        with pytest.raises(ModelError, match="broken"):
            adapters.load("new", path, may_replace=True)
        with pytest.raises(ModelError, match="broken"):
            adapters.load("bad", path)
        assert adapters.find("new") is other
        assert adapters.find("bad") is None
        for name in ("", "x" * 201, "two\nlines"):
            with pytest.raises(ConfigError, match="no name of an adapter"):
                adapters.load(name, path)


def test_an_adapter_that_was_unloaded_stays_for_those_who_have_it(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "new", ONE)
    with registry(disk, tmp_path) as adapters:
        ref = adapters.load("new", path)
        assert adapters.unload("new")
        assert not adapters.unload("new")
        assert adapters.find("new") is None
        assert is_there(adapters, ref)
        again = adapters.load("new", path)
        assert (again.number != ref.number, again.fingerprint == ref.fingerprint) == (True, True)


def test_a_thousand_loads_and_unloads_leave_nothing_behind(disk: Disk, tmp_path: Path) -> None:
    path = write_adapter(tmp_path / "new", ONE)
    with registry(disk, tmp_path, most=4) as adapters:
        first = adapters.load("new", path)
        adapters.unload("new")
        for _ in range(1100):
            adapters.load("new", path)
            adapters.unload("new")
        assert "unloaded" in adapters.state(first.number).failure
        assert adapters.stats.num_in_memory <= 4
        assert adapters.stats.num_registered == 0
        assert len(adapters._by_number) <= 1024


def test_a_model_that_is_put_aside_keeps_the_names(disk: Disk, tmp_path: Path) -> None:
    with registry(disk, tmp_path, "a") as adapters:
        ref = found(adapters, "a")
        adapters.want(ref)
        disk.wait()
        adapters.close()
        assert not is_there(adapters, ref)
        adapters.want(ref)
        adapters.connect(disk.read, disk.pack, max_bytes=1 << 30)
        adapters.listen(disk.ended.release)
        assert found(adapters, "a") is ref
        adapters.want(ref)
        disk.wait()
        assert is_there(adapters, ref)


def test_memory_has_room_for_so_many_bytes_or_one(disk: Disk, tmp_path: Path) -> None:
    adapters = connected(disk, modules={name: write_adapter(tmp_path / name, ONE) for name in "abc"}, max_bytes=250)
    adapters.listen(disk.ended.release)
    for name in "abc":
        adapters.want(found(adapters, name))
        disk.wait()
        adapters.state(found(adapters, name).number)
    assert [is_there(adapters, found(adapters, name)) for name in "abc"] == [False, True, True]
    adapters.close()
    adapters.connect(disk.read, disk.pack, max_bytes=50)
    adapters.listen(disk.ended.release)
    adapters.want(found(adapters, "a"))
    disk.wait()
    assert is_there(adapters, found(adapters, "a"))
    adapters.close()


def test_closing_ends_those_who_wait_for_a_load(disk: Disk, tmp_path: Path) -> None:
    adapters = connected(disk, folder=tmp_path)
    adapters.close()
    with pytest.raises(ModelError):
        adapters.load("a", write_adapter(tmp_path / "a", ONE))
    adapters.close()


def test_no_room_at_all_is_refused(disk: Disk) -> None:
    with pytest.raises(ConfigError, match="--max-cpu-loras"):
        Adapters(max_in_memory=0)
