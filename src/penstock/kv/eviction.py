"""Eviction policies: which cached blocks are lost first. A policy knows groups and their sizes, never single blocks.

A cached block belongs to the group of the last request that held it, background requests excepted. When blocks without content
are used up, the policy names a group, whose least recently freed block is evicted.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from typing import Protocol

from penstock.types.request import Request

REST_NS = 10_000_000_000
"""Default of `rest_ns`: long enough for nearly all tools of an agent to run (docs/memory.md)."""


BACKGROUND: Hashable = ("background",)
"""The group of blocks that only background requests have held. Eviction policies do not see it."""


class EvictionPolicy(Protocol):
    """Puts cached blocks into groups, and chooses the group that loses its oldest block."""

    rest_ns: int = REST_NS
    """Resting blocks (`block_pool.py`) count as used this much later than they were."""

    @abstractmethod
    def group_of(self, request: Request) -> Hashable:
        """Return the group to cache the request's blocks in once freed. None: no group."""
        ...

    def resized(self, group: Hashable, num_blocks: int) -> None:
        """Note that a group has one cached block more or fewer, and now `num_blocks`."""
        del group, num_blocks

    @abstractmethod
    def choose(self) -> Hashable:
        """Return the group that loses a block. It must have at least one."""
        ...


def group_of(policy: EvictionPolicy, request: Request) -> Hashable:
    """Return the group with which to release a request's blocks."""
    return BACKGROUND if request.background else policy.group_of(request)


class LeastRecentlyUsed(EvictionPolicy):
    def __init__(self, *, rest_ns: int = REST_NS) -> None:
        self.rest_ns = rest_ns

    def group_of(self, request: Request) -> Hashable:
        del request
        return None

    def choose(self) -> Hashable:
        return None


class LowestPriorityFirst(EvictionPolicy):
    """Evicts blocks of the lowest priority class that has any, the least recently used first."""

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
    """Evicts the least recently used block of the tenant with the most cached blocks.

    A tenant within its equal share loses nothing to others.
    """

    def __init__(self, *, rest_ns: int = REST_NS) -> None:
        self.rest_ns = rest_ns
        self._sizes: dict[Hashable, int] = {}
        self._of_size: dict[int, dict[Hashable, None]] = {}
        """Number of cached blocks -> tenants with that many. The largest is found without a search."""
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
