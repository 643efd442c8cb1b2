"""A streamed chat request enters few files, and the guide through them in docs/architecture.md is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_ENTERED, MAX_READ = 58, 20
NOT_TRACED = {"backends/native/executor.py", "native/engine.cpp"}
"""The trace has a fake executor in their place."""


@pytest.fixture(scope="module")
def way() -> str:
    """The trace as printed. In a process of its own: threads of other tests would be in it."""
    script = ROOT / "tests" / "server" / "trace_request.py"
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=120).stdout


def test_a_chat_request_enters_few_files(way: str) -> None:
    num_files = int(re.search(r"^(\d+) files, ", way, re.MULTILINE)[1])  # type: ignore[index]
    assert 30 < num_files <= MAX_ENTERED, way


def test_the_files_to_read_are_on_the_way(way: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page[page.index("## 1. The way of a chat request") : page.index("## 2. ")]
    to_read = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    assert 15 <= len(to_read) <= MAX_READ
    entered = set(re.findall(r"^ *\d+ (\S+) ", way, re.MULTILINE))
    assert [file for file in to_read if file not in entered | NOT_TRACED] == []
    assert all((ROOT / "src" / "penstock" / file).is_file() or (ROOT / file).is_file() for file in to_read)
