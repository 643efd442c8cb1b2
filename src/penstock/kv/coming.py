"""What is coming: owns who computes which block next, as part of a prefill, so that others can wait for it instead of computing
it again. Called by `KVManager`; never lets anybody wait.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from penstock.kv.block_table import BlockTable, token_at
from penstock.kv.prefix_index import child_key
from penstock.types.request import Request

MIN_AWAITED_TOKENS = 8
"""Of the last piece of a prompt, to be worth a step's wait; computing so many takes as long as a step has overhead (a whole
block is always waited for: what follows it is likely to be shared, too)."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A block that a running request is about to compute, and that another lacks."""

    key: bytes
    leader: Request


class Coming:
    """Of one manager."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.leaders: dict[bytes, Request] = {}
        """Key among the children of its parent -> the running request that computes this block next."""
        self.in_flight: Collection[str] = ()
        """Ids of those of them of which a step in flight computes several tokens, while the next one is planned."""

    def find(self, request: Request, table: BlockTable, num_found_blocks: int, num_found_tokens: int) -> Awaited | None:
        """The block that `request` lacks next, behind what is found, if a running one computes it just now or in its next step.

        Only a whole block, or all that is left of the prompt but its last token.
        """
        start = num_found_blocks * self._block_size
        stop = min(start + self._block_size, request.num_tokens - 1)
        if start == stop:
            return None
        key = child_key(table.parent(num_found_blocks), token_at(request, start))
        leader = self.leaders.get(key)
        if leader is None or leader.num_tokens - leader.num_pending_samples < stop:
            return None
        if leader.num_behind < 2 and leader.request_id not in self.in_flight:
            return None
        is_whole = stop - start == self._block_size
        if not is_whole and stop - num_found_tokens < MIN_AWAITED_TOKENS:
            return None
        is_equal = all(token_at(leader, idx) == token_at(request, idx) for idx in range(start, stop))
        return Awaited(key, leader) if is_equal else None

    def has(self, awaited: Awaited) -> bool:
        """False as soon as it was computed, or its leader runs no more."""
        return self.leaders.get(awaited.key) is awaited.leader

    def lead(self, table: BlockTable, request: Request) -> None:
        """Note which block the request computes next, if that is part of a prefill. The first who leads to a block stays."""
        key, start = b"", table.num_full * self._block_size
        if request.num_behind > 1 and start < request.num_tokens:
            key = child_key(table.parent(table.num_full), token_at(request, start))
        if key == table.leads:
            return
        if table.leads:
            self.lead_no_more(table)
        if key and self.leaders.setdefault(key, request) is request:
            table.leads = key

    def lead_no_more(self, table: BlockTable) -> None:
        """Nobody need wait for it."""
        del self.leaders[table.leads]
        table.leads = b""
