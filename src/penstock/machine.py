"""The share of the machine that this process may use: memory, CPUs and their caches, read from Linux for `build`, `penstock
env` and the probes of a machine's speed; and how it gives freed memory back. Frees nothing that is in use.

Formats: proc(5); https://docs.kernel.org/admin-guide/cgroup-v2.html (`memory.max`, `memory.high`, `memory.current`,
`memory.stat`, `cpu.max`) and its version 1 counterparts; /sys/devices/system/cpu in the kernel's Documentation/ABI.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_CPUS = Path("/sys/devices/system/cpu")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_LARGE_BLOCK_BYTES = 1 << 20


def available_memory_bytes(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """Bytes that can be allocated without swapping: the smallest of what the kernel, the process's own limit of address
    space (`ulimit -v`) and every enclosing control group allow.
    """
    limits: list[int | None] = [_meminfo_available_bytes(proc), _address_space_left(proc)]
    limits += [_headroom_v2(folder) for folder in _own_groups(proc, cgroup, "")]
    limits += [_headroom_v1(folder) for folder in _own_groups(proc, cgroup, "memory")]
    return max(0, min(value for value in limits if value is not None))


def usable_cpus(*, proc: Path = _PROC, cgroup: Path = _CGROUP) -> int:
    """CPUs that this process may keep busy: its affinity mask, or less if a control group has a quota. At least 1."""
    quotas = [_cpu_quota_v2(folder) for folder in _own_groups(proc, cgroup, "")]
    quotas += [_cpu_quota_v1(folder) for folder in _own_groups(proc, cgroup, "cpu")]
    return max(1, min([len(os.sched_getaffinity(0)), *(math.ceil(quota) for quota in quotas if quota is not None)]))


def cpu_name(*, proc: Path = _PROC) -> str:
    """The processor's own name, or an empty string."""
    for line in _read(proc / "cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return ""


def data_cache_bytes(*, cpus: Path = _CPUS) -> int:
    """Bytes that the caches of this process's CPUs hold together, all levels, one that CPUs share counted once; 0 where the
    kernel does not tell.
    """
    sizes: dict[tuple[str, ...], int] = {}
    for cpu in os.sched_getaffinity(0):
        for folder in (cpus / f"cpu{cpu}" / "cache").glob("index*"):
            kind, level, users, size = (_read(folder / name).strip() for name in ("type", "level", "shared_cpu_list", "size"))
            if kind != "Instruction" and size.endswith("K"):
                sizes[kind, level, users or str(cpu)] = int(size.removesuffix("K")) * 1024
    return sum(sizes.values())


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


@cache
def _c_library() -> ctypes.CDLL:
    """The C library. Each opening makes types that know each other, and are freed late or never."""
    return ctypes.CDLL(None)


def _meminfo_available_bytes(proc: Path) -> int:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _address_space_left(proc: Path) -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _read(proc / "self" / "statm").split()
    return limit - int(pages[0]) * os.sysconf("SC_PAGE_SIZE") if pages else limit


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
