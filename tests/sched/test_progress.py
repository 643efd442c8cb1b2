"""How far a request has come is written in one place."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
from penstock.types import request as request_module

SOURCE = Path(penstock.__file__).parent
WRITER = "sched/progress.py"
MUTATORS = ("append", "extend", "insert", "pop", "clear", "remove", "sort", "reverse")


def progress_fields() -> set[str]:
    """The fields of `Request` below the comment that names their writer."""
    text = Path(request_module.__file__).read_text(encoding="utf-8")
    (cls,) = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == "Request"]
    (first_line,) = [number for number, line in enumerate(text.splitlines(), 1) if "# Progress: written by" in line]
    return {
        node.target.id
        for node in cls.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.lineno > first_line
    }


NO_REQUESTS = {"chunk", "counts"}
"""Names of objects with fields of the same names: an `OutputChunk`, a `StepCounts`."""


def writes(tree: ast.AST, fields: set[str]) -> list[str]:
    """Assignments to attributes of these names, and calls that change such a list, but for `self` and `NO_REQUESTS`."""
    found: list[str] = []
    for node in ast.walk(tree):
        target: ast.AST | None = None
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATORS:
            target = node.func.value
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
            target = node.value
        if isinstance(target, ast.Attribute) and target.attr in fields:
            owner = target.value.attr if isinstance(target.value, ast.Attribute) else getattr(target.value, "id", "")
            if owner not in NO_REQUESTS | {"self"}:
                found.append(f"{target.attr} in line {target.lineno}")
    return found


def test_the_fields_are_found() -> None:
    assert {"status", "output_token_ids", "num_tokens", "num_computed_tokens", "num_inflight_tokens", "stop_reason"} <= (
        progress_fields()
    )


@pytest.mark.parametrize(
    "code", ["request.status = x", "request.num_tokens += 1", "a, r.status = b", "r.output_token_ids.append(7)", "del r.status"]
)
def test_a_write_is_found(code: str) -> None:
    assert len(writes(ast.parse(code), progress_fields())) == 1


def test_a_requests_progress_has_one_writer() -> None:
    fields = progress_fields()
    paths = [path for room in ("sched", "engine", "kv", "deploy") for path in sorted((SOURCE / room).rglob("*.py"))]
    found = {path.relative_to(SOURCE).as_posix(): writes(ast.parse(path.read_text(encoding="utf-8")), fields) for path in paths}
    assert found.pop(WRITER), "the writer writes"
    assert {path: lines for path, lines in found.items() if lines} == {}
