"""The cached blocks of an engine, for other threads: they copy contents out and in while steps run (`kv/exchange.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.engine.books import Books
from penstock.engine.ports import BlockMemory
from penstock.kv.block_table import extend_chain, root_hash
from penstock.kv.exchange import Room
from penstock.sched.scheduler import Scheduler
from penstock.types.request import Request


@dataclass(frozen=True, slots=True)
class Vacancy:
    """Blocks to be filled with a part of a prompt."""

    memory: BlockMemory
    room: Room
    hashes: Sequence[bytes]
    """Those of the blocks to fill: `room.block_ids` and, if there was too little room, others."""
    publish: Callable[[int], None]
    """Let requests find the first so many. Call it once, also with 0."""


class Blocks:
    """For other threads than the engine's. Methods may wait, and raise TimeoutError."""

    def __init__(self, scheduler: Scheduler, memory: BlockMemory | None, books: Books) -> None:
        kv = scheduler.kv
        self.memory = memory if kv.prefix.shares_parts else None
        """None: these blocks can't be exchanged, or the engine has ended."""
        self._scheduler, self._exchange, self._books = scheduler, kv.exchange, books
        self.block_size, self._eviction = kv.block_size, kv.eviction

    @property
    def compute_ns_per_block(self) -> float:
        """Time to compute a block of a prompt. 0: not known yet."""
        return self._scheduler.prefill_ns_per_token * self.block_size

    def offer(self, hashes: Sequence[bytes]) -> list[int]:
        """Hold the blocks of a prefix that are there, so that their contents stay. `release` gives them back."""
        return self._books.read(lambda: self._exchange.offer(hashes))

    def release(self, block_ids: Sequence[int]) -> None:
        self._settle(lambda: self._exchange.release(block_ids))

    def make_room(self, request: Request, num_tokens: int) -> Vacancy | None:
        """Hold blocks for the KV of a prompt's first tokens. None: there is none to be filled."""
        memory = self.memory
        if memory is None:
            return None
        root, exchange = root_hash(request.cache_salt, request.adapter), self._exchange
        num_tokens = min(num_tokens, request.num_prompt_tokens - 1)  # the last one is always computed
        hashes, contents = extend_chain(root, request.prompt_token_ids[:num_tokens], self.block_size)
        group = self._eviction.group_of(request)
        room = self._books.read(lambda: exchange.make_room(hashes))

        def publish(num_filled: int) -> None:
            self._settle(lambda: exchange.publish(room, hashes, contents, num_filled, parent=root, group=group))

        return Vacancy(memory, room, hashes[len(room.found) :], publish)

    def close(self) -> None:
        """Note that the engine has ended. Its memory stays for those who use it now."""
        self.memory = None

    def _settle(self, give_back: Callable[[], None]) -> None:
        """Give blocks back, however long the engine keeps its books."""
        while self.memory is not None:
            with contextlib.suppress(TimeoutError):
                self._books.read(give_back)
                return
