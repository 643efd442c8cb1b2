"""Memory and CPUs as the kernel's files tell them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from penstock.machine import (
    CPU_ADDRESS_BYTES,
    PROGRAM_ADDRESS_BYTES,
    Cores,
    CpuMeter,
    CpuTimes,
    address_space,
    available_memory_bytes,
    claim_cpus,
    cpu_identity,
    cpu_name,
    data_cache_bytes,
    find_cores,
    give_back_free_memory,
    is_free_threaded,
    private_bytes,
    settle_on_node,
    usable_cpus,
)

GIB = 1 << 30


class FakeMachine:
    def __init__(self, root: Path) -> None:
        self.proc, self.cgroup, self.devices = root / "proc", root / "cgroup", root / "devices"
        self.write("proc/meminfo", f"MemTotal: {32 * GIB // 1024} kB\nMemAvailable: {8 * GIB // 1024} kB\n")

    def write(self, name: str, text: str) -> None:
        path = self.proc.parent / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def memory(self) -> int:
        return available_memory_bytes(proc=self.proc, cgroup=self.cgroup, devices=self.devices)

    def write_cache(self, cpu: int, index: int, kind: str, size: str, users: str, level: int) -> None:
        told = {"type": kind, "size": size, "shared_cpu_list": users, "level": str(level)}
        for name, text in told.items():
            self.write(f"devices/system/cpu/cpu{cpu}/cache/index{index}/{name}", f"{text}\n")

    def caches(self) -> int:
        return data_cache_bytes(devices=self.devices)

    def cpus(self) -> int:
        return usable_cpus(proc=self.proc, cgroup=self.cgroup)

    def cores(self) -> Cores:
        return find_cores(proc=self.proc, cgroup=self.cgroup, devices=self.devices)

    def add_cpu(self, cpu: int, siblings: str = "", **files: str) -> None:
        """A CPU with its core's threads (its own alone, if none are named), and other files of its folder."""
        self.write(f"devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{siblings or cpu}\n")
        for name, text in files.items():
            self.write(f"devices/system/cpu/cpu{cpu}/{name.replace('__', '/')}", f"{text}\n")

    def allow(self, monkeypatch: pytest.MonkeyPatch, cpus: Iterable[int]) -> None:
        monkeypatch.setattr("os.sched_getaffinity", lambda _: set(cpus))

    def limit_address_space(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        monkeypatch.setattr("resource.getrlimit", lambda _: (num_bytes, num_bytes))


@pytest.fixture
def machine(tmp_path: Path) -> FakeMachine:
    return FakeMachine(tmp_path)


def test_without_groups_the_kernel_decides(machine: FakeMachine) -> None:
    assert machine.memory() == 8 * GIB


def test_the_limit_of_address_space_counts_less_what_is_taken(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.limit_address_space(monkeypatch, 4 * GIB)
    machine.write("proc/self/statm", f"{3 * GIB // os.sysconf('SC_PAGE_SIZE')} 1 1 1 0 1 0\n")
    assert machine.memory() == GIB


def test_a_limit_of_address_space_leaves_what_a_server_will_map(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.limit_address_space(monkeypatch, 32 * GIB)
    machine.write("proc/self/statm", "100 1 1 1 0 1 0\n")
    early = address_space(proc=machine.proc)
    assert early is not None
    assert early.program_bytes == PROGRAM_ADDRESS_BYTES + len(os.sched_getaffinity(0)) * CPU_ADDRESS_BYTES
    machine.write("proc/self/statm", f"{31 * GIB // os.sysconf('SC_PAGE_SIZE')} 1 1 1 0 1 0\n")
    late = address_space(proc=machine.proc)
    assert late is not None
    assert late.left_bytes == GIB


def test_private_memory_is_what_is_resident_and_not_shared(machine: FakeMachine) -> None:
    machine.write("proc/self/statm", "100 30 10 1 0 1 0\n")
    assert private_bytes(proc=machine.proc) == 20 * os.sysconf("SC_PAGE_SIZE")


def test_a_container_limit_at_the_root_counts_with_cached_pages_given_back(machine: FakeMachine) -> None:
    machine.write("cgroup/memory.max", f"{2 * GIB}\n")
    machine.write("cgroup/memory.current", f"{GIB}\n")
    machine.write("cgroup/memory.stat", f"anon 1\ninactive_file {GIB // 2}\nactive_file {GIB // 4}\n")
    assert machine.memory() == 2 * GIB - GIB // 4


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
    stat = f"active_file 1\ntotal_inactive_file {GIB // 16}\ntotal_active_file {GIB // 8}\n"
    machine.write("cgroup/memory/job/memory.stat", stat)
    assert machine.memory() == GIB - GIB // 16


def test_memory_of_nodes_that_this_process_may_not_use_does_not_count(machine: FakeMachine) -> None:
    """A container with a cpuset may use some memory nodes alone. Pages of files there count as free: they are given back."""
    machine.write("devices/system/node/has_memory", "0-1\n")
    for node, free in ((0, 3 * GIB), (1, 5 * GIB)):
        told = {"MemTotal": 16 * GIB, "MemFree": free, "Active(file)": GIB, "Inactive(file)": GIB // 2, "Active": 2 * GIB}
        lines = [f"Node {node} {name}: {size // 1024} kB\n" for name, size in told.items()]
        machine.write(f"devices/system/node/node{node}/meminfo", "".join(lines))
    machine.write("proc/self/status", "Mems_allowed_list:\t0-1\n")
    assert machine.memory() == 8 * GIB, "those of all nodes: the kernel's own figure"
    machine.write("proc/self/status", "Mems_allowed_list:\t0\n")
    assert machine.memory() == 4 * GIB + GIB // 2
    machine.write("proc/self/status", "Mems_allowed_list:\t1\n")
    assert machine.memory() == 6 * GIB + GIB // 2


def test_a_group_over_its_limit_leaves_nothing(machine: FakeMachine) -> None:
    machine.write("cgroup/memory.max", "5\n")
    machine.write("cgroup/memory.current", "6\n")
    assert machine.memory() == 0


def test_cpu_quotas_round_up_and_never_below_one(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.allow(monkeypatch, range(8))
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


def test_a_machine_that_tells_nothing_has_a_core_for_each_cpu(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.allow(monkeypatch, [0, 2, 3])
    assert machine.cores() == Cores((0, 2, 3), 3, "3 usable CPUs", ((0, 3),), (), ())


@pytest.mark.parametrize("file", ["core_cpus_list", "thread_siblings_list"])
def test_a_core_with_two_threads_counts_once(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Also where its first one is not allowed, and where the kernel has the older name."""
    for cpu in range(8):
        machine.write(f"devices/system/cpu/cpu{cpu}/topology/{file}", f"{cpu % 4},{cpu % 4 + 4}\n")
    machine.allow(monkeypatch, range(8))
    assert machine.cores().cpus == (0, 1, 2, 3)
    assert machine.cores().why == "8 usable CPUs, 4 of which share a core with another one"
    machine.allow(monkeypatch, [1, 4, 5, 6])
    assert machine.cores().cpus == (1, 4, 6)


def test_intels_efficiency_cores_are_left_out(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a processor with 2 cores of two threads, and 4 efficiency cores; with these alone they compute."""
    for cpu in range(8):
        machine.add_cpu(cpu, siblings=f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}" if cpu < 4 else "")
    machine.write("devices/cpu_core/cpus", "0-3\n")
    machine.write("devices/cpu_atom/cpus", "4-7\n")
    machine.allow(monkeypatch, range(8))
    assert machine.cores().cpus == (0, 2)
    assert machine.cores().why == "8 usable CPUs, 2 of which share a core with another one, 4 of which are efficiency cores"
    machine.allow(monkeypatch, range(4, 8))
    assert machine.cores().cpus == (4, 5, 6, 7)


@pytest.mark.parametrize("file", ["cpu_capacity", "cpufreq__cpuinfo_max_freq"])
def test_cores_that_are_much_slower_are_left_out(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """Those that are a little slower than the processor's best are not; where one does not tell, all count."""
    for cpu, speed in enumerate(["1024", "870", "1000", "446", "446"]):
        machine.add_cpu(cpu, **{file: speed})
    machine.allow(monkeypatch, range(5))
    assert machine.cores().cpus == (0, 1, 2)
    machine.allow(monkeypatch, [3, 4])
    assert machine.cores().cpus == (3, 4)
    machine.allow(monkeypatch, range(6))
    assert machine.cores().cpus == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize(("quota", "expected"), [("250000", 2), ("199999", 1), ("40000", 1), ("400000", 4), ("900000", 4)])
def test_a_quota_of_any_enclosing_group_is_never_exceeded(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    machine.allow(monkeypatch, range(4))
    machine.write("proc/self/cgroup", "0::/pod/container\n")
    machine.write("cgroup/pod/cpu.max", f"{quota} 100000\n")
    machine.write("cgroup/pod/container/cpu.max", "max 100000\n")
    assert machine.cores().num_threads == expected
    assert machine.cores().cpus == (0, 1, 2, 3), "any of them"
    assert machine.cores().why.endswith(f", and a quota of {int(quota) / 100000:.3g}") == (expected < 4)
    machine.write("proc/self/cgroup", "4:cpu,cpuacct:/job\n")
    machine.write("cgroup/cpu/job/cpu.cfs_quota_us", f"{quota}\n")
    machine.write("cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    assert machine.cores().num_threads == expected


def add_nodes(machine: FakeMachine) -> None:
    """Two sockets of eight cores, each with two last-level caches, and a node that has memory alone."""
    for cpu in range(16):
        first = cpu // 4 * 4
        machine.write_cache(cpu, 0, "Data", "48K", str(cpu), 1)
        machine.write_cache(cpu, 3, "Unified", "32768K", f"{first}-{first + 3}", 3)
    for node, cpus in enumerate(["0-7", "8-15", ""]):
        machine.write(f"devices/system/node/node{node}/cpulist", f"{cpus}\n")
    machine.write("devices/system/node/has_memory", "0-2\n")
    machine.write("proc/self/status", "Name:\tx\nMems_allowed_list:\t0-2\n")


def test_memory_lies_on_the_nodes_of_the_cores(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nodes(machine)
    machine.allow(monkeypatch, range(16))
    cores = machine.cores()
    assert (cores.nodes, cores.caches, cores.memory_nodes) == (((0, 8), (1, 8)), ((32 << 20, 4),), (0, 1))
    machine.allow(monkeypatch, range(6))
    cores = machine.cores()
    assert (cores.nodes, cores.caches, cores.memory_nodes) == (((0, 6),), ((32 << 20, 2),), ()), "one node needs nothing"


@pytest.mark.parametrize(("with_memory", "allowed"), [("0", "0-2"), ("0-2", "1"), ("", "0-2")])
def test_memory_that_is_not_allowed_on_several_nodes_is_not_spread(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch, with_memory: str, allowed: str
) -> None:
    add_nodes(machine)
    machine.allow(monkeypatch, range(16))
    machine.write("devices/system/node/has_memory", f"{with_memory}\n")
    machine.write("proc/self/status", f"Mems_allowed_list:\t{allowed}\n")
    assert machine.cores().memory_nodes == ()


def test_processes_settle_on_the_nodes_in_turn(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores come with their siblings. Once all nodes are full, they are filled again, as in an update."""
    first = 1000 * os.getpid()  # claims are seen by all processes of the machine
    nodes = {first: range(8), first + 1: range(8, 12)}
    for node, cpus in nodes.items():
        for cpu in cpus:
            machine.add_cpu(cpu, siblings=f"{cpu - cpu % 2}-{cpu - cpu % 2 + 1}")
        machine.write(f"devices/system/node/node{node}/cpulist", f"{cpus[0]}-{cpus[-1]}\n")
    affinities: list[set[int]] = []
    machine.allow(monkeypatch, range(11))  # without the sibling of the last core
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: affinities.append(cpus))
    assert settle_on_node(5, devices=machine.devices) is None, "no node has so many cores"
    found = [settle_on_node(2, devices=machine.devices) for _ in range(7)]
    assert found[6] is None
    seats = [seat for seat in found if seat is not None]
    assert [node - first for node, _ in seats] == [0, 1, 0, 0, 1, 0]
    assert affinities[:3] == [set(range(8)), {8, 9, 10}, set(range(8))]
    seats[1][1].close()
    again = settle_on_node(2, devices=machine.devices)
    assert again is not None
    assert again[0] == first + 1
    for _, claim in (*seats, again):
        claim.close()


def test_a_node_without_a_process_is_taken_first(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after an update, whose first process came while the old ones were there."""
    first = 1000 * os.getpid() + 500
    for idx in range(2):
        machine.add_cpu(idx)
        machine.write(f"devices/system/node/node{first + idx}/cpulist", f"{idx}\n")
    machine.allow(monkeypatch, range(2))
    monkeypatch.setattr("os.sched_setaffinity", lambda _, cpus: None)
    seats = []
    for _ in range(3):
        seat = settle_on_node(1, devices=machine.devices)
        assert seat is not None
        seats.append(seat)
    assert [node - first for node, _ in seats] == [0, 1, 0]
    for _, claim in seats[:2]:  # the old ones leave
        claim.close()
    later = settle_on_node(1, devices=machine.devices)
    assert later is not None
    assert later[0] == first + 1
    for _, claim in (seats[2], later):
        claim.close()


def test_nothing_settles_where_there_is_one_node(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    add_nodes(machine)
    machine.allow(monkeypatch, range(6))
    monkeypatch.setattr("os.sched_setaffinity", None)
    assert settle_on_node(1, devices=machine.devices) is None


def test_cpus_are_claimed_by_one_server() -> None:
    """All or none of them; numbers that no machine of a test has."""
    first = claim_cpus([70001, 70002])
    with pytest.raises(OSError, match="in use"):
        claim_cpus([70003, 70002])
    for claim in [*claim_cpus([70003]), *first]:
        claim.close()
    for claim in claim_cpus([70002]):
        claim.close()


def test_a_core_is_claimed_whichever_of_its_threads_is_named(machine: FakeMachine) -> None:
    machine.add_cpu(70004, siblings="70004,70008")
    machine.add_cpu(70008, siblings="70004,70008")
    machine.add_cpu(70005, siblings="70005,70009")
    first = claim_cpus([70008], devices=machine.devices)
    with pytest.raises(OSError, match="in use"):
        claim_cpus([70005, 70004], devices=machine.devices)
    for claim in [*first, *claim_cpus([70005], devices=machine.devices)]:
        claim.close()


def test_the_processor_is_named_where_the_kernel_does(machine: FakeMachine) -> None:
    assert cpu_name(proc=machine.proc) == ""
    machine.write("proc/cpuinfo", "processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert cpu_name(proc=machine.proc) == "Some CPU @ 2 GHz"


NUMBERS = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd asimddp i8mm bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: {part}
CPU revision\t: {revision}
"""


def test_arm_processors_are_told_apart_by_numbers(machine: FakeMachine) -> None:
    """There is no model name; two revisions of a core are two processors for the self-test."""
    identities = set()
    for part, revision, name in (
        ("0xd4f", 0, "Arm Neoverse V2"),
        ("0xd4f", 1, "Arm Neoverse V2"),
        ("0xfff", 0, "Arm core 0xfff of implementer 0x41"),
    ):
        machine.write("proc/cpuinfo", NUMBERS.format(part=part, revision=revision))
        assert cpu_name(proc=machine.proc) == name
        identities.add(cpu_identity(proc=machine.proc))
    assert len(identities) == 3


def test_caches_of_the_own_cpus_count_and_shared_ones_once(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sockets of two CPUs, one of which this process may not use."""
    for cpu in range(4):
        machine.write_cache(cpu, 0, "Data", "48K", str(cpu), 1)
        machine.write_cache(cpu, 1, "Instruction", "64K", str(cpu), 1)
        machine.write_cache(cpu, 2, "Unified", "2048K", str(cpu), 2)
        machine.write_cache(cpu, 3, "Unified", "491520K", "0-1" if cpu < 2 else "2-3", 3)
    for cpus, num_sockets in (({0}, 1), ({0, 1}, 1), ({1, 2}, 2), ({0, 1, 3}, 2)):
        machine.allow(monkeypatch, cpus)
        assert machine.caches() == 1024 * (len(cpus) * (48 + 2048) + num_sockets * 491520)


def test_caches_that_the_kernel_does_not_tell_hold_nothing(machine: FakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.allow(monkeypatch, [0, 1])
    assert machine.caches() == 0
    machine.write("devices/system/cpu/cpu0/cache/index0/level", "1\n")  # as some ARM machines do, without a size
    machine.write_cache(1, 0, "Data", "32K", "", 1)
    assert machine.caches() == 32 << 10


@pytest.mark.skipif(is_free_threaded(), reason="a free-threaded Python's objects are not in glibc's memory")
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
    assert 1 <= find_cores().num_threads <= len(find_cores().cpus)


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


def test_threads_that_wait_for_a_cpu(tmp_path: Path) -> None:
    machine = FakeMachine(tmp_path)
    meter = CpuMeter(proc=machine.proc)
    assert meter.read() is None
    machine.write("proc/self/task/7/schedstat", "100 2000 3\n")
    machine.write("proc/self/task/8/schedstat", "100 30 3\n")
    machine.write("proc/self/task/9/schedstat", "")
    assert meter.read() == CpuTimes(200, 2030, 0)


def test_what_others_had_of_the_own_cpus_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also other machines of the same host (steal), and never less than before."""
    machine, tick_ns = FakeMachine(tmp_path), 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 3})
    machine.write("proc/self/task/7/schedstat", f"{100 * tick_ns} 5 3\n")
    own = "cpu1 200 1 10 999 999 2 3 40 7 7\ncpu3 50 0 0 999 999 0 0 0 0 0\n"
    machine.write("proc/stat", f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 9 9 9 9 9 9 9 9 9 9\n{own}intr 1\n")
    meter = CpuMeter(proc=machine.proc)
    assert meter.read() == CpuTimes(100 * tick_ns, 5, 206 * tick_ns)
    machine.write("proc/self/task/7/schedstat", f"{101 * tick_ns} 5 3\n")
    assert meter.read() == CpuTimes(101 * tick_ns, 5, 206 * tick_ns)


def test_times_of_threads_that_have_ended_are_kept(tmp_path: Path) -> None:
    """They are counters, and Prometheus takes a counter that falls for one that began again."""
    machine = FakeMachine(tmp_path)
    meter = CpuMeter(proc=machine.proc)
    machine.write("proc/self/task/7/schedstat", "100 2000 3\n")
    machine.write("proc/self/task/8/schedstat", "100 30 3\n")
    assert meter.read() == CpuTimes(200, 2030, 0)
    (machine.proc / "self/task/7/schedstat").unlink()
    machine.write("proc/self/task/8/schedstat", "7 5 1\n")  # a new thread with the number of another one
    assert meter.read() == CpuTimes(207, 2035, 0)
    assert meter.read() == CpuTimes(207, 2035, 0)
