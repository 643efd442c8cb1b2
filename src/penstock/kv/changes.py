"""Changes of a prefix cache, for a router: the blocks added and removed since it was last asked."""

from __future__ import annotations

from array import array
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
    """Net changes since the last `take`: hashes that were added, and that were removed. At most two per block of the pool."""

    def __init__(self) -> None:
        self._changes: dict[bytes, bool] = {}
        """Hash -> True if it was added, False if it was removed."""

    def note(self, block_hash: bytes, is_there: bool) -> None:
        if self._changes.pop(block_hash, None) is None:  # else the changes cancel out
            self._changes[block_hash] = is_there

    def take(self) -> Changes:
        added, removed = self.take_hashes()
        return Changes(names_of(added), names_of(removed))

    def take_hashes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of added and of removed blocks."""
        changes, self._changes = self._changes, {}
        added = [block_hash for block_hash, is_there in changes.items() if is_there]
        return added, [block_hash for block_hash, is_there in changes.items() if not is_there]


class Run(NamedTuple):
    """Consecutive blocks of a prefix that were added together."""

    parent: int | None
    """Name of the block before the first one. None: it begins a prompt."""
    names: list[int]
    token_ids: list[int]


class ContentLog(ChangeLog):
    """Also reports the tokens of blocks, for routers that don't know our hashes.

    Reports only prefixes that start from `root`, so none with a salt. A block from a tier has a hash but no known tokens: it is
    left out, and so are the blocks after it.
    """

    def __init__(self, root: bytes, content_of: Callable[[bytes], tuple[bytes, bytes] | None]) -> None:
        """`content_of`: a block's parent and its packed tokens by its hash, or None."""
        super().__init__()
        self._root, self._content_of = root, content_of
        self._told: set[bytes] = set()

    def take_runs(self) -> tuple[list[Run], list[int]]:
        """Return the added blocks, and the names of the removed ones."""
        runs: list[Run] = []
        told, last = self._told, b""
        added, removed = self.take_hashes()
        for block_hash in added:
            content = self._content_of(block_hash)
            if content is None or not (content[0] == self._root or content[0] in told):
                continue
            told.add(block_hash)
            parent, tokens = content
            if parent != last:
                runs.append(Run(None if parent == self._root else names_of([parent])[0], [], []))
            runs[-1].names.extend(names_of([block_hash]))
            runs[-1].token_ids.extend(array("i", tokens))
            last = block_hash
        gone = [block_hash for block_hash in removed if block_hash in told]
        told.difference_update(gone)
        return runs, names_of(gone)
