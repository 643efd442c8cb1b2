"""Blocks whose contents are copied to or from another pool while steps run.

They are held, so that nobody else takes them meanwhile. A running request that lacks blocks is preempted and resumes later.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from penstock.kv.block_pool import BlockPool
from penstock.kv.block_table import TOKEN_BYTES, extend_chain, pack
from penstock.kv.eviction import BACKGROUND
from penstock.kv.prefix_cache import PrefixIndex


@dataclass(frozen=True, slots=True)
class Span:
    """Successive tokens of a prompt, as whole blocks, and maybe a tail that fills a part of one more."""

    parent: bytes
    """Hash before the first block."""
    hashes: Sequence[bytes]
    contents: Sequence[bytes] = ()
    """The packed tokens of the whole blocks. Only `Exchange.publish` needs them."""
    tail: bytes = b""
    """The packed tokens of the tail."""

    @classmethod
    def of(cls, root: bytes, token_ids: Sequence[int], block_size: int, *, has_tail: bool) -> Span:
        """Return the first tokens of a prompt. Without `has_tail`, those that do not fill a block are left out."""
        hashes, contents = extend_chain(root, token_ids, block_size)
        return cls(root, hashes, contents, pack(token_ids[len(hashes) * block_size :]) if has_tail else b"")

    @property
    def num_blocks(self) -> int:
        return len(self.hashes) + bool(self.tail)

    @property
    def last(self) -> bytes:
        """Hash of the last whole block."""
        return self.hashes[-1] if self.hashes else self.parent

    def after(self, num_blocks: int) -> Span:
        """Return the span without its first blocks."""
        first = self.first(num_blocks)
        tail = self.tail if num_blocks <= len(self.hashes) else b""
        return Span(first.last, self.hashes[num_blocks:], self.contents[num_blocks:], tail)

    def first(self, num_blocks: int) -> Span:
        tail = self.tail if num_blocks > len(self.hashes) else b""
        return Span(self.parent, self.hashes[:num_blocks], self.contents[:num_blocks], tail)


@dataclass(frozen=True, slots=True)
class Room:
    """The blocks held for a prefix whose missing part is being copied in."""

    found: Sequence[int]
    """Leading blocks of the prefix, which were cached before."""
    block_ids: Sequence[int]
    """Allocated blocks to fill with the next part of the prefix."""


class Exchange:
    def __init__(self, pool: BlockPool, index: PrefixIndex, take: Callable[[int], list[int]]) -> None:
        self.held: Counter[int] = Counter()
        """Block -> how often it is held here."""
        self._pool, self._index, self._take = pool, index, take

    def find(self, span: Span) -> list[int]:
        """Return the cached blocks of a span, up to the first that is missing."""
        block_ids = self._index.lookup(span.hashes)
        if span.tail and len(block_ids) == len(span.hashes):
            block_id, num_tokens = self._index.lookup_child(span.last, span.tail)
            if num_tokens * TOKEN_BYTES == len(span.tail):
                block_ids.append(block_id)
        return block_ids

    def offer(self, span: Span) -> list[int]:
        """Hold the cached blocks of a span until `release`, and return them."""
        block_ids = self.find(span)
        for block_id in block_ids:
            self._pool.hold(block_id)
        self.held.update(block_ids)
        return block_ids

    def make_room(self, span: Span) -> Room:
        """Hold the cached blocks of a span, and allocate blocks for the others: at most half of the free blocks."""
        found = self.offer(span)
        block_ids = self._take(min(span.num_blocks - len(found), self._pool.num_available // 2))
        self.held.update(block_ids)
        return Room(found, block_ids)

    def publish(self, room: Room, span: Span, num_filled: int, *, group: Hashable) -> None:
        """Add the first `num_filled` allocated blocks of a room to the prefix cache, and release all of its blocks.

        Contents that a request computed meanwhile are skipped.
        """
        filled = span.after(len(room.found)).first(num_filled)
        num_whole = len(filled.hashes)
        self._index.publish(room.block_ids[:num_whole], filled.parent, filled.hashes, filled.contents)
        if filled.tail:
            self._index.publish_tail(room.block_ids[num_whole], filled.last, filled.tail)
        self.release(room.block_ids, group)
        self.release(room.found)

    def release(self, block_ids: Sequence[int], group: Hashable = BACKGROUND) -> None:
        """Release blocks into an eviction group. By default each keeps the group that it had."""
        published = self._index.block_ids
        for block_id in reversed(block_ids):  # last block first: early blocks are part of more prefixes, and evicted later
            self.held[block_id] -= 1
            if not self.held[block_id]:
                del self.held[block_id]
            self._pool.release(block_id, keep=block_id in published, group=group)
