"""Helpers that `soak/test_memory.py` shares with other tests."""

from __future__ import annotations

import os
from pathlib import Path


def resident_bytes(pid: int) -> int:
    """Memory that the process has now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
