"""Weights that lie in a mapped file."""

from __future__ import annotations

import mmap
import re
from pathlib import Path

import numpy as np

from penstock.models.formats import WeightFormat
from penstock.models.weights import WeightTensor

PAGES = 64


def resident_kb(address: int) -> int:
    """Resident size of the mapping that begins at an address."""
    text = Path("/proc/self/smaps").read_text()
    found = re.search(rf"^{address:x}-.*?^Rss:\s+(\d+) kB", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return int(found[1])


def test_a_forgotten_weight_gives_its_memory_back_and_is_still_there(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    values = np.arange(PAGES * mmap.PAGESIZE // 4, dtype=np.float32)
    path.write_bytes(values.tobytes())
    with path.open("rb") as file:
        whole = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    data = whole[512:].view(np.float32).reshape(1, -1)
    tensor = WeightTensor("w", 1, data.shape[1], WeightFormat.F32, data)
    assert np.array_equal(tensor.data[0], values[128:])
    before = resident_kb(whole.ctypes.data)
    tensor.forget()
    assert before >= PAGES * mmap.PAGESIZE // 1024 > resident_kb(whole.ctypes.data)
    assert np.array_equal(tensor.data[0], values[128:])


def test_a_weight_in_memory_of_our_own_is_not_touched() -> None:
    data = np.arange(1 << 16, dtype=np.float32)[100:].reshape(1, -1)
    tensor = WeightTensor("w", 1, data.shape[1], WeightFormat.F32, data)
    tensor.forget()
    assert data[0, 0] == 100
