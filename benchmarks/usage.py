"""Memory, CPU time, files and metrics of programs, seen from outside, on Linux. For comparing servers; starts nothing."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

MB = 1e6


class ProcessGroup:
    """A contender that runs, and what its processes use."""

    def __init__(self, process: subprocess.Popen[bytes], start_s: float) -> None:
        self.process = process
        self.ready_s = time.perf_counter() - start_s

    def resident_mb(self) -> float:
        """Resident memory of all its processes now; a page that n of them share counts 1/n for each."""
        return sum(_pss_bytes(pid) for pid in family(self.process.pid)) / MB


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                children.setdefault(int(fields[1]), []).append(int(folder.name))
    found = [pid]
    for member in found:
        found += children.get(member, [])
    return found


class OtherLoad:
    """CPU time of processes other than this one and its descendants, from now on."""

    def __init__(self) -> None:
        self._begin_s, self._begin = time.perf_counter(), self._others_s()

    def share(self) -> float:
        """The share of all processors until now; time that the host takes from this machine is part of it."""
        seconds = (time.perf_counter() - self._begin_s) * (os.cpu_count() or 1)
        return max(0.0, (self._others_s() - self._begin) / seconds)

    @staticmethod
    def _others_s() -> float:
        user, nice, system, _idle, _waiting, interrupts, soft, stolen = map(int, Path("/proc/stat").read_text().split()[1:9])
        ours = sum(cpu_ticks(pid) for pid in family(os.getpid()))
        return (user + nice + system + interrupts + soft + stolen - ours) / os.sysconf("SC_CLK_TCK")


def cpu_ticks(pid: int) -> int:
    """CPU time of a process and of its children that have ended."""
    with suppress(OSError):
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return 0


def cpu_s(pid: int) -> float:
    """CPU time of a process and of its children that have ended, to about 10 ms."""
    return cpu_ticks(pid) / os.sysconf("SC_CLK_TCK")


def threads_cpu_s(pid: int) -> float:
    """CPU time of all threads that live, to the nanosecond."""
    total_ns = 0
    for file in Path(f"/proc/{pid}/task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended meanwhile
            total_ns += int(file.read_text().split()[0])
    return total_ns / 1e9


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def metric(url: str, name: str) -> float:
    """Sum of a metric's samples."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def size_bytes(path: Path) -> int:
    """Size of a file, or of the files below a folder, byte code left out."""
    if path.is_file():
        return 0 if path.is_symlink() else path.stat().st_size
    return sum(size_bytes(child) for child in path.iterdir() if child.name != "__pycache__") if path.is_dir() else 0
