"""A streamed chat request enters few files, and the guide through them in docs/architecture.md is right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_ENTERED = {"chat": 67, "schema": 71}
MAX_READ = 25
NOT_TRACED = {"backends/native/executor.py", "native/engine.cpp"}
"""The trace has a fake executor in their place."""


@pytest.fixture(scope="module")
def ways() -> dict[str, str]:
    """The traces as printed, by the name of the body. In a process of their own: threads of other tests would be in them."""
    command = [sys.executable, ROOT / "tests" / "server" / "trace_request.py", *MAX_ENTERED]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    return dict(zip(MAX_ENTERED, printed.split("\n\n"), strict=True))


@pytest.fixture(scope="module")
def section() -> str:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return page[page.index("## 1. The way of a chat request") : page.index("## 2. ")]


def entered(way: str) -> list[str]:
    return re.findall(r"^ *\d+ (\S+\.py) ", way, re.MULTILINE)


@pytest.mark.parametrize("name", MAX_ENTERED)
def test_a_chat_request_enters_few_files(name: str, ways: dict[str, str], section: str) -> None:
    assert 30 < len(entered(ways[name])) <= MAX_ENTERED[name], ways[name]
    assert re.search(rf"\b{MAX_ENTERED[name]}\b", section), "the page tells another number"


def test_the_files_to_read_are_on_the_way(ways: dict[str, str], section: str) -> None:
    to_read = re.findall(r"^\| `(\S+)` \|", section, re.MULTILINE)
    assert 15 <= len(to_read) <= MAX_READ
    on_the_way = NOT_TRACED.union(*map(entered, ways.values()))
    assert [file for file in to_read if file not in on_the_way] == []
    assert all((ROOT / "src" / "penstock" / file).is_file() or (ROOT / file).is_file() for file in to_read)
