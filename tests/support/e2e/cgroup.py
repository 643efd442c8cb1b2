"""A control group of our own, with limits of memory and CPU, and what the kernel counted in it. Version 2 or 1 of Linux.

Formats: https://docs.kernel.org/admin-guide/cgroup-v2.html and https://docs.kernel.org/admin-guide/cgroup-v1/memory.html.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class ControlGroup:
    """Folders of one group: one of version 2, or one for each controller of version 1."""

    def __init__(self, memory: Path, cpu: Path, limit_bytes: int) -> None:
        self._memory, self._cpu, self.limit_bytes = memory, cpu, limit_bytes
        self._is_v2 = memory == cpu

    @property
    def prefix(self) -> tuple[str, ...]:
        """The words before a command that make its process a member."""
        files = sorted({str(folder / "cgroup.procs") for folder in (self._memory, self._cpu)})
        enter = "".join(f'echo $$ > "{file}" && ' for file in files)
        return ("sh", "-c", enter + 'exec "$@"', "sh")

    @property
    def num_killed(self) -> int:
        """Processes that the kernel has killed for want of memory."""
        name = "memory.events" if self._is_v2 else "memory.oom_control"
        counts = dict(line.split() for line in (self._memory / name).read_text().splitlines())
        return int(counts["oom_kill"])

    @property
    def num_at_limit(self) -> int:
        """Times that an allocation met the limit, and the kernel had to free memory first."""
        if self._is_v2:
            counts = dict(line.split() for line in (self._memory / "memory.events").read_text().splitlines())
            return int(counts["max"])
        return int((self._memory / "memory.failcnt").read_text())

    @property
    def peak_bytes(self) -> int:
        """The most memory that the group had at once, with the cached pages of files."""
        name = "memory.peak" if self._is_v2 else "memory.max_usage_in_bytes"
        return int((self._memory / name).read_text())

    def limit(self, num_cpus: int) -> None:
        """Set the limits of memory, without swap, and of CPU time."""
        quota = f"{num_cpus * PERIOD_US}"
        if self._is_v2:
            (self._memory / "memory.max").write_text(str(self.limit_bytes))
            with suppress(FileNotFoundError):  # a kernel without swap
                (self._memory / "memory.swap.max").write_text("0")
            (self._cpu / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        else:
            (self._memory / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
            with suppress(FileNotFoundError):
                (self._memory / "memory.memsw.limit_in_bytes").write_text(str(self.limit_bytes))
            (self._cpu / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._cpu / "cpu.cfs_quota_us").write_text(quota)


@contextmanager
def control_group(memory_bytes: int, num_cpus: int) -> Iterator[ControlGroup]:
    """Make a group with these limits, without swap. Raises OSError if that fails, or Linux counts no peak (before 5.19)."""
    name = f"penstock-test-{os.getpid()}"
    if (ROOT / "cgroup.controllers").exists():
        (ROOT / "cgroup.subtree_control").write_text("+memory +cpu")
        memory = cpu = ROOT / name
    else:
        memory, cpu = ROOT / "memory" / name, ROOT / "cpu" / name
    folders = sorted({memory, cpu})
    made: list[Path] = []
    try:
        for folder in folders:
            folder.mkdir()
            made.append(folder)
        group = ControlGroup(memory, cpu, memory_bytes)
        group.limit(num_cpus)
        _ = group.peak_bytes
        yield group
    finally:
        for folder in made:
            _remove(folder)


def _remove(folder: Path) -> None:
    """Remove a group whose processes have ended. The kernel may need a moment to forget them."""
    for _ in range(100):
        with suppress(OSError):
            folder.rmdir()
            return
        time.sleep(0.02)
    raise OSError(f"{folder} has processes: {(folder / 'cgroup.procs').read_text().split()}")
