r"""The facts about a request that are known at its end, for the request log and for traces. Endpoints fill them in.

request --> NotedRequests (a layer of the app) --> Entry --> Backlog --> a thread: lines of the log
refusal of the connection -----------------------> Entry -----^  \----> another one: spans
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.obs.explain.explanation import Explanation
from penstock.obs.trace_context import Span, TraceContext
from penstock.serve.http.checks import identity_of, key_name

ENTRY_KEY = "penstock.entry"
"""Key of a scope: the request's `Entry`."""
MAX_QUEUED = 10_000
"""Most ended requests that wait for a thread, some 10 MB."""
MAX_TOLD_CHARS = 200
"""Most characters of a text from the client, such as a path or a model's name."""
_MAX_AT_ONCE = 256
CLOSE_TIMEOUT_S = 3.0


class TokenCounts(NamedTuple):
    """Numbers of tokens of one call."""

    num_prompt: int
    num_cached: int
    """Tokens of the prompts that were found in the cache."""
    num_generated: int = 0


@dataclass(slots=True, kw_only=True)
class Entry:
    """Facts about one request. None means unknown."""

    client: str
    method: str
    path: str
    """Without the query, which may contain a secret."""
    began_ns: int = 0
    """When its head was complete, by the server's clock."""
    ended_ns: int = 0
    ended_unix_ns: int = 0
    key: str = ""
    """Name of the API key."""
    status: int | None = None
    num_bytes: int = 0
    """Bytes of the answer's body handed to the connection."""
    ttft_s: float | None = None
    operation: str = ""
    """Its model's work, as OpenTelemetry names it, such as `chat`. Empty if it found no model."""
    model: str | None = None
    count_tokens: Callable[[], TokenCounts] | None = None
    explain: Callable[[], Sequence[Explanation]] = tuple
    """Explains its choices. For any thread, since it may wait for a replica."""
    held_ns: int = 0
    """Time for which a route or a pipeline held the finished answer back."""
    spans: list[Span] = field(default_factory=list)
    """Its waits for a route, a pipeline and a model, and requests to other servers."""
    route: str = ""
    """Its route, with the model chosen and why."""
    request_id: str = ""
    error: str = ""
    """The code of the error that ended its stream."""
    client_left: bool = False
    """The client closed its connection before the end of the answer."""
    is_background: bool = False
    """A line of a batch."""
    work: asyncio.Future[None] | None = None
    """The rest of its work, if that goes on after the answer: the entry ends with it."""
    begin_trace: Callable[[Scope], TraceContext] | None = None
    trace: TraceContext | None = None
    _explanations: Sequence[Explanation] | None = None
    _explaining: threading.Lock = field(default_factory=threading.Lock)

    def explanations(self) -> Sequence[Explanation]:
        """Return the result of `explain`, which is called once for both the log and the trace. For their threads."""
        with self._explaining:
            if self._explanations is None:
                self._explanations = self.explain()
            return self._explanations

    @property
    def duration_ns(self) -> int:
        """From the end of the request's head to the end of its answer, or of its work in the background."""
        return self.ended_ns - self.began_ns


def entry_of(scope: Scope) -> Entry | None:
    """Return the request's entry, or None if requests are neither logged nor traced."""
    entry: Entry | None = scope.get(ENTRY_KEY)
    return entry


def note_model(scope: Scope, operation: str, model: str) -> None:
    """Note the model that answers. Tracing begins only now, so that requests refused for their key are not traced."""
    entry = entry_of(scope)
    if entry is None:
        return
    entry.operation, entry.model = operation, model
    if entry.begin_trace is not None and entry.trace is None:
        entry.trace = entry.begin_trace(scope)


@contextmanager
def asked_elsewhere(
    scope: Scope, name: str, model: str, read_clock: Callable[[], int]
) -> Iterator[tuple[Span, Mapping[str, str]]]:
    """Note a request to another server, which ends with the block. Yields its span, and headers that continue the trace.

    `name`: of the model here. `model`: its name there.
    """
    now_ns, entry = read_clock(), entry_of(scope)
    span = Span(name=f"upstream {name}", began_ns=now_ns, ended_ns=now_ns, kind="client")
    span.attributes["gen_ai.request.model"] = model
    if entry is not None:
        span.attributes["gen_ai.operation.name"] = entry.operation
        entry.spans.append(span)
    try:
        yield span, {} if entry is None or entry.trace is None else entry.trace.headers(span.span_id)
    finally:
        span.ended_ns = read_clock()


class NotedRequests:
    """ASGI middleware that creates an `Entry` for each request, and passes it to the `takers` when the request has ended."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        read_clock: Callable[[], int],
        takers: Sequence[Callable[[Entry], None]],
        finish: Callable[[Scope, Entry], None],
        begin_trace: Callable[[Scope], TraceContext] | None,
    ) -> None:
        """`finish` adds what only the scope has."""
        self._app, self._read_clock, self._takers, self._finish = app, read_clock, takers, finish
        self._begin_trace = begin_trace

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _words(scope["raw_path"])
        entry = scope[ENTRY_KEY] = Entry(client=client_name(scope["client"]), method=scope["method"], path=path)
        entry.began_ns, entry.begin_trace = self._read_clock(), self._begin_trace
        is_head, has_begun, is_over = scope["method"] == "HEAD", False, False

        async def noted_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                # The connection sets the status before the answer begins if it refuses the rest of the request.
                entry.client_left = has_begun or entry.status is None
            return message

        async def noted_send(message: Message) -> None:
            nonlocal has_begun, is_over
            if message["type"] == "http.response.start":
                has_begun = True
                entry.status = entry.status or message["status"]
            else:
                is_over = not message.get("more_body")
                if not is_head:
                    entry.num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, noted_receive, noted_send)
        finally:
            if entry.work is None:
                self._end(scope, entry)
            else:
                entry.work.add_done_callback(lambda _: self._end(scope, entry))

    def _end(self, scope: Scope, entry: Entry) -> None:
        entry.ended_ns, entry.ended_unix_ns = self._read_clock(), time.time_ns()
        entry.key, entry.request_id = key_name(scope), identity_of(scope).request_id
        self._finish(scope, entry)
        for take in self._takers:
            take(entry)


def client_name(client: tuple[str, int] | None) -> str:
    """Return the client's address and port, or an empty text if unknown."""
    if client is None:
        return ""
    return f"[{client[0]}]:{client[1]}" if ":" in client[0] else f"{client[0]}:{client[1]}"


def refusal(client: tuple[str, int] | None, method: bytes, url: bytes, status: int, num_bytes: int) -> Entry:
    """Return the entry of a request that is refused before the app sees it. Method and URL may be empty."""
    path = _words(url.partition(b"?")[0])
    return Entry(client=client_name(client), method=_words(method), path=path, status=status, num_bytes=num_bytes)


def _words(text: bytes) -> str:
    return text[:MAX_TOLD_CHARS].decode("latin-1")


class Backlog:
    """Ended requests that wait for a thread. Beyond `MAX_QUEUED`, they are dropped and counted."""

    def __init__(self, name: str, handle: Callable[[Sequence[Entry]], None], *, pause_s: float) -> None:
        """Start the thread, which `close` ends. It waits `pause_s` after a request, for others to join it."""
        self._handle, self._pause_s, self.num_dropped = handle, pause_s, 0
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue a request. Only for the event loop."""
        if self._queue.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
        else:
            self._queue.put(entry)

    def close(self) -> int:
        """Wait up to `CLOSE_TIMEOUT_S` for the thread. Return how many requests were dropped or are still queued."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)
        return self.num_dropped + (max(0, self._queue.qsize() - 1) if self._thread.is_alive() else 0)

    def _run(self) -> None:
        is_open = True
        while is_open:
            entries = [self._queue.get()]
            self._is_closing.wait(self._pause_s)
            while len(entries) < _MAX_AT_ONCE and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            self._handle([entry for entry in entries if entry is not None])
