"""Eviction policies: which cached blocks are lost first? Asked by `BlockPool`; they know groups and their sizes, never a block.

A block with content that nobody holds belongs to the group of the request that held it last. When blocks without content are
used up, a policy names the group that loses one, and of that group the least recently freed goes:

    tenant-fair    "light"  head -> oldest ... newest          2 blocks
                   "heavy"  head -> oldest ......... newest    5 blocks: loses its oldest, however new that is

A policy sees each change of a size, so that it can keep what it needs to answer at once. It keeps accounts: one is made for
each pool.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import Protocol

from penstock.types.request import Request

REST_NS = 10_000_000_000
"""The rest, as a rule: nearly all of an agent's tools have run by then, and other workloads lose nothing (docs/memory.md)."""


class EvictionPolicy(Protocol):
    """A policy of one pool. Which of a group's blocks is lost is not its question: the pool takes the oldest."""

    rest_ns: int = REST_NS
    """Cached blocks that rest (`block_pool.py`) count as used so much later than they were; 0: no later."""

    @abstractmethod
    def group_of(self, request: Request) -> Hashable:
        """The group of the request's blocks once it lets go of them; None: of a list of which no account is kept."""
        ...

    def resized(self, group: Hashable, num_blocks: int) -> None:
        """A group has one cached block more or one less than before, and now so many."""
        del group, num_blocks

    @abstractmethod
    def choose(self) -> Hashable:
        """The group that loses a block: one of those that have any."""
        ...


class LeastRecentlyUsed(EvictionPolicy):
    """The block that was not used for longest, of any request."""

    def __init__(self, *, rest_ns: int = REST_NS) -> None:
        self.rest_ns = rest_ns

    def group_of(self, request: Request) -> Hashable:
        del request
        return None

    def choose(self) -> Hashable:
        return None


class LowestPriorityFirst(EvictionPolicy):
    """Blocks that the lowest class has left behind, before any of a higher one; of a class the least recently used.

    Classes more than `MAX_CLASS` up or down count as that. A class keeps what it has for as long as lower ones have any.
    """

    MAX_CLASS = 20

    def __init__(self, *, rest_ns: int = REST_NS) -> None:
        self.rest_ns = rest_ns
        self._with_blocks = 0
        """Bit k is set while class k has blocks."""

    def group_of(self, request: Request) -> Hashable:
        return min(max(request.priority, -self.MAX_CLASS), self.MAX_CLASS) + self.MAX_CLASS

    def resized(self, group: Hashable, num_blocks: int) -> None:
        assert isinstance(group, int), "a class of this policy"
        if num_blocks:
            self._with_blocks |= 1 << group
        else:
            self._with_blocks &= ~(1 << group)

    def choose(self) -> Hashable:
        return self._with_blocks.bit_length() - 1  # a lower class is a higher number


class TenantFair(EvictionPolicy):
    """The least recently used block of the tenant that has most cached blocks.

    So the cache is shared as evenly as tenants ask for it: one that wants no more than an equal share loses nothing to others,
    however many requests they send. Among tenants with equally many, the one that has had as many for longest loses one.
    """

    def __init__(self, *, rest_ns: int = REST_NS) -> None:
        self.rest_ns = rest_ns
        self._sizes: dict[Hashable, int] = {}
        self._of_size: dict[int, dict[Hashable, None]] = {}
        """Number of blocks -> the tenants with as many. A size changes by one, so the largest is never searched for."""
        self._largest = 0

    def group_of(self, request: Request) -> Hashable:
        return request.tenant

    def resized(self, group: Hashable, num_blocks: int) -> None:
        old = self._sizes.pop(group, 0)
        if old:
            same = self._of_size[old]
            del same[group]
            if not same:
                del self._of_size[old]
        if num_blocks:
            self._sizes[group] = num_blocks
            self._of_size.setdefault(num_blocks, {})[group] = None
        if num_blocks > self._largest or self._largest not in self._of_size:
            self._largest = num_blocks

    def choose(self) -> Hashable:
        return next(iter(self._of_size[self._largest]))


EVICTIONS = {
    "lru": "penstock.kv.eviction:LeastRecentlyUsed",
    "priority": "penstock.kv.eviction:LowestPriorityFirst",
    "tenant-fair": "penstock.kv.eviction:TenantFair",
}
