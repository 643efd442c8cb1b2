"""Reads from Linux which memory, CPUs and caches this process may use, and returns freed memory to the system.

Formats: proc(5); https://docs.kernel.org/admin-guide/cgroup-v2.html (`memory.max`, `memory.high`, `memory.current`,
`memory.stat`, `cpu.max`) and its version 1 counterparts; https://docs.kernel.org/admin-guide/cputopology.html, and
Documentation/ABI of the kernel for `cpu_capacity`, `cpu_atom` and `node`.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import socket
import sys
import sysconfig
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from types import FrameType

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_DEVICES = Path("/sys/devices")
SLOW_SHARE = 0.75
"""A core below this share of the fastest core's speed is an efficiency core. It would make all other cores wait."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # glibc's malloc.h
_LARGE_BLOCK_BYTES = 1 << 20


def is_free_threaded() -> bool:
    """Return whether this Python can run without its GIL."""
    return bool(sysconfig.get_config_var("Py_GIL_DISABLED"))


def has_gil() -> bool:
    """Return whether the GIL is on now. In a free-threaded Python a package can turn it on when it is imported."""
    return bool(getattr(sys, "_is_gil_enabled", lambda: True)())


def has_terminal() -> bool:
    """Return whether the process belongs to a terminal, and so gets a SIGHUP when that is closed (tty(4), ENXIO)."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


def exit_at_signal(number: int, frame: FrameType | None) -> None:
    """Handle a signal like its default action, which the kernel does not take in the first process of a container."""
    del frame
    os._exit(128 + number)


PROGRAM_ADDRESS_BYTES = (768 << 20) + is_free_threaded() * (1 << 30)
"""Address space of a server without model and reserve: libraries, mapped files, stacks (128 MiB for each of two threads that
compile grammars). 463 MiB were measured with two CPUs. With 500, the grammar library aborted at times. A free-threaded Python
reserves 1 GiB for its objects at its start."""
CPU_ADDRESS_BYTES = (16 << 20) + is_free_threaded() * (32 << 20)
"""Stacks of two threads for each CPU: one reads weights, the other computes. A free-threaded Python takes 32 MiB at a time for
each thread's objects."""


_X86_IDENTITY = ("vendor_id", "cpu family", "model", "model name", "stepping", "microcode", "flags")
_ARM_IDENTITY = ("CPU implementer", "CPU architecture", "CPU variant", "CPU part", "CPU revision", "Features")
_ARM_CORES = {
    ("0x41", "0xd08"): "Arm Cortex-A72",
    ("0x41", "0xd0b"): "Arm Cortex-A76",
    ("0x41", "0xd0c"): "Arm Neoverse N1",
    ("0x41", "0xd40"): "Arm Neoverse V1",
    ("0x41", "0xd49"): "Arm Neoverse N2",
    ("0x41", "0xd4f"): "Arm Neoverse V2",
    ("0x41", "0xd83"): "Arm Neoverse V3AE",
    ("0x41", "0xd84"): "Arm Neoverse V3",
    ("0x41", "0xd8e"): "Arm Neoverse N3",
    ("0x6d", "0xd49"): "Microsoft Azure Cobalt 100",
    ("0xc0", "0xac3"): "Ampere-1",
    ("0xc0", "0xac4"): "Ampere-1a",
}
"""Implementer and part (Linux: arch/arm64/include/asm/cputype.h) -> name."""


def available_memory_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP, devices: Path = _DEVICES) -> int:
    """Return the bytes that can be allocated without swapping.

    This is the least of the kernel's free memory, `ulimit -v`, the usable NUMA nodes and the enclosing control groups.
    """
    space = address_space(proc=proc)
    limits: list[int | None] = [_meminfo_available_bytes(proc), _left_on_nodes(proc, devices)]
    limits.append(None if space is None else space.left_bytes)
    for folder in _own_groups(proc, cgroup, ""):  # a group above memory.high is slowed down
        limits.append(_headroom(folder, ("memory.max", "memory.high"), "memory.current", ""))
    for folder in _own_groups(proc, cgroup, "memory"):
        limits.append(_headroom(folder, ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_"))
    return max(0, min(value for value in limits if value is not None))


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The limit of this process's address space (`ulimit -v`), and the bytes that it needs besides the model."""

    limit_bytes: int
    program_bytes: int

    @property
    def left_bytes(self) -> int:
        return self.limit_bytes - self.program_bytes


def address_space(*, proc: Path = _PROC) -> AddressSpace | None:
    """Return the limit and use of this process's address space, or None without a limit.

    Use is the larger of the bytes mapped now and a running server's usual bytes.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _read(proc / "self" / "statm").split()
    mapped = int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else 0
    server = PROGRAM_ADDRESS_BYTES + len(os.sched_getaffinity(0)) * CPU_ADDRESS_BYTES
    return AddressSpace(limit, max(mapped, server))


def private_bytes(*, proc: Path = _PROC) -> int:
    """Return the memory of this process that is neither a file's nor shared."""
    pages = _read(proc / "self" / "statm").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE") if pages else 0


def usable_cpus(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Return how many CPUs this process may keep busy, by its affinity mask and the quotas of control groups. At least 1."""
    num_allowed, quota = len(os.sched_getaffinity(0)), _cpu_quota(proc, cgroup)
    return num_allowed if quota is None else max(1, min(num_allowed, math.ceil(quota)))


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores that kernels use by default, with their caches and memory."""

    cpus: tuple[int, ...]
    """One CPU of each core, in ascending order."""
    num_threads: int
    """One for each core, or fewer if a quota allows less."""
    why: str
    """Explains `num_threads`, for the log."""
    nodes: tuple[tuple[int, int], ...]
    """Memory nodes (NUMA) of these cores, each with its number of cores."""
    caches: tuple[tuple[int, int], ...]
    """Sizes of these cores' last-level caches in bytes, each with the number of caches."""
    memory_nodes: tuple[int, ...]
    """Nodes with memory for this process. Empty unless there are several."""


def find_cores(*, proc: Path = _PROC, cgroup: Path = _CGROUP, devices: Path = _DEVICES) -> Cores:
    """Return the cores that the affinity mask allows, without efficiency cores.

    Each core gets one thread, which keeps its multipliers busy. A CPU quota is rounded down, because exceeding it stops all
    threads for the rest of the period, and the HTTP loop needs a part, too.
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

    Raises OSError (EADDRINUSE) if another server has pinned them. Can't see servers in other network namespaces.
    """
    claims: list[socket.socket] = []
    try:
        for cpu in cpus:
            claims.append(_claim(f"core-{min(_siblings(cpu, devices), default=cpu)}"))
    except OSError:
        for claim in claims:
            claim.close()
        raise
    return claims


def settle_on_node(num_threads: int, *, devices: Path = _DEVICES) -> tuple[int, socket.socket] | None:
    """Bind this thread, and the threads that it starts later, to the cores of one memory node (NUMA).

    Memory that they allocate then lies on that node. Processes with equally many threads take the nodes in turn. Return the
    node, and a socket that claims a place on it until it is closed or the process ends. Return None, and change nothing, if the
    machine has one node, or no node has `num_threads` cores. Can't see claims in other network namespaces.
    """
    allowed = os.sched_getaffinity(0)
    cores = set(_fast_cpus(_first_threads(sorted(allowed), devices), devices))
    nodes = {node: allowed.intersection(cpus) for node, cpus in _cpus_of_nodes(devices) if cores.intersection(cpus)}
    if len(nodes) < 2:
        return None
    num_places = {node: len(cores & cpus) // num_threads for node, cpus in nodes.items()}
    order = product(range(max(num_places.values())), sorted(nodes))
    places = [(node, place) for place, node in order if place < num_places[node]]
    # Two processes can share a place, because old and new ones run side by side for a while. Prefer an empty place.
    for is_empty in (True, False):
        for node, place in places:
            claims: list[socket.socket] = []
            for turn in range(2):
                with contextlib.suppress(OSError):  # another process has it
                    claims.append(_claim(f"node-{node}-{place}-{turn}"))
            if len(claims) > is_empty:
                for unused in claims[1:]:
                    unused.close()
                os.sched_setaffinity(0, nodes[node])
                return node, claims[0]
            for unused in claims:
                unused.close()
    return None


def _claim(name: str) -> socket.socket:
    """Return a socket that holds a name among all processes. Raises OSError (EADDRINUSE) if another process has it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0penstock-{name}")  # an abstract name: no file stays behind
    except OSError:
        claim.close()
        raise
    return claim


def cpu_name(*, proc: Path = _PROC) -> str:
    """Return the processor's name, or an empty string. On Arm, Linux gives numbers instead, which `_ARM_CORES` names."""
    values = _values(proc / "cpuinfo")
    if name := values.get("model name"):
        return name
    maker, part = values.get("CPU implementer", ""), values.get("CPU part", "")
    return _ARM_CORES.get((maker, part), f"Arm core {part} of implementer {maker}") if maker else ""


def cpu_identity(*, proc: Path = _PROC) -> str:
    """Return vendor, model, stepping, microcode and features as a string, which differs between processors. May be empty."""
    values = _values(proc / "cpuinfo")
    return " ".join(values.get(name, "") for name in (*_X86_IDENTITY, *_ARM_IDENTITY))


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Total time in which this process's threads ran, in which they were runnable but waited for a CPU, and in which other
    processes or virtual machines used its CPUs."""

    run_ns: int
    wait_ns: int
    other_ns: int


class CpuMeter:
    """Sums the times of all threads. A thread that has ended keeps the times of the last reading, so that sums never fall."""

    def __init__(self, *, proc: Path = _PROC) -> None:
        self._tasks, self._stat = proc / "self/task", proc / "stat"
        self._lock = threading.Lock()
        self._living: dict[str, tuple[int, int]] = {}
        self._ended = (0, 0)
        self._others_ns = 0

    def read(self) -> CpuTimes | None:
        """Return the times so far, or None if Linux does not say. Thread-safe."""
        with self._lock:
            before, parts = self._living, {task.name: _read(task / "schedstat").split() for task in self._tasks.glob("*")}
            self._living = {name: (int(part[0]), int(part[1])) for name, part in parts.items() if len(part) > 1}
            # If a thread's times are lower than before, its id belongs to a new thread.
            ended = [times for name, times in before.items() if self._living.get(name, (-1, -1)) < times]
            self._ended = _sum([self._ended, *ended])
            if not self._living:
                return None
            run_ns, wait_ns = _sum([self._ended, *self._living.values()])
            self._others_ns = max(self._others_ns, self._busy_ns() - run_ns)
            return CpuTimes(run_ns, wait_ns, self._others_ns)

    def _busy_ns(self) -> int:
        """Return the total busy time, since boot, of the CPUs that this process may use."""
        mine = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
        lines = [line.split() for line in _read(self._stat).splitlines() if line.startswith("cpu")]
        # user, nice, system, idle, iowait, irq, softirq, steal (proc_stat(5)); guests count as user
        ticks = sum(sum(map(int, line[1:4])) + sum(map(int, line[6:9])) for line in lines if line[0] in mine)
        return ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def _sum(times: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return sum(run for run, _ in times), sum(wait for _, wait in times)


def data_cache_bytes(*, devices: Path = _DEVICES) -> int:
    """Return the bytes of all data caches of this process's CPUs, shared ones counted once; 0 if unknown."""
    return sum(
        num_bytes for *_, num_bytes in {found for cpu in os.sched_getaffinity(0) for found in _data_caches(cpu, devices)}
    )


def give_back_free_memory() -> None:
    """Make glibc return freed memory to the system."""
    _call_glibc("malloc_trim", 0)


def return_large_blocks_when_freed() -> None:
    """Make glibc return blocks of 1 MiB and more to the system when they are freed.

    Otherwise the first large block makes glibc keep all freed blocks up to 32 MiB, in each thread's arena (mallopt(3),
    M_MMAP_THRESHOLD). `benchmarks/hostile_memory.py` measures what large requests leave behind.
    """
    _call_glibc("mallopt", _M_MMAP_THRESHOLD, _LARGE_BLOCK_BYTES)
    _call_glibc("mallopt", _M_TRIM_THRESHOLD, _LARGE_BLOCK_BYTES)


def share_one_arena() -> None:
    """Make later threads share one malloc arena. Otherwise glibc maps 64 MiB of address space for each thread."""
    _call_glibc("mallopt", _M_ARENA_MAX, 1)


def _call_glibc(name: str, *numbers: int) -> None:
    function = getattr(_c_library(), name, None)
    if function is not None:
        function(*numbers)


@cache
def _c_library() -> ctypes.CDLL:
    """Open the C library once. Each opening makes types that are freed late or never."""
    return ctypes.CDLL(None)


def _meminfo_available_bytes(proc: Path) -> int:
    if (available := _values(proc / "meminfo").get("MemAvailable")) is not None:
        return _bytes(available)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _left_on_nodes(proc: Path, devices: Path) -> int | None:
    """Return the free bytes on the NUMA nodes that this process may use, or None if it may use all nodes."""
    allowed = _with_memory(proc, devices)
    if not allowed or allowed == set(_numbers(_read(devices / "system/node/has_memory"))):
        return None
    found = [item for node in allowed for item in _values(devices / f"system/node/node{node}/meminfo").items()]
    return sum(_bytes(value) for name, value in found if name.endswith((" MemFree", " Active(file)", " Inactive(file)")))


def _own_groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's control group and its parents. Controller "" is cgroup version 2."""
    root = cgroup / controller
    for line in _read(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        folder = root / path.lstrip("/")
        if controller in controllers.split(",") and ".." not in folder.parts:
            yield from (group for group in (folder, *folder.parents) if group != root and root in group.parents)
    yield root


def _headroom(folder: Path, limits: Sequence[str], usage: str, prefix: str) -> int | None:
    """Return the bytes that a control group has left, or None without a limit.

    `limits` and `usage` are file names, `prefix` that of counts in `memory.stat` that include the groups below.
    """
    known = [int(limit) for name in limits if (limit := _read(folder / name).strip()).isdecimal()]
    current = _read(folder / usage).strip()
    if not known or not current.isdecimal():
        return None
    # Cached file pages count as used, but are freed first. Pages that were read twice are active, as after a reload.
    counts = _values(folder / "memory.stat", " ")
    return min(known) - int(current) + sum(int(counts.get(f"{prefix}{name}_file", 0)) for name in ("active", "inactive"))


def _first_threads(cpus: Sequence[int], devices: Path) -> list[int]:
    firsts: list[int] = []
    seen: set[int] = set()
    for cpu in cpus:
        if cpu not in seen:
            firsts.append(cpu)
        seen.update(_siblings(cpu, devices))
    return firsts


def _siblings(cpu: int, devices: Path) -> Iterator[int]:
    topology = devices / f"system/cpu/cpu{cpu}/topology"
    return _numbers(_read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list"))  # until Linux 5.2


def _fast_cpus(cpus: Sequence[int], devices: Path) -> list[int]:
    """Leave out efficiency cores: Intel's `cpu_atom` CPUs, and those below `SLOW_SHARE` of the fastest one's speed."""
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
    found = [(node, count) for node, local in _cpus_of_nodes(devices) if (count := len(wanted.intersection(local)))]
    return tuple(sorted(found)) or ((0, len(wanted)),)


def _cpus_of_nodes(devices: Path) -> Iterator[tuple[int, set[int]]]:
    for folder in (devices / "system/node").glob("node[0-9]*"):
        yield int(folder.name.removeprefix("node")), set(_numbers(_read(folder / "cpulist")))


def _with_memory(proc: Path, devices: Path) -> set[int]:
    nodes = set(_numbers(_read(devices / "system/node/has_memory")))
    allowed = _values(proc / "self" / "status").get("Mems_allowed_list")
    return nodes if allowed is None else nodes.intersection(_numbers(allowed))


def _data_caches(cpu: int, devices: Path) -> Iterator[tuple[int, str, int]]:
    """Yield (level, CPUs that share it, bytes) of each data or unified cache of a CPU."""
    for folder in (devices / f"system/cpu/cpu{cpu}/cache").glob("index[0-9]*"):
        kind, level, users, size = (_read(folder / name).strip() for name in ("type", "level", "shared_cpu_list", "size"))
        if kind != "Instruction" and level.isdecimal() and size.endswith("K"):
            yield int(level), users or str(cpu), int(size.removesuffix("K")) * 1024


def _numbers(text: str) -> Iterator[int]:
    """Yield the numbers of a kernel's list: 0, 1, 2 and 8 for `0-2,8`."""
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            yield from range(int(first), int(last or first) + 1)


def _cpu_quota(proc: Path, cgroup: Path) -> float | None:
    pairs = [_read(folder / "cpu.max").split() for folder in _own_groups(proc, cgroup, "")]
    for folder in _own_groups(proc, cgroup, "cpu"):
        pairs.append([_read(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")])
    # Without a quota, the kernel writes `max` or -1.
    known = [pair for pair in pairs if len(pair) == 2 and all(number.isdecimal() for number in pair)]
    return min((int(quota) / int(period) for quota, period in known), default=None)


def _values(path: Path, separator: str = ":") -> dict[str, str]:
    """Return values by name from lines such as `MemFree: 1024 kB`."""
    lines = (line.partition(separator) for line in _read(path).splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _bytes(kibibytes: str) -> int:
    """Return the bytes of a size such as `1024 kB`."""
    return int(kibibytes.split()[0]) * 1024


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
