r"""The facts about a request that are known at its end, for the request log and for traces. Endpoints fill them in.

request --> NotedRequests (a layer of the app) --> Entry --> Backlog --> a thread: lines of the log
refusal of the connection -----------------------> Entry -----^  \----> another one: spans
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.obs.explain.explanation import Explanation
from penstock.obs.trace_context import TraceContext, new_span_id
from penstock.serve.http.checks import identity_of, key_name

ENTRY_KEY = "penstock.entry"
"""Key of a scope: the request's `Entry`."""
MAX_QUEUED = 10_000
"""Most ended requests that wait for a thread, some 10 MB."""
MAX_TOLD_CHARS = 200
"""Most characters that are told of a text from the client, such as a path or a model's name."""
_MAX_AT_ONCE = 256


class Tracing(Protocol):
    def begin(self, scope: Scope) -> TraceContext:
        """Return the context of a request that has found its model."""
        ...


@dataclass(slots=True, kw_only=True)
class Part:
    """Something that a request waited for, or a request to another server."""

    name: str
    began_ns: int
    ended_ns: int
    span_id: str = field(default_factory=new_span_id)
    is_elsewhere: bool = False
    """Another server computed it."""
    result: str = ""
    """How it ended, if it was elsewhere."""
    num_prompt_tokens: int | None = None
    num_generated_tokens: int | None = None


@dataclass(slots=True, kw_only=True)
class Entry:
    """The facts about one request. None means unknown."""

    client: str
    method: str
    path: str
    """Without the query, which may contain a secret."""
    began_ns: int = 0
    """The end of its head, by the server's clock."""
    ended_ns: int = 0
    ended_unix_ns: int = 0
    key: str = ""
    """Name of the API key."""
    status: int | None = None
    num_bytes: int = 0
    """Bytes of the answer's body handed to the connection."""
    ttft_s: float | None = None
    operation: str = ""
    """The work of its model, as OpenTelemetry names it: `chat`, `text_completion`, `embeddings`. Empty if it found no model."""
    model: str | None = None
    count_tokens: Callable[[], tuple[int, int]] | None = None
    """Returns the numbers of prompt tokens and of answer tokens."""
    explain: Callable[[], Sequence[Explanation]] = tuple
    """Explains its choices, as far as they are remembered. For any thread; it may wait for a replica."""
    parts: list[Part] = field(default_factory=list)
    route: str = ""
    """Its route, with the model chosen and why."""
    request_id: str = ""
    client_left: bool = False
    """The client closed its connection before the end of the answer."""
    is_background: bool = False
    """A line of a batch."""
    tracing: Tracing | None = None
    trace: TraceContext | None = None

    @property
    def duration_ns(self) -> int:
        """From the end of the request's head to the end of its answer."""
        return self.ended_ns - self.began_ns


def entry_of(scope: Scope) -> Entry | None:
    """Return the request's entry, or None if nothing is made of entries."""
    entry: Entry | None = scope.get(ENTRY_KEY)
    return entry


def note_model(scope: Scope, operation: str, model: str) -> None:
    """Note the model that answers. From now on the request has a place in a trace: nobody without a key gets one."""
    entry = entry_of(scope)
    if entry is None:
        return
    entry.operation, entry.model = operation, model
    if entry.tracing is not None and entry.trace is None:
        entry.trace = entry.tracing.begin(scope)


@contextmanager
def asked_elsewhere(scope: Scope, name: str, read_clock: Callable[[], int]) -> Iterator[tuple[Part, Mapping[str, str]]]:
    """Note a request to another server, which ends with the block. Yields what to fill in, and headers that continue the trace.

    `name`: of the model there.
    """
    now_ns = read_clock()
    part, entry = Part(name=name, began_ns=now_ns, ended_ns=now_ns, is_elsewhere=True), entry_of(scope)
    if entry is not None:
        entry.parts.append(part)
    try:
        yield part, {} if entry is None or entry.trace is None else entry.trace.headers(part.span_id)
    finally:
        part.ended_ns = read_clock()


class NotedRequests:
    """ASGI middleware that gives each request an `Entry`, and hands the entry out at the end of the answer."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        read_clock: Callable[[], int],
        takers: Sequence[Callable[[Entry], None]],
        finish: Callable[[Scope, Entry], None],
        tracing: Tracing | None,
    ) -> None:
        """`takers` get the entries. `finish` adds what only the scope has."""
        self._app, self._read_clock, self._takers, self._finish, self._tracing = app, read_clock, takers, finish, tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = _words(scope["raw_path"])
        entry = scope[ENTRY_KEY] = Entry(client=client_name(scope["client"]), method=scope["method"], path=path)
        entry.began_ns, entry.tracing = self._read_clock(), self._tracing
        is_head, is_over = scope["method"] == "HEAD", False

        async def told_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                entry.client_left = True
            return message

        async def told_send(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                # A connection that refused the rest of the request has already set the status.
                entry.status = entry.status or message["status"]
            else:
                is_over = not message.get("more_body")
                if not is_head:
                    entry.num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, told_receive, told_send)
        finally:
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
    """Ended requests that wait for a thread of their own. Beyond `MAX_QUEUED`, they are dropped and counted."""

    def __init__(self, name: str, handle: Callable[[Sequence[Entry]], None], *, pause_s: float) -> None:
        """Start the thread, which `close` ends. `pause_s`: time after the first one in which others may join it."""
        self._handle = handle
        self._pause_s = pause_s
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue a request. Returns at once. Only for the event loop."""
        if self._queue.qsize() >= MAX_QUEUED:
            self.num_dropped += 1
        else:
            self._queue.put(entry)

    def close(self, timeout_s: float) -> int:
        """Let the thread finish, for at most `timeout_s`. Return how many requests were dropped, or are left."""
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join(timeout_s)
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
