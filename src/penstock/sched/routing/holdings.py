"""Which replica holds which KV blocks, for routers: blocks that replicas reported, and prompts sent to them since."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence


class Holdings:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._held: dict[int, int] = {}
        """Name of a block -> bit set of the replicas that hold it."""
        self._coming: dict[int, int] = {}
        """Name of a block that a request in flight computes -> the bit of the replica that was last sent one."""
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
        names, coming, bit = names[depth // self._block_size :], self._coming, 1 << replica
        for name in names:
            coming[name] = bit
        self._expected[request_id] = replica, names

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
            holders = self._held.get(names[0], 0) | self._coming.get(names[0], 0)
            self._search(names, 1, len(names), holders, depths)
        return depths

    def num_reported(self, replica: int, names: Sequence[int]) -> int:
        """Return how many of a prompt's first tokens a replica has reported. Unlike `depths`, omits blocks being computed."""
        return self._block_size * bisect_left(names, True, key=lambda name: not self._held.get(name, 0) >> replica & 1)

    def _search(self, names: Sequence[int], low: int, high: int, holders: int, depths: list[int]) -> None:
        """Set the depths of `holders`, each of which holds at least the first `low` blocks and at most the first `high`."""
        held, coming = self._held.get, self._coming.get
        while low < high and holders:
            middle = (low + high) // 2
            name = names[middle]
            found = holders & (held(name, 0) | coming(name, 0))
            if found == holders:
                low = middle + 1
            elif not found:
                high = middle
            else:
                self._search(names, low, middle, holders & ~found, depths)
                holders, low = found, middle + 1
        while holders:
            lowest = holders & -holders
            depths[lowest.bit_length() - 1] = low * self._block_size
            holders ^= lowest
