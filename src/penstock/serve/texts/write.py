"""Writes large answers as JSON in pieces, since one call would block all other threads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from penstock import fast_json
from penstock.deploy.off_loop import give_way

PIECE_SIZE = 1 << 14
"""Most numbers to write at once: a third of a millisecond."""


def write_json(value: Any) -> bytes:
    """Return data as JSON. It may contain NumPy arrays."""
    return b"".join(_pieces(value))


def _pieces(value: Any) -> Iterator[bytes]:
    if _size(value) <= PIECE_SIZE:
        yield fast_json.dumps(value)
        give_way()
    elif isinstance(value, dict):
        for index, (name, part) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if index else b"{", fast_json.dumps(name))
            yield from _pieces(part)
        yield b"}"
    elif isinstance(value, list) or getattr(value, "ndim", 0) > 1:
        for index, run in enumerate(_runs(value)):
            yield b"," if index else b"["
            if len(run) > 1:
                yield fast_json.dumps(run)[1:-1]
                give_way()
            else:
                yield from _pieces(run[0])
        yield b"]"
    else:
        yield fast_json.dumps(value)


def _runs(items: Iterable[Any]) -> Iterator[list[Any]]:
    """Yield lists of consecutive items, each up to `PIECE_SIZE` large. A larger item is alone in its list."""
    run: list[Any] = []
    size = 0
    for item in items:
        item_size = _size(item)
        if run and size + item_size > PIECE_SIZE:
            yield run
            run, size = [], 0
        run.append(item)
        size += item_size
    if run:
        yield run


def _size(value: Any) -> int:
    """Return about how many numbers take as long to write as this value."""
    if isinstance(value, str):
        return 1 + len(value) // 16
    if isinstance(value, dict):
        return 1 + sum(map(_size, value.values()))
    if isinstance(value, list):
        return 1 + sum(map(_size, value))
    return int(getattr(value, "size", 1))  # of an array
