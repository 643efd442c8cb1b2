"""Helpers that `models/test_mutated.py` shares with other tests."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from penstock.types.errors import ModelError

DELETED = object()

HOSTILE: tuple[Any, ...] = (
    DELETED, None, True, False, -1, 0, 1, 2, 7, 31, 2**31, 2**63, 10**30, -0.5, 0.5, 1e308, float("nan"), float("inf"), "", "x",
    "../../etc/passwd", "/dev/zero", "\ud800", "\0", "F32", "F16", "BF16", "I8", "I32", "I64", "F8_E4M3", "F8_E5M2", "U8",
    "gptq", "awq", "compressed-tensors", "mxfp4", "linear", "llama3", [], {}, [[]], [None], [1], [0, 0], [2**62, 4], ["a"],
    {"a": 1}, {"a": {}},
)  # fmt: skip

BROKEN = (b"", b"[", b"null", b"[" * 100_000, b'{"a":' * 20_000, b"\xff\xfe", b"\0" * 64, b"1" * 5000, b'{"a":' + b"1" * 5000)

Path_ = tuple[str | int, ...]

bounded = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def places(node: Any, path: Path_ = ()) -> Iterator[Path_]:
    """Every place of a JSON value, of long lists the first few."""
    yield path
    items = node.items() if isinstance(node, dict) else enumerate(node[:3]) if isinstance(node, list) else ()
    for key, value in items:
        yield from places(value, (*path, key))


def changed(tree: Any, path: Path_, value: Any) -> Any:
    """The tree with another value at a place, or as it is if an earlier change has taken the place away."""
    if not path:
        return {} if value is DELETED else value
    tree = copy.deepcopy(tree)
    at = tree
    for key in path[:-1]:
        if not (isinstance(at, dict) and key in at) and not (isinstance(at, list) and isinstance(key, int) and key < len(at)):
            return tree
        at = at[key]
    if value is DELETED and isinstance(at, dict):
        at.pop(path[-1], None)
    elif isinstance(at, dict) or (isinstance(at, list) and isinstance(path[-1], int) and path[-1] < len(at)):
        at[path[-1]] = None if value is DELETED else value
    return tree


def mutations(tree: Any) -> st.SearchStrategy[list[tuple[Path_, Any]]]:
    return st.lists(st.tuples(st.sampled_from(list(places(tree))), st.sampled_from(HOSTILE)), min_size=1, max_size=2)


def mutate(tree: Any, changes: list[tuple[Path_, Any]]) -> bytes:
    for path, value in changes:
        tree = changed(tree, path, value)
    return json.dumps(tree).encode()


def refusal(read: Callable[[], object]) -> ModelError | None:
    try:
        read()
    except ModelError as error:
        return error
    return None


class Changed:
    """A file that is another one for a while."""

    def __init__(self, file: Path, data: bytes) -> None:
        self._file, self._data, self._before = file, data, file.read_bytes()

    def __enter__(self) -> None:
        self._file.write_bytes(self._data)

    def __exit__(self, *_: object) -> None:
        self._file.write_bytes(self._before)


def parts(safetensors: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the body."""
    size = 8 + int.from_bytes(safetensors[:8], "little")
    return json.loads(safetensors[8:size]), safetensors[size:]
