"""The fence: owns the blocks of requests that ended while a step with a row of theirs was in flight. Called by `KVManager`;
never decides when it is lifted.

The device may still read and write such blocks. So they are nobody's, and yet not free, until that step was collected:

    step 7 submitted   a computes in blocks 4 9 2
    a is cancelled     4 9 2 are behind the fence of step 7
    step 8 planned     whoever needs blocks gets others; what a has published is found and shared as before
    step 7 collected   4 9 2 are given back, as at any other end
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.kv.block_table import BlockTable


class Fence:
    """Block tables by the step that has to be collected first."""

    def __init__(self) -> None:
        self._tables: dict[int, list[tuple[str, BlockTable]]] = {}

    def put(self, step_id: int, request_id: str, table: BlockTable) -> None:
        self._tables.setdefault(step_id, []).append((request_id, table))

    def lift(self, step_id: int) -> list[BlockTable]:
        """The tables that waited for this step, in the order in which they came."""
        return [table for _, table in self._tables.pop(step_id, ())]

    def tables(self) -> Iterator[tuple[str, BlockTable]]:
        """(request id, its table) of all that have not been lifted; an id may come more than once."""
        for tables in list(self._tables.values()):
            yield from tables
