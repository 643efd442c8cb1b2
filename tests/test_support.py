"""Helpers that tests share lie in tests/support. Tests are not imported, programs beside them may be."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def imported(path: Path) -> Iterator[Path]:
    """The files below tests that a file imports, at its head or in a function."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        level, names = 0, list[str]()
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            level, module = node.level, node.module or ""
            names = [module, *(f"{module}.{alias.name}".lstrip(".") for alias in node.names)]
        folders = [path.parents[level - 1]] if level else [TESTS, path.parent]
        for folder in folders:
            found = (folder / (name.removeprefix("tests.").replace(".", "/") + ".py") for name in names)
            yield from (file for file in found if file != path and file in files_of_tests())


@functools.cache
def files_of_tests() -> frozenset[Path]:
    return frozenset(TESTS.rglob("*.py"))


@functools.cache
def is_shared_wrongly(file: Path) -> bool:
    if file.name == "conftest.py":
        return False
    if file.name.startswith("test_"):
        return True
    is_in_support = file.relative_to(TESTS).parts[0] == "support"
    return not is_in_support and "__main__" not in file.read_text(encoding="utf-8")


def test_what_is_imported_lies_in_support() -> None:
    files = [*files_of_tests(), *(TESTS.parent / "benchmarks").rglob("*.py")]
    names = {file.stem for file in files_of_tests() if is_shared_wrongly(file)} - {"__init__"}
    found = {
        file: path
        for path in files
        if not names.isdisjoint(re.findall(r"\w+", path.read_text(encoding="utf-8")))  # few, and to parse takes longer
        for file in imported(path)
        if is_shared_wrongly(file)
    }
    assert not found, "\n".join(f"{path} imports {file}: move what they share to tests/support" for file, path in found.items())


def test_an_import_of_a_test_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "test_other.py"
    for line in ("import test_support", "from test_support import TESTS", "def f():\n    from server.test_http import post"):
        path.write_text(line)
        assert any(map(is_shared_wrongly, imported(path)))
