"""Clients' connections: the acceptor that takes them, and uvicorn's HTTP/1.1 protocol with bounds on it.

The acceptor makes one `HttpConnection` for every client, on the event loop. A connection reads requests and refuses
malformed ones. It looks at a route only to answer a probe also when too many connections have a request. Its bounds:

- Head: at most `MAX_HEAD_BYTES`, as are trailers and whatever else brings no body; beyond is a 431. Host and version are as
  RFC 9112 wants them (sections 2.3 and 3.2), with no chunks in HTTP/1.0 (6.1). A proxy that takes such a request for another
  one could be made to smuggle one in.
- Time to send: a request that has begun goes on by `MIN_BYTES_PER_CHECK` in every `read_timeout_s`; else it is a 408.
- Time to read: a client that takes nothing of an answer for `write_timeout_s`, with more waiting than the system's buffers
  hold, is cut off.
- Places: a connection is idle, and may be closed for others, when its client has the answer. The app writes an answer long
  before that; the rest lies in asyncio's buffer. A client that takes nothing of it for `STALL_S` loses its place, too.
- Upgrades: an offer of another protocol (HTTP/2 by Java's client or curl, WebSocket) is passed over, as RFC 9110, 7.8 allows.
- Refusals: the client gets an error object. Its further bytes are dropped for a while, so that it gets to read that.

uvicorn has no settings for these, so this file overrides its protocol and reads its attributes, and two of asyncio's.
`tests/server/test_library_internals.py` fails when a new version has others.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import re
import socket
import ssl
import sys
import termios
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, ClassVar, Self, TypeVar

import httptools
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.serve.errors import (
    ApiError,
    cancelled,
    invalid,
    request_head_too_large,
    request_too_large,
    unavailable,
    version_not_supported,
)
from penstock.serve.http.access_log import AccessLog, refusal
from penstock.serve.http.checks import LINGER_S, OPEN_PATHS, entry_of
from penstock.serve.http.cors import Cors
from penstock.serve.http.listener import NUM_EXTRA_CONNECTIONS

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 1 << 16
MIN_BYTES_PER_CHECK = 1 << 14
"""At least 4.4 kbit/s, over 30 s."""

_MAX_BEHIND = 8
"""Requests that are read while an earlier one is answered; with more, reading stops until some are."""

STALL_S = 5.0
"""A client that takes nothing of its answer for longer loses its place. Before its fourth repetition of a segment, TCP has
waited for 3 s in all."""

_LOOK_EVERY_S = 0.5
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings", b"connection"})
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})
_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""RFC 3986, 3.2.2. Empty where the address has no host."""
CLIENT_LEFT = "the client closed the connection"
_Result = TypeVar("_Result")


class HttpConnection(HttpToolsProtocol):
    read_timeout_s: ClassVar[float] = 30.0
    write_timeout_s: ClassVar[float] = 60.0

    def __init__(
        self,
        *args: Any,
        acceptor: Acceptor,
        max_body_bytes: int,
        cors: Cors | None = None,
        access_log: AccessLog | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._acceptor = acceptor
        self._max_body_bytes = max_body_bytes
        self._cors = cors
        self._access_log = access_log
        self.parser = self._make_parser()
        self._is_reading = False
        """True while a request has begun and not ended."""
        self._is_in_head = False
        """True until its head has ended."""
        self._is_offered_upgrade = False
        self._is_refused = False
        self._refusal: ApiError | None = None
        """Set by a parser's callback that stops the parser."""
        self._num_bytes = 0
        self._num_bytes_at_check = 0
        self._num_bytes_without_body = 0
        self._has_news = False
        """True if a request began, or a piece of body came, with the last bytes."""
        self._read_timer: asyncio.TimerHandle | None = None
        self._num_untaken_at_check = 0
        self._write_timer: asyncio.TimerHandle | None = None
        """Set while uvicorn's writing is paused."""
        self._num_untaken = 0
        self._taken_at_s = 0.0
        """When `_num_untaken` was set."""
        self._idle_timer: asyncio.TimerHandle | None = None
        """Set while the client takes the rest of an answer that the app has written."""
        self._answering: RequestResponseCycle | None = None
        """The request that the app works on; `cycle` is the one that came last."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._socket_transport = _below_tls(transport)
        # uvicorn waits for ever for the first request.
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._acceptor.lost(self)
        self._stop_read_timer()
        self._stop_write_timer()
        self._stop_idle_timer()
        super().connection_lost(exc)
        # uvicorn tells the request that came last.
        answering, self._answering = self._answering, None
        _tell_gone(answering)
        for cycle, _app in self.pipeline:
            cycle.on_response = _do_nothing
        self.pipeline.clear()
        _untie(self._socket_transport)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._num_bytes += len(data)
        self._has_news = False
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            _log.debug("a request that is no HTTP/1.1: %s", error)
            self._refuse(self._refusal or self._meaning_of(error))
            return
        if self._is_reading:
            self._watch_reading(len(data))
        elif self.timeout_keep_alive_task is None and (self.cycle is None or self.cycle.response_complete):
            # What came was an empty line, or the end of a request that had been answered before.
            self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._start_write_timer()

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_reading = self._is_in_head = self._has_news = True

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # Trailers come here, too, and nobody asks for them.
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._refusal = self._wrong_in_head()
        if self._refusal is not None:
            raise self._refusal
        self._is_offered_upgrade = self.parser.should_upgrade()
        if not self._is_offered_upgrade:
            super().on_headers_complete()
            self._is_in_head = False
            if 0 < len(self.pipeline) <= _MAX_BEHIND:
                # A server that does not read does not notice either that the client leaves.
                self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._has_news = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_offered_upgrade:
            return
        self._is_reading = False
        self._stop_read_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.pipeline and (self.timeout_keep_alive_task is not None or self.transport.is_closing()):
            self._be_idle_when_taken()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def shutdown(self) -> None:
        """Close without waiting for a request that has not come whole."""
        if self._is_answering_earlier() or not (self._is_refused or self._is_reading):
            super().shutdown()
        else:
            self.leave(unavailable("The server is shutting down."))

    def leave(self, error: ApiError) -> None:
        """Close this connection, which is owed no answer. A request that has not come whole is told the error."""
        if self._is_refused or not self._is_reading:
            self.transport.close()
        else:
            self._refuse(error, lingers=False)

    def cut_off(self) -> None:
        """Close this connection now. Closing alone waits for a client that does not read, or, with TLS, says no good-bye."""
        self._socket_transport.abort()

    def _make_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # As uvicorn has it; versions are looked at with the rest of the head.
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        return parser

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # The parser takes what follows such a head for another protocol: give it the head without the offer.
            head = self._head_without_offer()
            self.parser = self._make_parser()
            self.parser.feed_data(head + data[offer.args[0] :])

    def _wrong_in_head(self) -> ApiError | None:
        """Why a head that can be parsed is refused, or None."""
        if len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers]) > MAX_HEAD_BYTES:
            return request_head_too_large(MAX_HEAD_BYTES)
        version = self.parser.get_http_version()
        if version[:2] != "1.":
            return version_not_supported()
        # The parser leaves white space behind a value, which RFC 9112, 5.1 counts as no part of it.
        hosts = [value.rstrip(b" \t") for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            return invalid(f"An HTTP/1.1 request has one header Host, and this one {len(hosts) or 'none'}.", "Host")
        if hosts and not _HOST.fullmatch(hosts[0]):
            return invalid("The header Host is no host with an optional port.", "Host")
        if version == "1.0" and any(name == b"transfer-encoding" for name, _ in self.headers):
            return invalid("HTTP/1.0 has no Transfer-Encoding: send a Content-Length, or HTTP/1.1.", "Transfer-Encoding")
        self._stop_idle_timer()
        if not self._acceptor.begin(self) and self.url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            return self._acceptor.too_many()
        return None

    def _meaning_of(self, error: Exception) -> ApiError:
        """The answer to a parser's finding, which the parser tells in words alone."""
        match str(error):
            case "Content-Length overflow":  # 2^64 or more
                return request_too_large(self._max_body_bytes)
            case "Pause on PRI/Upgrade":  # the first line of HTTP/2
                return version_not_supported()
        return invalid("This is no valid HTTP/1.1 request.")

    def _head_without_offer(self) -> bytes:
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self.headers if name not in _UPGRADE_HEADERS]
        connection = [token.strip() for name, value in self.headers if name == b"connection" for token in value.split(b",")]
        lines += [b"connection: " + token for token in connection if token.lower() not in _UPGRADE_TOKENS]
        return b"\r\n".join([*lines, b"", b""])

    def _watch_reading(self, num_bytes: int) -> None:
        # Bytes that came together with the begin of a request, or with body, may belong to those.
        self._num_bytes_without_body = 0 if self._has_news else self._num_bytes_without_body + num_bytes
        if self._num_bytes_without_body > MAX_HEAD_BYTES:
            self._refuse(request_head_too_large(MAX_HEAD_BYTES))
        elif self._read_timer is None:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        self._num_bytes_at_check = self._num_bytes
        self._read_timer = self.loop.call_later(self.read_timeout_s, self._check_progress)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_progress(self) -> None:
        is_waiting_for_us = self.flow.read_paused or self._is_answering_earlier()
        if is_waiting_for_us or self._num_bytes - self._num_bytes_at_check >= MIN_BYTES_PER_CHECK:
            self._start_read_timer()
        else:
            message = (
                f"The request has not come whole: almost nothing of it came within {self.read_timeout_s:g} s. Send it again."
            )
            self._refuse(ApiError(408, message, code="request_timeout", error_type="timeout_error"))

    def _start_write_timer(self) -> None:
        self._num_untaken_at_check = self._num_untaken_bytes()
        self._write_timer = self.loop.call_later(self.write_timeout_s, self._check_taken)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _check_taken(self) -> None:
        if self._num_untaken_bytes() != self._num_untaken_at_check:
            self._start_write_timer()
        else:
            _log.debug("a client took nothing of its answer in %g s", self.write_timeout_s)
            self.cut_off()

    def _be_idle_when_taken(self) -> None:
        self._stop_idle_timer()
        self._num_untaken = self._num_untaken_bytes()
        if self._num_untaken == 0:
            self._acceptor.idle(self)
        else:
            self._taken_at_s = self.loop.time()
            self._idle_timer = self.loop.call_later(_LOOK_EVERY_S, self._look_whether_taken)

    def _look_whether_taken(self) -> None:
        if self._num_untaken_bytes() != self._num_untaken:
            self._be_idle_when_taken()
        elif self.loop.time() - self._taken_at_s > STALL_S:
            self._acceptor.idle(self)
            self._idle_timer = self.loop.call_later(max(0.0, self.write_timeout_s - STALL_S), self._cut_off_untaken)
        else:
            self._idle_timer = self.loop.call_later(_LOOK_EVERY_S, self._look_whether_taken)

    def _cut_off_untaken(self) -> None:
        if self._num_untaken_bytes() != self._num_untaken:
            self._be_idle_when_taken()
        else:  # closing alone would wait for the client
            self.cut_off()

    def _num_untaken_bytes(self) -> int:
        """Number of bytes that asyncio and the system hold and the client's system has not acknowledged (tcp(7), SIOCOUTQ).

        It is 0 as soon as the system has all, which it sends also when the connection is closed. While nothing is written, the
        number changes only if the client takes some; TLS may then add bytes that it kept back. asyncio's part alone changes by
        megabytes at a time, since a socket is writable only when a third of the system's buffer is free.
        """
        num_unsent = self._socket_transport.get_write_buffer_size()
        if num_unsent == 0:
            return 0
        queued = fcntl.ioctl(self._socket_transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return num_unsent + int.from_bytes(queued, sys.byteorder)

    def _stop_idle_timer(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def _await_request(self) -> None:
        self._unset_keepalive_if_required()
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def _is_answering_earlier(self) -> bool:
        """True if the answer that is made belongs to an earlier request than the one that is read."""
        return bool(self.pipeline) or (self._is_in_head and self.cycle is not None and not self.cycle.response_complete)

    def _refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Answer, if this request's answer has not begun and no other's is due before it, and close when all is said."""
        self._is_refused = True
        self._stop_read_timer()
        if self._is_in_head and self._is_answering_earlier():
            self.cycle.keep_alive = False
            return
        self._be_idle_when_taken()
        if self._can_answer():
            headers = self.server_state.default_headers
            if self._cors is not None:
                headers = headers + self._cors.headers(dict(reversed(self.headers or ())))
            self.transport.write(_as_bytes(error.response(), headers))
            if self._access_log is not None:
                self._note_refusal(error, self._access_log)
            if lingers and self.transport.can_write_eof():
                # Closing with bytes unread would reset the connection, and the answer might be lost.
                self.transport.write_eof()
                self.flow.resume_reading()
                self.loop.call_later(LINGER_S, self.transport.close)
                _tell_gone(self.cycle)
                return
        self.transport.close()

    def _note_refusal(self, error: ApiError, log: AccessLog) -> None:
        """Have the access log tell of it; where the app has the request, its own line does."""
        if not self._is_in_head and self._is_reading:
            entry = entry_of(dict(self.cycle.scope))
            if entry is not None:
                entry.status = error.status_code
        else:
            has_url = self._is_in_head and bool(self.url)
            method, url = (self.parser.get_method(), self.url) if has_url else (b"", b"")
            log.add(refusal(self.client, method, url, error.status_code, len(error.body())))

    def _can_answer(self) -> bool:
        if self._is_answering_earlier():
            return False
        return self.cycle is None or self._is_in_head or not self.cycle.response_started


def _tell_gone(cycle: RequestResponseCycle | None) -> None:
    """Count the client as gone: tasks that work on this request, or wait for its body, are told."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _below_tls(transport: asyncio.Transport) -> asyncio.Transport:
    """The socket's own transport, also where TLS has one above it.

    TLS's transport hands the bytes down at once and counts them no more, so a client that reads slowly is seen below alone.
    Closed twice, it forgets the transport below, and can no longer abort it.
    """
    below: asyncio.Transport | None = getattr(getattr(transport, "_ssl_protocol", None), "_transport", None)
    return below or transport


def _untie(transport: asyncio.BaseTransport) -> None:
    """Free a lost connection's transport at once: it holds a method of its own, and would wait for the garbage collector.

    That is 1 kB in 7 objects for each connection (Python 3.11, by tracemalloc), which stays until the collector looks through
    the oldest objects.
    """
    if hasattr(transport, "_read_ready_cb"):
        transport._read_ready_cb = _do_nothing


def _do_nothing() -> None:
    """Stands for a method of a lost connection: in its transport, which would read, and in requests that never begin. uvicorn
    does the same at a request's end."""


def _as_bytes(response: Response, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    status = response.status_code
    headers = {**dict(default_headers), **dict(response.raw_headers), b"connection": b"close"}
    lines = [b"HTTP/1.1 %d %s" % (status, HTTPStatus(status).phrase.encode())]
    lines += [name + b": " + value for name, value in headers.items()]
    return b"\r\n".join([*lines, b"", bytes(response.body)])


class ClientWatch:
    """Watches one client while its answer is made: when it goes, work on its behalf is given up at once.

    Endpoints make it after the body was read, as nothing else may call `receive` meanwhile. `stop` it when the answer is
    complete.
    """

    def __init__(self, http: HttpRequest, on_gone: Callable[[], object]) -> None:
        self._task: asyncio.Task[None] | None = asyncio.create_task(_wait_for_end(http.receive, on_gone))

    def stop(self) -> None:
        """Idempotent."""
        # Let go of, since a task that was cancelled remembers where, and so this object.
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()


async def unless_gone(http: HttpRequest, work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of `work`. Raises 499, and gives the work up, if the client leaves before."""
    task = asyncio.current_task()
    assert task is not None
    has_left = False

    def give_up() -> None:
        nonlocal has_left
        has_left = True
        task.cancel()

    try:
        with ClientWatch(http, give_up):
            return await work
    except asyncio.CancelledError:
        if has_left and not task.uncancel():
            raise cancelled(CLIENT_LEFT) from None
        raise


async def _wait_for_end(receive: Receive, on_gone: Callable[[], object]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    on_gone()


GRACE_S = 0.5
"""A connection that has been idle for less is not closed for others: a request from far away takes as long to arrive."""

_CLOSING_S = 0.1
"""Time for a client to take the bytes that it was sent, if others need its place."""
_MAX_AT_ONCE = 64
"""Connections that are accepted before the event loop goes on with other work."""
_RETRY_S = 0.5
_REPORT_EVERY_S = 1.0


class Acceptor:
    """Takes connections from the listening socket, and keeps their number below what the process may open.

    Every connection tells it when a request begins, and when no answer is owed any more. It never reads or writes a byte.

    - At the limit, each new connection closes the one that has been idle for the longest, as nginx does with its `reusable
      connections`. One that became idle less than `GRACE_S` ago stays, since its request may be on its way.
    - If all are busy, up to `NUM_EXTRA_CONNECTIONS` more are accepted. Their requests are answered 503, and probes as always.
    - Beyond that, new connections wait in the listening socket's queue, up to `listener.BACKLOG`.
    - If another process or a lower limit took the descriptors, the oldest idle connection is closed, and it tries again.

    asyncio's own server (`loop.create_server`) has no limit: out of descriptors, it pauses for a second, again and again.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[..., HttpConnection],
        *,
        max_connections: int,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        """Begin to accept. `close` it before the listener.

        `make_connection`: called with the keyword `acceptor`.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_connection = make_connection
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self._connections: set[HttpConnection] = set()
        """Connections that have a descriptor."""
        self._idle_since_s: dict[HttpConnection, float] = {}
        """Connections that are `idle`, the longest first."""
        self._opening: dict[HttpConnection, tuple[socket.socket, asyncio.Task[object]]] = {}
        """Connections without a transport yet; with TLS, until the handshake. The event loop holds their tasks only weakly."""
        self._retry_timer: asyncio.TimerHandle | None = None
        """Set while nothing is accepted."""
        self._is_closed = False
        self._num_closed = 0
        self._num_refused = 0
        self._reported_at_s = -_REPORT_EVERY_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._retry_timer is None:
            self._loop.remove_reader(self._listener)
        else:
            self._retry_timer.cancel()
            self._retry_timer = None
        for accepted, _ in self._opening.values():
            _hang_up(accepted)

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Shake hands with new connections by this context; those that are open keep theirs."""
        self._ssl_context = context

    def begin(self, connection: HttpConnection) -> bool:
        """Count the connection as busy: it has the head of a request. False if too many are: refuse it with `too_many`."""
        self._idle_since_s.pop(connection, None)
        return len(self._connections) - len(self._idle_since_s) <= self._max_connections

    def too_many(self) -> ApiError:
        """A 503 for a request beyond the limit, counted for the log."""
        self._num_refused += 1
        self._report()
        return unavailable(f"{self._max_connections} connections have a request each, and no more may (--max-connections).")

    def idle(self, connection: HttpConnection) -> None:
        """Count the connection as idle, so that it may be closed for others: it is owed no answer, or its client takes none."""
        if connection in self._connections:
            self._idle_since_s.pop(connection, None)
            self._idle_since_s[connection] = self._loop.time()

    def lost(self, connection: HttpConnection) -> None:
        """Forget a connection that is closed. Idempotent."""
        self._connections.discard(connection)
        self._idle_since_s.pop(connection, None)
        if self._retry_timer is not None:
            self._resume()

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if len(self._connections) >= self._max_connections + NUM_EXTRA_CONNECTIONS:
                self._make_room()
                self._pause()
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # asyncio's own loop goes on here, and logs a traceback for each connection of the backlog.
                self._make_room()
                self._report(f"No connection can be accepted: {error.strerror}. ")
                self._pause()
                return
            self._open(accepted)
            if len(self._connections) > self._max_connections:
                self._make_room()

    def _open(self, accepted: socket.socket) -> None:
        connection = self._make_connection(acceptor=self)
        self._connections.add(connection)
        self.idle(connection)
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: connection, accepted, ssl=self._ssl_context))
        self._opening[connection] = accepted, task
        task.add_done_callback(partial(self._on_opened, connection))

    def _on_opened(self, connection: HttpConnection, task: asyncio.Task[object]) -> None:
        del self._opening[connection]
        if task.cancelled() or task.exception() is not None:
            # Of a handshake that failed, asyncio tells the connection nothing.
            self.lost(connection)

    def _make_room(self) -> None:
        """Close the connection that has been idle for the longest, if it is none that has just come."""
        connection = next(iter(self._idle_since_s), None)
        if connection is None or self._loop.time() - self._idle_since_s[connection] < GRACE_S:
            return
        self._num_closed += 1
        self._report()
        self.idle(connection)  # It is closing, and neither busy nor the next to leave.
        if connection in self._opening:
            _hang_up(self._opening[connection][0])
        else:
            connection.leave(unavailable("Other connections need the place of this one, whose request has not come."))
            self._loop.call_later(_CLOSING_S, self._cut_off, connection)

    def _cut_off(self, connection: HttpConnection) -> None:
        if connection in self._connections:
            connection.cut_off()

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._retry_timer = self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        assert self._retry_timer is not None
        self._retry_timer.cancel()
        self._retry_timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _report(self, cause: str = "") -> None:
        """Write a line to the log, unless there was one lately."""
        now_s = self._loop.time()
        if now_s - self._reported_at_s < _REPORT_EVERY_S:
            return
        _log.warning(
            "%s%d connections are open; %d may have a request (--max-connections, the limit of open files). "
            "Since the last such line, idle connections closed for others: %d, requests answered 503: %d",
            cause,
            len(self._connections),
            self._max_connections,
            self._num_closed,
            self._num_refused,
        )
        self._reported_at_s = now_s
        self._num_closed = self._num_refused = 0


def _hang_up(accepted: socket.socket) -> None:
    """Shut a socket down that the event loop holds, which takes it as the client's leaving."""
    with contextlib.suppress(OSError):  # The client has left.
        accepted.shutdown(socket.SHUT_RDWR)
