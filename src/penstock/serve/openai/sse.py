"""Server-sent events: one write per step and client, whatever the step brought for it. Bytes in, bytes out.

The first events and the last are sent by the call's own task; all between are written to the connection in the moment in which
the step's chunks arrive, without waking a task for each. What a slow client has to wait for is sent by the task, by messages of
ASGI.
`EventWriter`s (of `completions` and `chat`) make the bytes; this file sends them and sees to an honest end: `[DONE]` after a
complete answer, an error object and nothing more after any other.
"""

from __future__ import annotations

import logging
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.engine.ports import OutputChunk
from penstock.obs.timings import RequestTimings
from penstock.serve.http.checks import ID_HEADER, identity_of
from penstock.serve.http.connection import ClientWatch, DirectLine, direct_line
from penstock.serve.openai.errors import ApiError, internal
from penstock.serve.service import CallStream

_log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\x85\u2028\u2029")
"""What Unicode counts as the end of a line and JSON lets stand in a string, with JSON's other way to write it."""
_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect events before it passes them on.
    (b"x-accel-buffering", b"no"),
)


class EventWriter(Protocol):
    """Writes the events of one answer. Called once per step, so it builds bytes from parts prepared beforehand."""

    def begin(self) -> bytes:
        """Events before the first chunk; may be empty."""
        ...

    def write(self, index: int, chunk: OutputChunk) -> bytes:
        """Events of one chunk of choice `index`; may be empty."""
        ...

    def end(self) -> bytes:
        """Events after the last chunk, without `[DONE]`; may be empty."""
        ...


class SseResponse(Response):
    """Streams one call. Owns the call and the watch on its client, and closes both."""

    def __init__(self, call: CallStream, watch: ClientWatch, writer: EventWriter, first_chunks: list[OutputChunk]) -> None:
        super().__init__()
        self._call = call
        self._watch = watch
        self._writer = writer
        self._first_chunks = first_chunks
        self._line: DirectLine | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del receive  # The watch has it.
        self._line = direct_line(scope)
        request_id = identity_of(scope).request_id
        try:
            out = _Output(self._line, send, request_id, self._timing())
            try:
                await self._send_events(out)
            except Exception:
                _log.exception("request %s failed while it was streamed", request_id)
                await out.send(error_event(internal(request_id)), more=False)
        finally:
            self._watch.stop()
            self._call.close()

    def _timing(self) -> str:
        """Of the choice that spoke first."""
        first = self._first_chunks[0]
        timings = RequestTimings(
            arrival_ns=self._call.terms.arrival_ns,
            first_scheduled_ns=first.first_scheduled_ns,
            first_token_ns=first.first_token_ns,
            ended_ns=first.at_ns,
        )
        return timings.server_timing_so_far()

    async def _send_events(self, out: _Output) -> None:
        stream = self._call.stream
        data = self._writer.begin()
        chunks = self._first_chunks
        while chunks:
            events, error = self._write(chunks)
            data += events
            if error is not None:
                await out.send(data + error_event(error), more=False)
                return
            if stream.is_ended:
                await out.send(data + self._writer.end() + DONE, more=False)
                return
            if data or not out.has_begun:
                await out.send(data, more=True)
                data = b""
            if self._line is not None:
                await stream.pass_to(self._write_directly)
            chunks = await stream.next_chunks()
        # Only a client that left gets here; the server ignores what is sent to it, but wants to see an end.
        await out.send(b"", more=False)

    def _write_directly(self, chunks: list[OutputChunk]) -> bool:
        """False if these chunks need the task: one ends its choice, or the client is slow."""
        line = self._line
        if line is None or line.is_slow or not _go_on(chunks):
            return False
        write, index_of = self._writer.write, self._call.index_of
        data = b"".join([write(index_of[chunk.request_id], chunk) for chunk in chunks])
        if data:
            line.write(whole_lines(data))
        return True

    def _write(self, chunks: list[OutputChunk]) -> tuple[bytes, ApiError | None]:
        write, index_of = self._writer.write, self._call.index_of
        if len(chunks) == 1 and chunks[0].finish_reason is None:
            return write(index_of[chunks[0].request_id], chunks[0]), None
        parts: list[bytes] = []
        for chunk in chunks:
            error = None if chunk.finish_reason is None else self._call.terms.error_of(chunk)
            if error is not None:
                # The chunk may be merged with ones before the failure: what they said is still shown.
                chunk.finish_reason = None
            parts.append(write(index_of[chunk.request_id], chunk))
            if error is not None:
                return b"".join(parts), error
        return b"".join(parts), None


class _Output:
    """The way out of one stream: directly, or by ASGI messages where the client is slow or the server is not ours."""

    def __init__(self, line: DirectLine | None, send: Send, request_id: str, timing: str) -> None:
        self._line = line
        self._send = send
        self._request_id = request_id.encode()
        self._timing = (b"server-timing", timing.encode())
        self.has_begun = False
        """The head was sent."""

    async def send(self, events: bytes, *, more: bool) -> None:
        data = whole_lines(events)
        line = self._line
        has_begun, self.has_begun = self.has_begun, True
        if line is None or line.is_slow:
            if not has_begun:
                # The layer of the request's id adds it.
                await self._send({"type": "http.response.start", "status": 200, "headers": [*_HEADERS, self._timing]})
            await self._send({"type": "http.response.body", "body": data, "more_body": more})
            return
        if not has_begun:
            line.begin((*_HEADERS, self._timing, (ID_HEADER, self._request_id)), data)
            data = b""
        if not more:
            line.end(data)
        elif data:
            line.write(data)


def _go_on(chunks: list[OutputChunk]) -> bool:
    """None of them ends its choice."""
    if len(chunks) == 1:  # nearly always, and once per token
        return chunks[0].finish_reason is None
    return all(chunk.finish_reason is None for chunk in chunks)


def error_event(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


def whole_lines(events: bytes) -> bytes:
    """The same JSON for who divides lines as Unicode does (Python's `str.splitlines`, httpx's `iter_lines`), and not at LF and
    CR alone as server-sent events do: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
    """
    if not events.isascii():
        for char, escaped in _LINE_ENDS:
            events = events.replace(char, escaped)
    return events
