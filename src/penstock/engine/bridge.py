"""The only way between the event loop and the engine thread: requests go in, chunks come out, one wake-up per step.

An `EventWaker` wakes the event loop without releasing the GIL. Otherwise the loop would handle a step's tokens before the
engine thread starts the next step. Without a GIL both go on at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Protocol, Self

from penstock.engine.ports import OutputChunk
from penstock.engine.state import EngineState
from penstock.kv.pool_map import PoolMap
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import Request
from penstock.types.stats import EngineLoad

_log = logging.getLogger(__name__)

MERGE_ABOVE_CHUNKS = 64
"""Chunks are merged above this mean number per request, so that a reader that lags behind needs little more memory than its
output. Merging at each step would copy all tokens each time."""


class EnginePort(Protocol):
    """The methods of the engine that the bridge calls. They are thread-safe and never block."""

    def submit(self, *requests: Request) -> None: ...

    def abort(self, request_id: str, detail: str) -> None: ...


class ServingEngine(EnginePort, Protocol):
    """The engine of a running model: an `Engine`, its supervisor, or the replicas of a cluster."""

    @property
    def state(self) -> EngineState: ...

    def load(self) -> EngineLoad: ...

    def pool_map(self) -> PoolMap: ...

    def held(self) -> AbstractContextManager[None]: ...

    def drain(self) -> None: ...

    def close(self, timeout_s: float, detail: str = ...) -> bool: ...


class ChunkReader(Protocol):
    def put(self, chunk: OutputChunk) -> None:
        """Take a chunk of output. `flush` is called after the last chunk of a batch."""
        ...

    def flush(self) -> None: ...


class _Wakeup:
    """Wakes one event loop from the engine thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatch: Callable[[_Wakeup], None]) -> None:
        self.is_pending = False
        """The event loop was woken, and has not called `dispatch` yet."""
        self.wake = make_waker(loop, partial(dispatch, self))

    def close(self) -> None:
        waker = getattr(self.wake, "__self__", None)
        if isinstance(waker, EventWaker):
            waker.close()


class Bridge:
    """Passes requests from one event loop at a time to the engine, and chunks of output to the requests' readers."""

    def __init__(self) -> None:
        self._engine: EnginePort | None = None
        self._is_detached = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._readers: dict[str, ChunkReader] = {}
        self._wakeup: _Wakeup | None = None
        self._deliveries: list[list[OutputChunk]] = []
        self._lock = threading.Lock()
        """Guards the wake-up, its `is_pending` and the deliveries. Without it, a delivery could be left without a
        wake-up."""

    def attach(self, engine: EnginePort) -> None:
        self._engine = engine

    def detach(self) -> None:
        """Drop the references to engine and loop, so that both are freed at once. Thread-safe."""
        with self._lock:
            self._is_detached, self._engine = True, None
            wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            wakeup.close()

    @property
    def num_open_requests(self) -> int:
        """Number of requests that have a reader."""
        return len(self._readers)

    def open(self, requests: Sequence[Request]) -> Stream:
        """Submit requests that are read together (`n > 1`, several prompts). Use the result in a `with` block."""
        stream = Stream(self, [request.request_id for request in requests])
        self.submit(requests, stream)
        return stream

    def submit(self, requests: Sequence[Request], reader: ChunkReader) -> None:
        """Run requests, and give their chunks to a reader until it forgets or aborts each of them."""
        engine = self._engine
        if engine is None and self._is_detached:
            raise _gone()
        if engine is None:
            raise RuntimeError("attach an engine before opening a stream")
        self._bind(asyncio.get_running_loop())
        for request in requests:
            assert request.request_id not in self._readers, f"request id {request.request_id!r} is in use"
        engine.submit(*requests)
        # Not too late: chunks are dispatched by this event loop, which is running this function.
        self._readers.update({request.request_id: reader for request in requests})

    def abort(self, request_id: str, detail: str) -> None:
        if (engine := self._engine) is not None:
            engine.abort(request_id, detail)

    def deliver(self, chunks: list[OutputChunk]) -> None:
        """Queue chunks and wake the event loop, unless a wake-up is pending. The engine's thread calls this as its sink."""
        with self._lock:
            self._deliveries.append(chunks)
            wakeup = self._wakeup
            if wakeup is None or wakeup.is_pending:
                return
            wakeup.is_pending = True
        try:
            wakeup.wake()
        except RuntimeError:
            _log.debug("the event loop is closed; nobody reads these chunks")

    def forget(self, request_id: str) -> None:
        """Drop the reader of a request. Later chunks are ignored."""
        self._readers.pop(request_id, None)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._loop is loop:
            return
        if self._loop is not None and self._loop.is_closed():
            for request_id in [*self._readers]:
                self.forget(request_id)
                self.abort(request_id, "its event loop was closed")
        if self._readers:
            raise RuntimeError("streams are open in another event loop")
        with self._lock:
            if self._is_detached:
                raise _gone()
            self._deliveries.clear()
            self._loop = loop
            self._wakeup = _Wakeup(loop, self._dispatch)

    def _dispatch(self, wakeup: _Wakeup) -> None:
        with self._lock:
            wakeup.is_pending = False
            deliveries, self._deliveries = self._deliveries, []
        readers = self._readers
        touched: dict[ChunkReader, None] = {}
        for chunks in deliveries:
            for chunk in chunks:
                reader = readers.get(chunk.request_id)
                if reader is not None:
                    reader.put(chunk)
                    touched[reader] = None
        for reader in touched:
            reader.flush()


def _gone() -> Rejected:
    detail = "The model was unloaded, or the server is shutting down."
    return Rejected(RejectReason.DRAINING, detail, retry_after_s=1.0)


class Stream:
    """The output chunks of one call's requests, in the engine's order. Leaving the `with` block aborts requests that have not
    ended."""

    def __init__(self, bridge: Bridge, request_ids: Sequence[str]) -> None:
        self._bridge = bridge
        self._loop = asyncio.get_running_loop()
        self._unfinished = dict.fromkeys(request_ids)
        self._chunks: list[OutputChunk] = []
        self._waiter: asyncio.Future[None] | None = None
        self._is_cancelled = False
        self._merge_above = MERGE_ABOVE_CHUNKS * len(request_ids)

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def is_ended(self) -> bool:
        return not self._unfinished and not self._chunks

    async def next_chunks(self) -> list[OutputChunk]:
        """Return all chunks that have come, or wait for the next ones. At most one per request. For one reader at a time."""
        if self._unfinished and not self._chunks:
            loop = asyncio.get_running_loop()
            if loop is not self._loop:  # no chunk would ever wake it
                raise RuntimeError("the stream was opened in another event loop")
            self._waiter = loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        chunks, self._chunks = self._chunks, []
        return chunks if len(chunks) <= 1 else merge_chunks(chunks)

    def put_back(self, chunks: Sequence[OutputChunk]) -> None:
        """Have `next_chunks` return these again, first."""
        if not self._is_cancelled:
            self._chunks[:0] = chunks

    def replace(self, chunks: Sequence[OutputChunk]) -> None:
        """Have `next_chunks` return these in place of what has come."""
        if not self._is_cancelled:
            self._chunks = [*chunks]

    def keep(self, request_id: str) -> None:
        """Drop what has come for the other requests, and end them."""
        self._chunks = [chunk for chunk in self._chunks if chunk.request_id == request_id]
        for other in [one for one in self._unfinished if one != request_id]:
            self._end(other, "another choice was kept")

    def put(self, chunk: OutputChunk) -> None:
        """Take a chunk from the bridge, on the event loop. `flush` follows."""
        self._chunks.append(chunk)
        if len(self._chunks) > self._merge_above:
            self._chunks = merge_chunks(self._chunks)
        if chunk.finish_reason is not None:
            self._unfinished.pop(chunk.request_id, None)
            self._bridge.forget(chunk.request_id)

    def flush(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self, detail: str) -> None:
        self._is_cancelled = True
        self._chunks.clear()
        for request_id in [*self._unfinished]:
            self._end(request_id, detail)
        self.flush()

    def _end(self, request_id: str, detail: str) -> None:
        del self._unfinished[request_id]
        self._bridge.forget(request_id)
        self._bridge.abort(request_id, detail)

    def close(self) -> None:
        if self._unfinished:
            self.cancel("the reader left")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def merge_chunks(chunks: list[OutputChunk]) -> list[OutputChunk]:
    """Return one chunk per request, with texts and tokens joined and all other fields from its last chunk."""
    grouped: dict[str, list[OutputChunk]] = {}
    for chunk in chunks:
        grouped.setdefault(chunk.request_id, []).append(chunk)
    return [group[0] if len(group) == 1 else _join(group) for group in grouped.values()]


def _join(group: list[OutputChunk]) -> OutputChunk:
    first, last = group[0], group[-1]
    return replace(
        last,
        text="".join([chunk.text for chunk in group]),
        token_ids=tuple([token_id for chunk in group for token_id in chunk.token_ids]),
        logprobs=tuple([entry for chunk in group for entry in chunk.logprobs]),
        first_scheduled_ns=last.first_scheduled_ns or first.first_scheduled_ns,
        first_token_ns=last.first_token_ns or first.first_token_ns,
    )


def make_waker(loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> Callable[[], object]:
    """Return a function that any thread may call to have `function` called soon on the loop."""
    with contextlib.suppress(AttributeError, ImportError, NotImplementedError, OSError):
        return EventWaker(loop, function).wake
    return partial(loop.call_soon_threadsafe, function)


class EventWaker:
    """Wakes the event loop through an `eventfd`. It is written with ctypes' `PyDLL`, which keeps the GIL."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Raises AttributeError, ImportError, NotImplementedError or OSError if the platform lacks `eventfd`."""
        import ctypes

        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = (ctypes.c_int, ctypes.c_uint64)
        self._function: Callable[[], object] = function
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # Closed with the last reference: a late wake must not write to another file that got its number.
        weakref.finalize(self, os.close, self._event).atexit = False
        self._loop = loop
        loop.add_reader(self._event, self._on_event)

    def close(self) -> None:
        """Stop waking the event loop, after one last call of the function. Thread-safe."""
        try:
            self._loop.call_soon_threadsafe(self._end)
        except RuntimeError:  # the loop is closed, and has forgotten it
            self._function = tuple

    def _end(self) -> None:
        """Call the function a last time: a wake for an engine's last chunks may not have reached it."""
        self._loop.remove_reader(self._event)
        function, self._function = self._function, tuple
        function()

    def wake(self) -> None:
        self._write(self._event, 1)

    def _on_event(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event)
        self._function()
