"""The documentation names benchmarks that there are, and those that make the figures of docs/performance.md are short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_LINES = 150
NAMED = re.compile(r"benchmarks/([\w/]+\.(?:py|sh))(?![^`]*` of commit)")
"""But for the program of an earlier commit: `python benchmarks/old.py` of commit 0123abc."""
PAGES = [ROOT / "README.md", *(path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "notes")]
"""Notes are history: some of their programs are."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_benchmark_that_is_named_is_there(page):
    for name in NAMED.findall(page.read_text(encoding="utf-8")):
        assert (ROOT / "benchmarks" / name).is_file(), f"{page.name} names benchmarks/{name}"


def test_a_benchmark_that_makes_a_figure_is_a_page():
    named = set(NAMED.findall((ROOT / "docs" / "performance.md").read_text(encoding="utf-8")))
    assert {"peers.py", "step.py", "kernels.py", "startup.py"} <= named
    lengths = {name: len((ROOT / "benchmarks" / name).read_text(encoding="utf-8").splitlines()) for name in named}
    assert {name: length for name, length in lengths.items() if length > MAX_LINES} == {}


def test_what_all_runs_is_there_and_on_the_page():
    page = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    scripts = re.findall(r"^ *(?:if .*; then )?run \S+ (\S+\.py)", (ROOT / "benchmarks" / "all.sh").read_text(), re.MULTILINE)
    assert len(set(scripts)) > 5
    assert {name for name in scripts if f"benchmarks/{name}" not in page} == set()
