"""The lock on the engine core. The engine thread releases it while the executor computes.

Another thread can take it then, to read more of the core than its published snapshot.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

from penstock.engine.ports import Executor, Ready
from penstock.types.adapter import PackedAdapter
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.result import StepResult

T = TypeVar("T")

READ_TIMEOUT_S = 2.0


class Abandoned(Exception):
    """The executor returned after the engine had ended all requests."""


class CoreLock:
    """The lock on the engine core. The engine thread holds it except while the executor computes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._readers = threading.Lock()
        self._has_waiting_reader = False
        self._call: object | None = None
        """Stands for the engine thread's call of the executor; None outside."""
        self._is_abandoned = False

    def __enter__(self) -> None:
        if self._has_waiting_reader:  # Steps of microseconds would else follow each other so closely that no reader gets in.
            with self._readers:
                pass
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def enter_executor(self) -> None:
        self._call = object()
        self._lock.release()

    def leave_executor(self) -> None:
        """Take the lock again after a call of the executor. Raises `Abandoned` if `abandon` ended the requests meanwhile."""
        self.__enter__()
        self._call = None
        if self._is_abandoned:
            raise Abandoned

    # For any other thread.

    def executor_call(self) -> object | None:
        """Return an object that stands for the engine thread's call of the executor, another one for each call, or None."""
        return self._call

    def read(self, look: Callable[[], T]) -> T:
        """Return what `look` returns, called with the core locked. Raises TimeoutError. Never call this from a sink or an
        observer."""
        if not self._readers.acquire(timeout=READ_TIMEOUT_S):
            raise TimeoutError("another reader holds the core lock")
        try:
            self._has_waiting_reader = True
            has_lock = self._lock.acquire(timeout=READ_TIMEOUT_S)
            self._has_waiting_reader = False
            if not has_lock:
                raise TimeoutError("the engine thread holds the core lock")
            try:
                return look()
            finally:
                self._lock.release()
        finally:
            self._readers.release()

    @contextmanager
    def abandon(self) -> Iterator[bool]:
        """Lock the core although the engine thread hangs in the executor. Yields False if that thread has just returned.

        The engine thread gets `Abandoned` if its call ever returns.
        """
        call = self._call
        if call is None:
            yield False
            return
        with self._lock:
            self._is_abandoned = self._call is call
            yield self._is_abandoned


class WatchedExecutor:
    """An executor that releases the lock during every call except `drop_adapter` and `close`."""

    def __init__(self, executor: Executor, core_lock: CoreLock) -> None:
        self._executor = executor
        self._core_lock = core_lock

    @property
    def depth(self) -> int:
        return self._executor.depth

    @property
    def capacity(self) -> Capacity:
        return self._executor.capacity

    @property
    def block_bytes(self) -> int:
        return self._executor.block_bytes

    @property
    def max_adapter_rank(self) -> int:
        return self._executor.max_adapter_rank

    def submit(self, plan: StepPlan) -> Ticket:
        return self._inside(self._executor.submit, plan)

    def collect(self, ticket: Ticket) -> StepResult:
        return self._inside(self._executor.collect, ticket)

    def restrict(self, ticket: Ticket, masks: Mapping[str, bytes]) -> None:
        self._inside(self._executor.restrict, ticket, masks)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._inside(self._executor.copy_blocks, pairs)

    def read_blocks(self, block_ids: Sequence[int], out: Sequence[memoryview]) -> Ready | None:
        return self._inside(self._executor.read_blocks, block_ids, out)

    def write_blocks(self, block_ids: Sequence[int], contents: Sequence[memoryview]) -> None:
        self._inside(self._executor.write_blocks, block_ids, contents)

    def place_adapter(self, number: int, packed: PackedAdapter, block_ids: Sequence[int]) -> None:
        self._inside(self._executor.place_adapter, number, packed, block_ids)

    def drop_adapter(self, number: int) -> None:
        self._executor.drop_adapter(number)

    def close(self) -> None:
        self._executor.close()

    def _inside(self, call: Callable[..., T], *arguments: object) -> T:
        self._core_lock.enter_executor()
        try:
            return call(*arguments)
        finally:
            self._core_lock.leave_executor()
