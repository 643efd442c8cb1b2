"""The share of the machine that this process may use: memory, CPUs and their caches, the cores that compute; read from Linux
for `build`, `penstock env` and the probes of a machine's speed. And how it gives freed memory back; frees nothing in use.

Formats: proc(5); https://docs.kernel.org/admin-guide/cgroup-v2.html (`memory.max`, `memory.high`, `memory.current`,
`memory.stat`, `cpu.max`) and its version 1 counterparts; https://docs.kernel.org/admin-guide/cputopology.html, and
Documentation/ABI of the kernel for `cpu_capacity`, `cpu_atom` and `node`.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/devices")
SLOW_SHARE = 0.75
"""A core with less of the fastest one's speed is an efficiency core: all wait for a task that it has taken."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE_BLOCK_BYTES = 1 << 20
PROGRAM_ADDRESS_BYTES = 768 << 20
"""Address space of a server beside its model and the 256 MiB of reserve: libraries, mapped files, and threads' stacks, of which
two that compile grammars have 128 MiB each. 463 MiB were measured with two CPUs. 500 did not always suffice, as grammars that
are kept and the order in which threads begin change what is mapped; the library of grammars aborts when memory ends."""
CPU_ADDRESS_BYTES = 16 << 20
"""Stacks of the two threads that each CPU gets: one reads weights, the other computes. A stack has 8 MiB as a rule."""


def available_memory_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP, devices: Path = _DEVICES) -> int:
    """Bytes that can be allocated without swapping: the smallest of what the kernel, the process's own limit of address
    space (`ulimit -v`), the memory nodes that it may use, and every enclosing control group allow.
    """
    space = address_space(proc=proc)
    limits: list[int | None] = [_meminfo_available_bytes(proc), _left_on_nodes(proc, devices)]
    limits.append(None if space is None else space.left_bytes)
    limits += [_headroom_v2(folder) for folder in _own_groups(proc, cgroup, "")]
    limits += [_headroom_v1(folder) for folder in _own_groups(proc, cgroup, "memory")]
    return max(0, min(value for value in limits if value is not None))


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The limit of this process's address space (`ulimit -v`), and what the program takes of it beside planned memory."""

    limit_bytes: int
    program_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.program_bytes


def address_space(*, proc: Path = _PROC) -> AddressSpace | None:
    """Return the address space of this process, or None if it has no limit.

    The program takes what is mapped now, or what a server maps once it answers, if that is more.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _read(proc / "self" / "statm").split()
    mapped = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0
    server = PROGRAM_ADDRESS_BYTES + len(os.sched_getaffinity(0)) * CPU_ADDRESS_BYTES
    return AddressSpace(limit, max(mapped, server))


def usable_cpus(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may keep busy: its affinity mask, or less if a control group has a quota. At least 1."""
    num_allowed, quota = len(os.sched_getaffinity(0)), _cpu_quota(proc, cgroup)
    return num_allowed if quota is None else max(1, min(num_allowed, math.ceil(quota)))


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores on which kernels compute unless a number of threads is set, and where they and their memory are."""

    cpus: tuple[int, ...]
    """One CPU of each core, in ascending order."""
    num_threads: int
    """One for each core, or fewer where a quota allows less."""
    why: str
    """The number's reasons in words."""
    nodes: tuple[tuple[int, int], ...]
    """Memory nodes (NUMA) with some of these cores, and how many; one where the machine tells of none."""
    caches: tuple[tuple[int, int], ...]
    """Last-level caches of these cores: their bytes, and how many there are."""
    memory_nodes: tuple[int, ...]
    """Those of the nodes that have memory for this process; empty if there are not several."""


def find_cores(*, proc: Path = _PROC, cgroup: Path = _CGROUP, devices: Path = _DEVICES) -> Cores:
    """The cores that the affinity mask allows, each once however many threads it has, without efficiency cores.

    The second thread of a core shares its multipliers, which one thread of a product keeps busy. A quota is rounded down:
    threads that exceed it are all stopped at once for the rest of the period, and the HTTP loop takes a part of it, too.
    """
    allowed = sorted(os.sched_getaffinity(0))
    firsts = _first_threads(allowed, devices)
    cpus = _fast_cpus(firsts, devices)
    quota = _cpu_quota(proc, cgroup)
    num_threads = len(cpus) if quota is None else max(1, min(len(cpus), math.floor(quota)))
    left_out = [
        (len(allowed) - len(firsts), "share a core with another one"),
        (len(firsts) - len(cpus), "are efficiency cores"),
    ]
    noun = "usable CPU" if len(allowed) == 1 else "usable CPUs"
    why = f"{len(allowed)} {noun}" + "".join(f", {count} of which {what}" for count, what in left_out if count)
    if num_threads < len(cpus):
        why += f", and a quota of {quota:.3g}"
    nodes = _nodes(cpus, devices)
    with_memory = _with_memory(proc, devices)
    memory_nodes = tuple(node for node, _ in nodes if node in with_memory)
    last = {max(found) for cpu in cpus if (found := list(_data_caches(cpu, devices)))}
    caches = tuple(Counter(num_bytes for *_, num_bytes in last).items())
    return Cores(tuple(cpus), num_threads, why, nodes, caches, memory_nodes if len(memory_nodes) > 1 else ())


def claim_cpus(cpus: Sequence[int], *, devices: Path = _DEVICES) -> list[socket.socket]:
    """Keep other servers from pinning threads to the cores of these CPUs, until the sockets are closed or the process ends.

    Raises OSError (EADDRINUSE) if one has done so. Servers in network namespaces of their own do not see each other.
    """
    claims: list[socket.socket] = []
    try:
        for cpu in cpus:
            claims.append(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            core = min(_siblings(cpu, devices), default=cpu)
            claims[-1].bind(f"\0penstock-core-{core}")  # a name of the kernel's: no file stays behind
    except OSError:
        for claim in claims:
            claim.close()
        raise
    return claims


def cpu_name(*, proc: Path = _PROC) -> str:
    """The processor's own name, or an empty string."""
    for line in _read(proc / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def data_cache_bytes(*, devices: Path = _DEVICES) -> int:
    """Bytes that the caches of this process's CPUs hold together, all levels, one that CPUs share counted once; 0 where the
    kernel does not tell.
    """
    return sum(
        num_bytes for *_, num_bytes in {found for cpu in os.sched_getaffinity(0) for found in _data_caches(cpu, devices)}
    )


def give_back_free_memory() -> None:
    """Give freed memory that the C library keeps back to the system; only glibc keeps much, and has a call for it."""
    trim = getattr(_c_library(), "malloc_trim", None)
    if trim is not None:
        trim(0)


def return_large_blocks_when_freed() -> None:
    """Make the C library give blocks from 1 MiB on back to the system at once, in a process that takes what strangers send.

    glibc otherwise learns from the first large block that was freed to keep all up to 32 MiB, in each thread's own arena
    (mallopt(3), M_MMAP_THRESHOLD). `benchmarks/hostile_memory.py` measures what bodies of megabytes leave behind.
    """
    set_option = getattr(_c_library(), "mallopt", None)
    if set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
        set_option(_M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


def share_one_arena() -> None:
    """Make later threads allocate from existing arenas. Otherwise glibc maps 64 MiB of address space for each thread."""
    set_option = getattr(_c_library(), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


@cache
def _c_library() -> ctypes.CDLL:
    """The C library. Each opening makes types that know each other, and are freed late or never."""
    return ctypes.CDLL(None)


def _meminfo_available_bytes(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_on_nodes(proc: Path, devices: Path) -> int | None:
    """Bytes that the nodes have left which this process may use; None if it may use all, as the kernel's figure is of all."""
    allowed = _with_memory(proc, devices)
    if not allowed or allowed == set(_numbers(_read(devices / "system/node/has_memory"))):
        return None
    left = 0
    for node in allowed:
        for line in _read(devices / f"system/node/node{node}/meminfo").splitlines():
            name, _, value = line.partition(":")
            if name.endswith((" MemFree", " Inactive(file)")):
                left += int(value.split()[0]) * 1024
    return left


def _own_groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Folders of the groups that enclose this process, innermost first, the root last; controller "" is version 2."""
    root = cgroup / controller
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        folder = root / path.lstrip("/")
        if controller in controllers.split(",") and ".." not in folder.parts:
            yield from (group for group in (folder, *folder.parents) if group != root and root in group.parents)
    yield root


def _headroom_v2(folder: Path) -> int | None:
    limits = [
        _read(folder / name).strip() for name in ("memory.max", "memory.high")
    ]  # above the second, a group is slowed down
    known = [int(limit) for limit in limits if limit.isdecimal()]
    current = _read(folder / "memory.current").strip()
    if not known or not current.isdecimal():
        return None
    return min(known) - int(current) + _reclaimable_bytes(folder, "inactive_file")


def _headroom_v1(folder: Path) -> int | None:
    limit = _read(folder / "memory.limit_in_bytes").strip()
    current = _read(folder / "memory.usage_in_bytes").strip()
    if not limit.isdecimal() or not current.isdecimal():
        return None
    return int(limit) - int(current) + _reclaimable_bytes(folder, "total_inactive_file")


def _reclaimable_bytes(folder: Path, key: str) -> int:
    """Cached file pages count as used, but the kernel gives them back first."""
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _first_threads(cpus: Sequence[int], devices: Path) -> list[int]:
    """The CPUs, in ascending order, that are the first of their core."""
    firsts: list[int] = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu not in seen:
            firsts.append(cpu)
        seen.update(_siblings(cpu, devices))
    return firsts


def _siblings(cpu: int, devices: Path) -> Iterator[int]:
    """The threads of a CPU's core, itself among them; none where the kernel does not tell."""
    topology = devices / f"system/cpu/cpu{cpu}/topology"
    return _numbers(_read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list"))  # until Linux 5.2


def _fast_cpus(cpus: Sequence[int], devices: Path) -> list[int]:
    """Without efficiency cores: those that Intel's hybrid processors name, else those that are much slower than the fastest."""
    slow = set(_numbers(_read(devices / "cpu_atom/cpus")))
    if fast := [cpu for cpu in cpus if cpu not in slow]:
        cpus = fast
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        speeds = {cpu: _read(devices / f"system/cpu/cpu{cpu}" / name).strip() for cpu in cpus}
        if all(speed.isdecimal() for speed in speeds.values()):
            least = SLOW_SHARE * max(int(speed) for speed in speeds.values())
            return [cpu for cpu in cpus if int(speeds[cpu]) >= least]
    return list(cpus)


def _nodes(cpus: Iterable[int], devices: Path) -> tuple[tuple[int, int], ...]:
    wanted = set(cpus)
    found = []
    for folder in (devices / "system/node").glob("node[0-9]*"):
        if count := len(wanted.intersection(_numbers(_read(folder / "cpulist")))):
            found.append((int(folder.name.removeprefix("node")), count))
    return tuple(sorted(found)) or ((0, len(wanted)),)


def _with_memory(proc: Path, devices: Path) -> set[int]:
    """Nodes that have memory, as far as this process may use it."""
    nodes = set(_numbers(_read(devices / "system/node/has_memory")))
    for line in _read(proc / "self" / "status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            nodes.intersection_update(_numbers(line.partition(":")[2]))
    return nodes


def _data_caches(cpu: int, devices: Path) -> Iterator[tuple[int, str, int]]:
    """The level of each cache of a CPU but those of instructions, the CPUs that share it, and its bytes."""
    for folder in (devices / f"system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
        kind, level, users, size = (_read(folder / name).strip() for name in ("type", "level", "shared_cpu_list", "size"))
        if kind != "Instruction" and level.isdecimal() and size.endswith("K"):
            yield int(level), users or str(cpu), int(size.removesuffix("K")) * 1024


def _numbers(text: str) -> Iterator[int]:
    """Those of a kernel's list, such as `0-3,8`."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last or first) + 1)


def _cpu_quota(proc: Path, cgroup: Path) -> float | None:
    """CPUs that the tightest of the enclosing control groups allows; None: as many as there are."""
    quotas = [_cpu_quota_v2(folder) for folder in _own_groups(proc, cgroup, "")]
    quotas += [_cpu_quota_v1(folder) for folder in _own_groups(proc, cgroup, "cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _cpu_quota_v2(folder: Path) -> float | None:
    quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
    return _ratio(quota, period)


def _cpu_quota_v1(folder: Path) -> float | None:
    return _ratio(_read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip())


def _ratio(quota: str, period: str) -> float | None:
    """None where there is no quota, which the kernel writes as `max` or -1."""
    if not quota.isdecimal() or not period.isdecimal():
        return None
    return int(quota) / int(period)


def _read(path: Path) -> str:
    """A small kernel file's text; empty where the kernel offers no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
