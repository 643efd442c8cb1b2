"""Which replica holds which KV blocks, for routers: blocks that replicas reported, and prompts sent to them since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

STRIDE = 4
"""Every `STRIDE`-th block of a prompt in flight is remembered, and each after the last of these: noting all took a third of a
decision's time. A prompt that departs or ends between two of them is taken to depart after the first: up to 3 blocks early."""


class Holdings:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, int] = {}
        """Name of a block -> bit set of the replicas that hold it."""
        self._coming: dict[int, int] = {}
        """Name of a remembered block of a request in flight -> the bit of the replica that was last sent one."""
        self._expected: dict[str, tuple[int, Sequence[int]]] = {}
        """Id of a request in flight -> its replica, and its names in `_coming`."""

    def hear(self, replica: int, added: Iterable[int], removed: Iterable[int]) -> None:
        """Apply a replica's report of blocks that it has cached and evicted."""
        held, bit = self._held, 1 << replica
        for name in added:
            held[name] = held.get(name, 0) | bit
        for name in removed:
            left = held.get(name, 0) & ~bit
            if left:
                held[name] = left
            else:
                held.pop(name, None)

    def forget(self, replica: int) -> None:
        """Note that a replica holds nothing any more. O(blocks)."""
        bit = 1 << replica
        self._held = {name: left for name, holders in self._held.items() if (left := holders & ~bit)}

    def expect(self, request_id: str, replica: int, names: Sequence[int], depth: int) -> None:
        """Note that a replica was sent a request, and will hold its blocks. It holds the first `depth` tokens."""
        coming, bit, end = self._coming, 1 << replica, len(names) // STRIDE * STRIDE
        begin = depth // self._block_size
        noted = [*names[begin // STRIDE * STRIDE + STRIDE - 1 : end : STRIDE], *names[max(begin, end) :]]
        for name in noted:
            coming[name] = bit
        self._expected[request_id] = replica, noted

    def settle(self, request_id: str) -> None:
        """Stop expecting a request's blocks. After its first token or its end its replica has reported them. Idempotent."""
        replica, names = self._expected.pop(request_id, (0, ()))
        coming, bit = self._coming, 1 << replica
        for name in names:
            if coming.get(name) == bit:
                del coming[name]

    def depths(self, names: Sequence[int], num_replicas: int) -> list[int]:
        """Return how many of a prompt's first tokens each replica holds, in whole blocks.

        A name stands for a whole prefix: a replica that holds a block is assumed to hold those before it. So a binary search
        looks up a few dozen of a thousand blocks. With a sliding window the first blocks are evicted first, so it may
        find too few.
        """
        depths = [0] * num_replicas
        if names:
            # The first remembered block of a prompt in flight is not always the first.
            holders = self._holders(names[0]) | self._coming.get(names[min(STRIDE, len(names)) - 1], 0)
            self._search(names, 0, len(names) // STRIDE, holders, depths)
        return depths

    def num_reported(self, replica: int, names: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens a replica has reported. Unlike `depths`, omits blocks being computed."""
        return self._block_size * bisect_left(names, True, key=lambda name: not self._held.get(name, 0) >> replica & 1)

    def _holders(self, name: int) -> int:
        return self._held.get(name, 0) | self._coming.get(name, 0)

    def _search(self, names: Sequence[int], low: int, high: int, holders: int, depths: list[int]) -> None:
        """Set the depths of `holders`. Each holds at least `low * STRIDE` blocks and fewer than `(high + 1) * STRIDE`."""
        while low < high and holders:
            middle = (low + high) // 2
            found = holders & self._holders(names[middle * STRIDE + STRIDE - 1])
            if found == holders:
                low = middle + 1
            elif not found:
                high = middle
            else:
                self._search(names, low, middle, holders & ~found, depths)
                holders, low = found, middle + 1
        num_blocks, most = low * STRIDE, min(len(names), low * STRIDE + STRIDE - 1)
        while holders:
            found = holders & self._holders(names[num_blocks]) if num_blocks < most else 0
            self._set(holders & ~found, num_blocks, depths)
            holders, num_blocks = found, num_blocks + 1

    def _set(self, holders: int, num_blocks: int, depths: list[int]) -> None:
        while holders:
            lowest = holders & -holders
            depths[lowest.bit_length() - 1] = num_blocks * self._block_size
            holders ^= lowest
