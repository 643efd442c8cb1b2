"""Memory and CPUs as the kernel's files tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.machine import available_memory_bytes, cpu_name, data_cache_bytes, give_back_free_memory, usable_cpus

GIB = 1 << 30


class FakeMachine:
    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.write("proc/meminfo", f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self) -> int:
        return available_memory_bytes(proc=self.proc, cgroup=self.cgroup)

    def write_cache(self, cpu: int, index: int, kind: str, size: str, users: str, level: int) -> None:
        told = {"type": kind, "size": size, "shared_cpu_list": users, "level": str(level)}
        for name, text in told.items():
            self.write(f"cpu/cpu{cpu}/cache/index{index}/{name}", f"{text}\n")

    def caches(self) -> int:
        return data_cache_bytes(cpus=self.proc.parent / "cpu")

    def cpus(self) -> int:
        return usable_cpus(proc=self.proc, cgroup=self.cgroup)


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_groups_the_kernel_decides(machine: FakeMachine) -> None:
    assert machine.memory() == 8 * GIB


def test_the_limit_of_address_space_counts_less_what_is_taken(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (2 * GIB, 2 * GIB))
    machine.write("proc/self/statm", f"{GIB // os.sysconf('SC_PAGE_SIZE')} 1 1 1 0 1 0\n")
    assert machine.memory() == GIB


def test_a_container_limit_at_the_root_counts_with_cached_pages_given_back(machine: FakeMachine) -> None:
    machine.write("cgroup/memory.max", f"{2 * GIB}\n")
    machine.write("cgroup/memory.current", f"{GIB}\n")
    machine.write("cgroup/memory.stat", f"anon 1\ninactive_file {GIB // 2}\n")
    assert machine.memory() == 2 * GIB - GIB // 2


def test_where_a_group_is_slowed_down_is_a_limit_too(machine: FakeMachine) -> None:
    machine.write("cgroup/memory.max", "max\n")
    machine.write("cgroup/memory.high", f"{3 * GIB}\n")
    machine.write("cgroup/memory.current", f"{GIB}\n")
    assert machine.memory() == 2 * GIB


def test_the_tightest_enclosing_group_counts(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "0::/user/session\n")
    machine.write("cgroup/user/session/memory.max", "max\n")
    machine.write("cgroup/user/session/memory.current", "5\n")
    machine.write("cgroup/user/memory.max", f"{3 * GIB}\n")
    machine.write("cgroup/user/memory.current", "0\n")
    assert machine.memory() == 3 * GIB


def test_version_one_groups_count(machine: FakeMachine) -> None:
    machine.write("proc/self/cgroup", "4:memory:/job\n0::/\n")
    machine.write("cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    machine.write("cgroup/memory/memory.usage_in_bytes", "7\n")
    machine.write("cgroup/memory/job/memory.limit_in_bytes", f"{GIB}\n")
    machine.write("cgroup/memory/job/memory.usage_in_bytes", f"{GIB // 4}\n")
    assert machine.memory() == GIB - GIB // 4


def test_a_group_over_its_limit_leaves_nothing(machine: FakeMachine) -> None:
    machine.write("cgroup/memory.max", "5\n")
    machine.write("cgroup/memory.current", "6\n")
    assert machine.memory() == 0


def test_cpu_quotas_round_up_and_never_below_one(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    assert machine.cpus() == 8
    machine.write("cgroup/cpu.max", "250000 100000\n")
    assert machine.cpus() == 3
    machine.write("cgroup/cpu.max", "5000 100000\n")
    assert machine.cpus() == 1
    machine.write("cgroup/cpu.max", "max 100000\n")
    machine.write("cgroup/cpu/cpu.cfs_quota_us", "400000\n")
    machine.write("cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert machine.cpus() == 4
    machine.write("cgroup/cpu/cpu.cfs_quota_us", "-1\n")
    assert machine.cpus() == 8


def test_the_processor_is_named_where_the_kernel_does(machine: FakeMachine) -> None:
    assert cpu_name(proc=machine.proc) == ""
    machine.write("proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_name(proc=machine.proc) == "Some CPU @ 2 GHz"


def test_caches_of_the_own_cpus_count_and_shared_ones_once(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two CPUs, one of which this process may not use."""
    for cpu in range(4):
        machine.write_cache(cpu, 0, "Data", "48K", str(cpu), 1)
        machine.write_cache(cpu, 1, "Instruction", "64K", str(cpu), 1)
        machine.write_cache(cpu, 2, "Unified", "2048K", str(cpu), 2)
        machine.write_cache(cpu, 3, "Unified", "491520K", "0-1" if cpu < 2 else "2-3", 3)
    for cpus, num_sockets in (({0}, 1), ({0, 1}, 1), ({1, 2}, 2), ({0, 1, 3}, 2)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cpus=cpus: cpus)
        assert machine.caches() == 1024 * (len(cpus) * (48 + 2048) + num_sockets * 491520)


def test_caches_that_the_kernel_does_not_tell_hold_nothing(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert machine.caches() == 0
    machine.write("cpu/cpu0/cache/index0/level", "1\n")  # as some ARM machines do, without a size
    machine.write_cache(1, 0, "Data", "32K", "", 1)
    assert machine.caches() == 32 << 10


def test_freed_memory_is_given_back() -> None:
    kept = [bytes([i % 200]) * 4096 for i in range(10_000)][::100]  # holes between what is in use
    before = resident_bytes()
    give_back_free_memory()
    assert resident_bytes() < before - (16 << 20)
    assert kept == [bytes([i % 200]) * 4096 for i in range(0, 10_000, 100)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_this_machine_has_memory_and_a_cpu() -> None:
    assert available_memory_bytes() > 0
    assert usable_cpus() >= 1


LARGE_BLOCKS = """
import ctypes
from penstock.machine import return_large_blocks_when_freed

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

def filled(num_bytes):
    block = libc.malloc(ctypes.c_size_t(num_bytes))
    ctypes.memset(block, 1, num_bytes)
    return block

return_large_blocks_when_freed()
libc.free(filled(30 << 20))  # from which glibc would learn to keep what is as large
before = resident_mib()
for block in [filled(2 << 20) for _ in range(25)]:
    libc.free(block)
print(resident_mib() - before)
"""


def test_large_blocks_go_back_to_the_system_when_they_are_freed():
    done = subprocess.run([sys.executable, "-c", LARGE_BLOCKS], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 10, "of 50 MiB"
