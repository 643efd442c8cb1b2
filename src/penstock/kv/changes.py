"""Tells a router which blocks can be found in a prefix cache: their names, as changes since it last asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

NAME_BYTES = 8


def names_of(hashes: Iterable[bytes]) -> list[int]:
    """Return the names by which routers know blocks: half of each hash, as a number. A false match costs a recompute."""
    return [int.from_bytes(block_hash[:NAME_BYTES], "little") for block_hash in hashes]


class Changes(NamedTuple):
    added: list[int]
    removed: list[int]


class ChangeLog:
    """Blocks that can be found now and could not at the last `take`, and the reverse. At most two per block of the pool."""

    def __init__(self, on_news: Callable[[], None] = lambda: None) -> None:
        """`on_news` is called with the first change after each `take`."""
        self._on_news = on_news
        self._changes: dict[bytes, bool] = {}
        """Hash -> whether it can be found now."""

    def note(self, block_hash: bytes, is_there: bool) -> None:
        changes = self._changes
        if not changes:
            self._on_news()
        if changes.pop(block_hash, None) is None:  # else it is again as it was
            changes[block_hash] = is_there

    def take(self) -> Changes:
        changes, self._changes = self._changes, {}
        added = [block_hash for block_hash, is_there in changes.items() if is_there]
        removed = [block_hash for block_hash, is_there in changes.items() if not is_there]
        return Changes(names_of(added), names_of(removed))
