"""The cached blocks of an engine, for other threads: they copy contents out and in while steps run (`kv/exchange.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from penstock.engine.core_lock import CoreLock
from penstock.engine.ports import BlockMemory
from penstock.kv.block_table import root_hash
from penstock.kv.eviction import group_of
from penstock.kv.exchange import Room, Span
from penstock.sched.scheduler import Scheduler
from penstock.types.request import Request


@dataclass(frozen=True, slots=True)
class Wanted:
    """A prompt prefix whose KV will be copied in."""

    span: Span
    num_found: int
    """Leading blocks that were already cached."""
    group: Hashable
    """Group of its blocks for the eviction policy."""

    @property
    def missing(self) -> Span:
        return self.span.after(self.num_found)


class Blocks:
    """Lets other threads than the engine's copy cached blocks. Methods may wait, and raise TimeoutError."""

    def __init__(self, scheduler: Scheduler, memory: BlockMemory | None, core_lock: CoreLock, wake: Callable[[], None]) -> None:
        """`wake` wakes the engine: requests may wait for blocks that are released."""
        kv = scheduler.kv
        # Not with a tier, which publishes blocks before their contents are written. Not with states: no hit ends without one.
        self.memory = memory if kv.prefix.shares_parts and kv.tier is None and not kv.num_state_blocks else None
        """None: these blocks can't be exchanged, or the engine has ended."""
        self.block_size = kv.block_size
        self._scheduler, self._exchange, self._core_lock, self._wake = scheduler, kv.exchange, core_lock, wake

    @property
    def compute_ns_per_block(self) -> float:
        """Time to compute a block of a prompt. 0: not known yet."""
        return self._scheduler.prefill_ns_per_token * self.block_size

    def want(self, request: Request, num_tokens: int, *, has_tail: bool) -> Wanted:
        """Return the first tokens of a prompt, as blocks. `has_tail`: also those that fill only a part of a block."""
        token_ids = request.prompt_token_ids[: min(num_tokens, request.num_tokens - 1)]  # the last one is always computed
        span = Span.of(root_hash(request.cache_salt, request.adapter), token_ids, self.block_size, has_tail=has_tail)
        num_found = self._core_lock.read(lambda: len(self._exchange.find(span)))
        return Wanted(span, num_found, group_of(self._scheduler.kv.eviction, request))

    def offer(self, span: Span, request_id: str = "") -> list[int]:
        """Hold the cached blocks of a span until `release`, so that their contents stay. Return them.

        `request_id`: a request, perhaps still running, in whose last block the span ends.
        """

        def offer() -> list[int]:
            request = self._scheduler.running.get(request_id)
            if request is not None:
                self._scheduler.kv.publish_tail(request)
            return self._exchange.offer(span)

        return self._core_lock.read(offer)

    def release(self, block_ids: Sequence[int]) -> None:
        self._settle(lambda: self._exchange.release(block_ids))

    def make_room(self, wanted: Wanted, num_blocks: int) -> Room:
        """Allocate blocks for the first missing ones, at most `num_blocks`, and hold them until `publish`."""
        span = wanted.span.first(wanted.num_found + num_blocks)
        return self._core_lock.read(lambda: self._exchange.make_room(span))

    def publish(self, room: Room, wanted: Wanted, num_filled: int) -> None:
        """Add the first `num_filled` blocks of a room to the prefix cache, and release all of its blocks."""
        self._settle(lambda: self._exchange.publish(room, wanted.span, num_filled, group=wanted.group))

    def close(self) -> None:
        """Note that the engine has ended. Threads that are copying now may finish."""
        self.memory = None

    def _settle(self, give_back: Callable[[], None]) -> None:
        """Release blocks, however long the engine holds its lock. Once the engine has ended, do nothing."""
        while self.memory is not None:
            with contextlib.suppress(TimeoutError):
                self._core_lock.read(give_back)
                self._wake()
                return
