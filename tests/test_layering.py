"""The import contracts of .importlinter hold, they name every package, and no two files import each other."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent


def _lint(config: Path) -> subprocess.CompletedProcess[str]:
    """In a process of its own: it silences every logger that exists, and tests after this one look at the log."""
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(sys.argv[1], cache_dir=None))"
    return subprocess.run([sys.executable, "-c", command, config], cwd=ROOT, capture_output=True, text=True, check=False)


def _circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules that import each other, also by way of others: strongly connected components, by Tarjan."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = low[module] = len(number)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in number:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], number[imported])
        if low[module] == number[module]:
            place = stack.index(module)
            group = stack[place:]
            del stack[place:]
            if len(group) > 1:
                found.append(sorted(group))

    for module in sorted(graph.modules):
        if module not in number:
            visit(module)
    return found


def test_every_import_obeys_the_contracts() -> None:
    done = _lint(ROOT / ".importlinter")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_files_import_each_other() -> None:
    assert _circles(grimp.build_graph("penstock", cache_dir=None)) == []


def test_a_circle_is_noticed() -> None:
    graph = grimp.ImportGraph()
    for name in "abcd":
        graph.add_module(name)
    for importer, imported in ("ab", "bc", "cb", "cd"):
        graph.add_import(importer=importer, imported=imported)
    assert _circles(graph) == [["b", "c"]]


def test_a_package_without_a_layer_is_noticed(tmp_path: Path) -> None:
    config = tmp_path / "contracts"
    text = (ROOT / ".importlinter").read_text()
    config.write_text(text.replace(" | storage |", " |"))
    done = _lint(config)
    assert done.returncode != 0
    assert "storage" in done.stdout


def test_a_broken_contract_is_noticed(tmp_path: Path) -> None:
    config = tmp_path / "contracts"
    config.write_text(
        "[importlinter]\nroot_package = penstock\n\n[importlinter:contract:wrong]\nname = wrong\ntype = forbidden\n"
        "source_modules = penstock.kv\nforbidden_modules = penstock.types\n"
    )
    done = _lint(config)
    assert done.returncode != 0
    assert "wrong BROKEN" in done.stdout
