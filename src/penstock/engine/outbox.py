"""The requests in flight, and the delivery of their chunks. Used by an engine, and by the front of a cluster."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.engine.core import request_stats
from penstock.engine.ports import Observer, OutputChunk, OutputSink
from penstock.sched import progress
from penstock.types.errors import Rejected, RejectReason
from penstock.types.request import FinishReason, Request


class Outbox:
    """The requests in flight, from `submit` to their finish chunk, and the delivery of their chunks. Thread-safe."""

    def __init__(self, sink: OutputSink, observer: Observer) -> None:
        self._sink = sink
        self._observer = observer
        self._lock = threading.Lock()
        self._prompt_lens: dict[str, int] = {}
        self._background: set[str] = set()
        """Ids of background requests, whose prompts count as empty."""
        self._num_prompt_tokens = 0
        self._cut_short_ids: frozenset[str] = frozenset()

    def add(self, requests: Sequence[Request]) -> None:
        """Count requests as in flight. Raises `Rejected` (INVALID), and adds none, if an id is taken."""
        coming: dict[str, int] = {}
        with self._lock:
            for request in requests:
                request_id = request.request_id
                if request_id in self._prompt_lens or request_id in coming:
                    detail = f"a request with the id {request_id!r} is still running"
                    raise Rejected(RejectReason.INVALID, detail, param="request_id")
                coming[request_id] = 0 if request.background else request.num_prompt_tokens
            self._background.update([request.request_id for request in requests if request.background])
            self._prompt_lens |= coming
            self._num_prompt_tokens += sum(coming.values())

    def counts(self) -> tuple[int, int]:
        """Return (requests in flight, their prompt tokens), without background requests."""
        with self._lock:
            return len(self._prompt_lens) - len(self._background), self._num_prompt_tokens

    def cut_short(self) -> list[str]:
        """Return the ids of all requests in flight, to be aborted. They then end with DRAINING as the reject reason."""
        with self._lock:
            request_ids = list(self._prompt_lens)
            self._cut_short_ids |= frozenset(request_ids)
        return request_ids

    def deliver(self, chunks: list[OutputChunk]) -> None:
        ended = [chunk for chunk in chunks if chunk.finish_reason is not None]
        if ended:
            with self._lock:
                for chunk in ended:
                    self._num_prompt_tokens -= self._prompt_lens.pop(chunk.request_id)
                    self._background.discard(chunk.request_id)
                    if chunk.finish_reason is FinishReason.ABORT and chunk.request_id in self._cut_short_ids:
                        chunk.reject_reason = chunk.reject_reason or RejectReason.DRAINING.value
        if chunks:
            self._sink(chunks)

    def refuse(self, requests: Sequence[Request], reason: RejectReason, now_ns: int) -> None:
        """End requests as REJECTED, since the engine takes no more."""
        chunks: list[OutputChunk] = []
        for request in requests:
            progress.end(request, FinishReason.REJECTED)
            self._observer.on_finish(request_stats(request, now_ns, reason.value))
            chunk = OutputChunk(request.request_id, "", (), (), now_ns)
            chunk.finish_reason, chunk.reject_reason = FinishReason.REJECTED, reason.value
            chunk.detail = "its model was unloaded, or the server is shutting down"
            if reason is not RejectReason.DRAINING:
                chunk.detail = "no engine is running that could answer"
            chunks.append(chunk)
        self.deliver(chunks)
