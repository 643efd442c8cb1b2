"""Changes of a prefix cache, for a router: the names of blocks that came and went since it was last asked."""

from __future__ import annotations

from collections.abc import Iterable
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

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        """Hash -> whether it can be found now."""

    def note(self, block_hash: bytes, is_there: bool) -> None:
        if self._changes.pop(block_hash, None) is None:  # else it is again as it was
            self._changes[block_hash] = is_there

    def take(self) -> Changes:
        changes, self._changes = self._changes, {}
        added = [block_hash for block_hash, is_there in changes.items() if is_there]
        removed = [block_hash for block_hash, is_there in changes.items() if not is_there]
        return Changes(names_of(added), names_of(removed))
