"""Copies contents of KV blocks between the executor and a store (a file or host memory), on the engine's thread.

Only free blocks are moved, which no step in flight uses. When staging memory is full, spills are dropped and loads cut short,
so no step waits for the store.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from itertools import count
from queue import PriorityQueue

from penstock.clock import Clock
from penstock.engine.ports import BlockMover, BlockStore, Ready
from penstock.kv.manager import KVManager
from penstock.kv.tiers import Load, Spill
from penstock.types.errors import CorruptBlock
from penstock.types.stats import TierStats

_logger = logging.getLogger(__name__)

MAX_FAILURES = 16
"""After this many failures in a row the tier is closed."""
RETRY_NS = 60_000_000_000
"""How often one block is written to a closed tier and read back. If that works, the tier opens again."""
STAGING_BYTES = 64 << 20
MAX_STAGED_BLOCKS = 256
BLOCKS_PER_JOB = 8
"""Blocks written by one job. A load may have to wait for one such job."""
CLOSE_TIMEOUT_S = 5.0
"""Longest time that an engine's end waits for a store that hangs."""
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class FailureReason(StrEnum):
    """Why a block's content did not get to the store or back, as shown in metrics."""

    FULL = "full"
    IO = "io"
    CORRUPT = "corrupt"
    MEMORY = "memory"


Job = Callable[[], None]
Worker = Callable[[Job, bool], object]
"""Runs jobs one at a time, in any thread. Jobs with True go first, since a request waits for them."""


@dataclass(slots=True)
class _Move:
    order: Spill | Load
    buffer: int
    is_probe: bool = False
    """The block tests whether a closed tier works again."""
    failure: FailureReason | None = None
    duration_ns: int = 0


class WorkerThread:
    """Runs reads and writes of the store in a daemon thread: a store that hangs must not keep the process alive."""

    def __init__(self) -> None:
        self._jobs: PriorityQueue[tuple[int, int, Job | None]] = PriorityQueue()
        """(0 if urgent, 1 if not, 2 for the end; number; job)."""
        self._numbers = count()
        self._thread = threading.Thread(target=self._run, name="penstock-tier", daemon=True)
        self._thread.start()

    def __call__(self, job: Job, is_urgent: bool) -> None:
        self._jobs.put((int(not is_urgent), next(self._numbers), job))

    def close(self, timeout_s: float) -> bool:
        """Run all given jobs, then end the thread. Return False if that takes longer. Idempotent."""
        self._jobs.put((2, next(self._numbers), None))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()[2]) is not None:
            job()


class Transfers:
    """Copies block contents between one executor and one store, in the background."""

    def __init__(
        self,
        kv: KVManager,
        blocks: BlockMover,
        store: BlockStore,
        *,
        clock: Clock,
        stats: TierStats | None = None,
        wake: Callable[[], None] = lambda: None,
        worker: Worker | None = None,
        num_staged_blocks: int | None = None,
    ) -> None:
        """`wake` is called by the worker when a copy has ended. Raises MemoryError, and ValueError if the manager has no
        tier."""
        if kv.tier is None or kv.swapping is None:
            raise ValueError("transfers need a manager with a tier")
        self._tier, self._swapping, self._index, self._adapters = kv.tier, kv.swapping, kv.prefix.index, kv.adapters
        self._blocks, self._store, self._clock = blocks, store, clock
        self._wake = wake
        self.stats = stats or TierStats()
        self.stats.num_slots, self.stats.num_present, self.stats.is_open = store.num_slots, len(kv.tier.slots), True
        self._buffers = _staging(blocks.block_bytes, num_staged_blocks)
        self._free = list(range(len(self._buffers)))
        self._arrived: deque[list[_Move]] = deque()
        """Filled by the worker, emptied by the engine thread."""
        self._has_arrived = threading.Event()
        self._num_failures = 0
        self._retry_ns: int | None = None
        self._warned: set[str] = set()
        self._thread: WorkerThread | None = None
        if worker is None:
            worker = self._thread = WorkerThread()
        self._start = worker

    @property
    def num_moving_blocks(self) -> int:
        """Number of blocks being copied to the store or back."""
        return len(self._buffers) - len(self._free)

    # For the engine thread.

    def arrive(self) -> None:
        """Take over copies that have ended: place loaded blocks in the pool, and free the staging buffers."""
        if self._retry_ns is not None and self._clock.now_ns() >= self._retry_ns:
            self._retry_ns = self._clock.now_ns() + RETRY_NS
            self._tier.probe()
        while self._arrived:
            moves = self._arrived.popleft()
            self._place([move for move in moves if self._record(move)])
            self._free += [move.buffer for move in moves]

    def depart(self) -> None:
        """Begin the spills and loads that the tier ordered. Call this before a step or a copy can overwrite the spilled
        blocks."""
        self._spill(self._tier.take_spills())
        for loads in self._tier.take_loads():
            self._load(loads)
        self.stats.num_declined_blocks += self._tier.take_num_declined()

    def keep(self, timeout_s: float) -> None:
        """Save the contents of free blocks, last used first, for the next process, for at most `timeout_s`.

        Does nothing if the store does not outlive the process.
        """
        if not self._store.outlives_process:
            return
        until_ns = self._clock.now_ns() + int(timeout_s * 1e9)
        block_ids = self._swapping.content_to_keep()
        num_asked = len(block_ids)
        self._start(self._store.expect_newest_first, False)  # after the spills under way
        while block_ids and self._tier.is_open and self._clock.now_ns() < until_ns:
            # In this order: a move that ends after `arrive` sets the event again.
            self._has_arrived.clear()
            self.arrive()
            if count := self._num_spillable:
                self._tier.spill(block_ids[:count], self._index)
                del block_ids[:count]
                self.depart()
            else:
                self._has_arrived.wait(max(0, until_ns - self._clock.now_ns()) / 1e9)
        if num_asked:
            _logger.info(
                "%d of %d cached KV blocks that only memory held are written to the tier below",
                num_asked - len(block_ids),
                num_asked,
            )

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Finish the writes to the store, and end the thread. Idempotent."""
        if self._thread is not None and not self._thread.close(timeout_s):
            _logger.error("the store of the KV tier does not answer; what was on its way to it is lost")

    @property
    def _num_spillable(self) -> int:
        return max(0, len(self._free) - len(self._buffers) // 4)  # a quarter is kept for loads, for which requests wait

    def _spill(self, spills: Sequence[Spill]) -> None:
        is_probe = not self._tier.is_open
        # One probe at a time: probes that hang would fill the staging memory.
        num_staged = min(len(spills), int(not self.num_moving_blocks) if is_probe else self._num_spillable)
        # Keep the last: blocks unused for longest, and the ends of prompts, are evicted first.
        dropped, spills = spills[: len(spills) - num_staged], spills[len(spills) - num_staged :]
        for spill in dropped:
            self._tier.spilled(spill.block_hash, is_sound=False)
        self.stats.num_dropped_blocks += len(dropped)
        if num_staged:
            moves = [_Move(spill, self._free.pop(), is_probe) for spill in spills]
            block_ids = [spill.block_id for spill in spills]
            ready = self._blocks.read_blocks(block_ids, [self._buffers[move.buffer] for move in moves])
            for start in range(0, num_staged, BLOCKS_PER_JOB):
                part = moves[start : start + BLOCKS_PER_JOB]
                self._start(partial(self._run, part, self._try if is_probe else self._write, ready), False)

    def _load(self, loads: Sequence[Load]) -> None:
        num_staged = min(len(loads), len(self._free))
        self._tier.postpone(loads[num_staged:])
        if num_staged:
            moves = [_Move(load, self._free.pop()) for load in loads[:num_staged]]
            self._start(partial(self._run, moves, self._read), True)

    def _record(self, move: _Move) -> bool:
        """Record the end of one spill or load. Return whether it loaded usable content."""
        is_useful = False
        order, is_sound = move.order, move.failure is None
        if isinstance(order, Spill):
            self._tier.spilled(order.block_hash, is_sound=is_sound)
            self.stats.num_spilled_blocks += is_sound
            self.stats.num_written_bytes += is_sound * self._blocks.block_bytes
        else:
            is_useful = self._tier.loaded(order.block_hash, is_sound=is_sound, duration_ns=move.duration_ns)
            self.stats.num_loaded_blocks += is_sound
            self.stats.num_read_bytes += is_sound * self._blocks.block_bytes
        self.stats.num_present = len(self._tier.slots)
        if move.failure is not None:
            self._count_failure(move.failure)
            return False
        self._num_failures = 0
        if move.is_probe:
            self._reopen()
        return is_useful

    def _place(self, moves: Sequence[_Move]) -> None:
        """Put the loaded blocks of one request into the pool, after the spills that make room."""
        buffers = {move.order.block_hash: self._buffers[move.buffer] for move in moves}
        placed = self._swapping.place([move.order for move in moves if isinstance(move.order, Load)])
        self._spill(self._tier.take_spills())
        if placed:
            for number in self._adapters.take_drops():  # their blocks may be among those that were taken
                self._blocks.drop_adapter(number)
            contents = [buffers[load.block_hash] for load, _ in placed]
            self._blocks.write_blocks([block_id for _, block_id in placed], contents)

    def _count_failure(self, reason: FailureReason) -> None:
        self._num_failures += 1
        self.stats.failures[reason] = self.stats.failures.get(reason, 0) + 1
        if self._num_failures == MAX_FAILURES and self._tier.is_open:
            self._tier.close()
            self.stats.is_open = False
            self._retry_ns = self._clock.now_ns() + RETRY_NS
            _logger.error(
                "the KV tier below the pool is closed after %d failures in a row; all is computed again, and a block is "
                "tried every %d s",
                MAX_FAILURES,
                RETRY_NS // 1_000_000_000,
            )

    def _reopen(self) -> None:
        self._tier.open()
        self.stats.is_open = True
        self._retry_ns = None
        _logger.warning("a block was written to the KV tier below the pool, and read: the tier is open again")

    # For the worker's thread.

    def _run(self, moves: list[_Move], act: Callable[[_Move], None], ready: Ready | None = None) -> None:
        for move in moves:
            began_ns = self._clock.now_ns()
            try:
                if ready is not None:
                    ready()
                act(move)
            except Exception as error:  # whatever it is, the engine must hear of it, or it would wait
                self._fail(move, error)
            move.duration_ns = self._clock.now_ns() - began_ns
        self._arrived.append(moves)
        self._has_arrived.set()
        self._wake()

    def _try(self, move: _Move) -> None:
        self._write(move)
        self._read(move)

    def _write(self, move: _Move) -> None:
        self._store.write(move.order.slot, move.order.block_hash, self._buffers[move.buffer])

    def _read(self, move: _Move) -> None:
        self._store.read(move.order.slot, move.order.block_hash, self._buffers[move.buffer])

    def _fail(self, move: _Move, error: Exception) -> None:
        move.failure = _reason(error)
        kind = f"{type(move.order).__name__} {move.failure}"
        if kind not in self._warned:
            self._warned.add(kind)
            what = "written to" if isinstance(move.order, Spill) else "read from"
            _logger.warning("a KV block was not %s the tier below the pool, and will be computed again: %r", what, error)


def _reason(error: Exception) -> FailureReason:
    if isinstance(error, CorruptBlock):
        return FailureReason.CORRUPT
    if isinstance(error, MemoryError):
        return FailureReason.MEMORY
    is_full = isinstance(error, OSError) and error.errno in FULL
    return FailureReason.FULL if is_full else FailureReason.IO


def num_staged_blocks(block_bytes: int) -> int:
    return max(4, min(MAX_STAGED_BLOCKS, STAGING_BYTES // block_bytes))


def _staging(block_bytes: int, num_blocks: int | None) -> list[memoryview]:
    if num_blocks is None:
        num_blocks = num_staged_blocks(block_bytes)
    memory = memoryview(bytearray(num_blocks * block_bytes))
    return [memory[idx * block_bytes : (idx + 1) * block_bytes] for idx in range(num_blocks)]
