"""What was in the prefix cache and is there no longer: owns the memory of evicted blocks and of salts. Called by `KVManager`
to say why a lookup ended; never finds a block, and forgets the oldest.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from penstock.types.request import Request

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")

MAX_EVICTED = 8192
"""Blocks, at least; an eighth more at most."""
MAX_BEGINNINGS = 1024
_NUM_GENERATIONS = 8


class Recent(Generic[_Key, _Value]):
    """A map that keeps at least the last `num_kept` keys written, and at most an eighth more if that is a
    multiple of eight. Each operation is O(1).

    It is forgotten by generations. Two of them would do, but take up to twice the memory, now more, now less.
    """

    def __init__(self, num_kept: int) -> None:
        self._max_young = -(-num_kept // _NUM_GENERATIONS)
        self._young: dict[_Key, _Value] = {}
        self._old: deque[dict[_Key, _Value]] = deque(maxlen=_NUM_GENERATIONS)
        """The newest first."""

    def __len__(self) -> int:
        return len(self._young) + sum(map(len, self._old))

    def get(self, key: _Key) -> _Value | None:
        for generation in (self._young, *self._old):
            if key in generation:
                return generation[key]
        return None

    def put(self, key: _Key, value: _Value) -> None:
        self._young[key] = value
        if len(self._young) >= self._max_young:
            self._old.appendleft(self._young)
            self._young = {}


class PrefixHistory:
    """Of one cache."""

    def __init__(self) -> None:
        self.now_ns = 0
        """Of the step that is being planned; set by the scheduler."""
        self._evicted_ns: Recent[bytes, int] = Recent(MAX_EVICTED)
        self._salts: Recent[tuple[str, bytes], bytes] = Recent(MAX_BEGINNINGS)
        """By tenant and tokens of the first block. Of no other tenant: a salt is there so that others learn nothing."""

    def evict(self, hashes: Iterable[bytes]) -> None:
        """Blocks with these prefixes are about to be used for something else."""
        for block_hash in hashes:
            self._evicted_ns.put(block_hash, self.now_ns)

    def evicted_ns(self, block_hash: bytes) -> int | None:
        """When a prefix was evicted, if it was not long ago."""
        return self._evicted_ns.get(block_hash)

    def begin(self, request: Request, block_size: int) -> bool:
        """Note the first block of a request, if it fills one. True if its tenant's last with the same had another salt."""
        if request.num_prompt_tokens < block_size:
            return False
        # As bytes: a sixth of what a tuple of numbers takes.
        beginning = (request.tenant, array("i", request.prompt_token_ids[:block_size]).tobytes())
        known = self._salts.get(beginning)
        self._salts.put(beginning, request.cache_salt)
        return known is not None and known != request.cache_salt
