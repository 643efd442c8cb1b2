"""A client's connection: HTTP/1.1 on httptools' parser, with limits on the memory and the time that a client can take.

The acceptor makes one `HttpConnection` per client. Each request with a valid head becomes an `Exchange`, which gives the app
ASGI's `receive` and `send`. docs/decisions/http-connections.md lists the limits and says why we do not use a library.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import socket
import struct
import sys
import termios
import time
from collections import deque
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import Any, ClassVar
from urllib.parse import unquote

import httptools
from starlette.types import ASGIApp, Message, Scope

from penstock.serve.errors import (
    ApiError,
    invalid,
    request_head_too_large,
    request_too_large,
    version_not_supported,
)
from penstock.serve.http.acceptor import Acceptor
from penstock.serve.http.checks import OPEN_PATHS
from penstock.serve.http.cors import Cors, Headers
from penstock.serve.http.entries import entry_of, refusal
from penstock.serve.http.request_log import RequestLog
from penstock.serve.http.tls import Encryption

_log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 1 << 16
"""Limit of a request's head, and of bytes that are not body, such as trailers and chunk extensions."""
_BYTES_PER_HEADER = 32
"""Added to each header's size in the limit, as in HTTP/2 (RFC 9113, 6.5.2): an empty header takes 100 bytes of memory."""
MIN_BYTES_PER_CHECK = 1 << 14
"""Bytes that a client must send of a request in each `read_timeout_s`, and receive of an answer in each `write_timeout_s`: 4.4
and 2.2 kbit/s."""
_MAX_BEHIND = 8
"""Pipelined requests that may wait for an earlier answer. With more, reading stops."""
STALL_S = 5.0
"""A client that receives nothing of a complete answer for longer counts as idle. TCP has sent a segment four times by then."""
_LOOK_EVERY_S = 0.5
LINGER_S = 2.0
"""For this time after an early refusal, the rest of the request is read and dropped."""

_HOST = re.compile(rb"(\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""The header Host (RFC 3986, 3.2.2). It may be empty."""
_MAX_BUFFERED_BODY_BYTES = 1 << 16
"""Most bytes of a body that wait for the app. With more, reading from the connection stops."""
_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings", b"connection"})
_UPGRADE_TOKENS = frozenset({b"upgrade", b"http2-settings"})


class HttpConnection(asyncio.BufferedProtocol):
    """One client's connection: parses requests, refuses malformed ones, and lets the app answer the others in order."""

    read_timeout_s: ClassVar[float] = 30.0
    """Time in which a client must send more of a request."""
    write_timeout_s: ClassVar[float] = 60.0
    """A client that receives almost nothing of an answer in this time is disconnected."""
    keep_alive_s: ClassVar[float] = 75.0
    """Time that an idle connection stays open. Longer than in proxies and client libraries, so that they close first."""

    transport: asyncio.Transport

    def __init__(
        self,
        app: ASGIApp,
        acceptor: Acceptor,
        encryption: Encryption | None,
        *,
        max_body_bytes: int,
        cors: Cors | None = None,
        request_log: RequestLog | None = None,
    ) -> None:
        self._app = app
        self._acceptor = acceptor
        self._encryption = encryption
        self._max_body_bytes = max_body_bytes
        self._cors = cors
        self._request_log = request_log
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = self._new_parser()
        self.exchanges: deque[Exchange] = deque()
        """Requests without a complete answer. The app answers the first one."""
        self.is_taken = asyncio.Event()
        """Set while the operating system has taken all written bytes."""
        self.is_taken.set()
        self.is_reading = False
        """Whether a part of a request has come, but not its end."""
        self._reading: Exchange | None = None
        """The request to add body to. None in a head, and between requests."""
        self._url = b""
        self._headers: Headers = []
        self._num_head_bytes = 0
        self._is_offered_upgrade = False
        self.is_refused = self._is_lingering = False
        self._answered_without_end = False
        """Whether the last complete answer had neither a length nor chunks."""
        self._refusal: ApiError | None = None
        """The error, if one of the parser's callbacks refused the request."""
        self._num_bytes = 0
        """Bytes received since the last check of progress."""
        self._num_bytes_without_body = 0
        self._has_news = False
        """Whether the last bytes had body or began a request."""
        self._read_timer: asyncio.TimerHandle | None = None
        """Set while the client has to send something."""
        self._write_timer: asyncio.TimerHandle | None = None
        """Set while the client has to receive something."""
        self._num_untaken = self._num_owed = 0
        self._taken_at_s = self._owed_at_s = 0.0

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(0)  # Writing pauses as soon as the system does not take everything.
        self._acceptor.opened(self)
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self._acceptor.lost(self)
        self._stop_read_timer()
        self._stop_write_timer()
        for exchange in self.exchanges:
            exchange.leave()
        self.exchanges.clear()
        self.is_taken.set()
        self._reading = self._parser = None  # the parser refers back to this object

    def get_buffer(self, sizehint: int) -> bytearray:
        del sizehint
        return self._acceptor.buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self._is_lingering:
            return
        data = bytes(memoryview(self._acceptor.buffer)[:nbytes])
        if self._encryption is not None:
            data = self._decrypt(data, self._encryption)
        if self.is_refused or not data:
            return
        if not self.is_reading:
            self._stop_read_timer()
        self._num_bytes += len(data)
        self._has_news = False
        try:
            self._parse(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            _log.debug("not HTTP/1.1: %s", error)
            self._refuse(self._refusal or self._meaning_of(error))
            return
        if self.is_reading:
            self._watch_reading(len(data))
        elif not self.exchanges:
            # An empty line came, or the end of a request that had been answered before.
            self._await_request()

    def pause_writing(self) -> None:
        self.is_taken.clear()
        self._num_untaken = self._num_owed = self._num_untaken_bytes()
        self._taken_at_s = self._owed_at_s = self._loop.time()
        self._write_timer = self._loop.call_later(_LOOK_EVERY_S, self._look_whether_taken)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        self.is_taken.set()
        self._be_idle_when_taken()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = []
        self._num_head_bytes = 0
        self._reading = None
        self.is_reading = self._has_news = True

    def on_url(self, url: bytes) -> None:
        self._url += url
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._reading is None:  # Trailers come here, too, and nobody needs them.
            # The parser leaves white space behind a value; RFC 9112, 5.1 does not count it.
            self._headers.append((name.lower(), value.rstrip(b" \t")))
            self._count_head(len(name) + len(value) + _BYTES_PER_HEADER)

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._refusal = self._wrong_in_head(self._parser.get_http_version())
        if self._refusal is not None:
            raise self._refusal
        self._is_offered_upgrade = self._parser.should_upgrade()
        if self._is_offered_upgrade:
            return
        exchange = self._reading = self._new_exchange(self._parser)
        self.exchanges.append(exchange)
        if len(self.exchanges) == 1:
            self._acceptor.start(exchange.run(self._app))
        elif len(self.exchanges) > 1 + _MAX_BEHIND:
            # Up to then reading goes on, because a server that does not read does not notice that a client leaves.
            self.transport.pause_reading()

    def on_body(self, body: bytes) -> None:
        self._has_news = True
        if self._reading is not None and not self._reading.add_body(body):
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._is_offered_upgrade:
            return
        self.is_reading = False
        self._stop_read_timer()
        if self._reading is not None:
            self._reading.end_body()
            self._reading = None

    # What an exchange and the acceptor call

    def resume_reading(self) -> None:
        """Continue to read, unless too many requests wait already."""
        if len(self.exchanges) <= 1 + _MAX_BEHIND:
            self.transport.resume_reading()

    def write(self, data: bytes) -> None:
        if not self.transport.is_closing():
            self.transport.write(data if self._encryption is None else self._encryption.encrypt(data))

    def on_answered(self, exchange: Exchange) -> None:
        """Continue after a complete answer: run the next request, wait for one, or close."""
        self.exchanges.popleft()
        self._answered_without_end = exchange.ends_with_connection
        if not exchange.keeps_alive:
            self.exchanges.clear()
            self.is_refused = self.is_refused or not exchange.is_whole
            self.close(lingers=self.is_refused)
            self._be_idle_when_taken()
            return
        self.resume_reading()
        if self.exchanges:
            self._acceptor.start(self.exchanges[0].run(self._app))
            return
        if not self.is_reading:
            self._await_request()
        self._be_idle_when_taken()

    def drain(self, error: ApiError) -> None:
        """Close the connection when all requests are answered. An incomplete request is answered with the error."""
        if self.is_reading and not (self.is_refused or self._is_behind()):
            self._refuse(error, lingers=False)
        elif self.exchanges:
            self.exchanges[-1].keeps_alive = False
        else:
            self.close()

    def close(self, *, lingers: bool = False) -> None:
        if self._encryption is not None and not (self._is_lingering or self.transport.is_closing()):
            self.transport.write(self._encryption.farewell())
        self._stop_read_timer()
        if lingers:
            # Closing with bytes unread would reset the connection, and the client might not get to read its answer.
            self._is_lingering = True
            self.transport.write_eof()
            self.transport.resume_reading()
            self._read_timer = self._loop.call_later(LINGER_S, self.transport.close)
        else:
            self.transport.close()

    def eof_received(self) -> None:
        if self.exchanges and self.exchanges[0].ends_with_connection:
            self.cut_off()

    def cut_off(self) -> None:
        """Close at once. Bytes that asyncio has not given to the system are dropped.

        If the connection's end would look like the end of an incomplete answer, close with a TCP reset (socket(7), SO_LINGER).
        """
        sock = self.transport.get_extra_info("socket")
        if sock.fileno() >= 0 and self._has_hidden_end():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _has_hidden_end(self) -> bool:
        """Return whether the client lacks a part of an answer that has neither a length nor chunks."""
        if self.exchanges:
            return self.exchanges[0].ends_with_connection
        return self._answered_without_end and self._num_untaken_bytes() > 0

    # Parsing

    def _new_parser(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        # Pipelined requests may follow one that asks to close; and versions are checked with the rest of the head.
        parser.set_dangerous_leniencies(lenient_data_after_close=True, lenient_version=True)
        return parser

    def _parse(self, data: bytes) -> None:
        assert self._parser is not None
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._parser.get_method() == b"CONNECT":
                    raise
                # The parser takes what follows such a head for another protocol: give it the head without the offer.
                data = self._head_without_offer(self._parser) + data[offer.args[0] :]
                self._parser = self._new_parser()

    def _head_without_offer(self, parser: httptools.HttpRequestParser) -> bytes:
        lines = [b"%s %s HTTP/%s" % (parser.get_method(), self._url, parser.get_http_version().encode())]
        lines += [name + b": " + value for name, value in self._headers if name not in _UPGRADE_HEADERS]
        connection = [token.strip() for name, value in self._headers if name == b"connection" for token in value.split(b",")]
        lines += [b"connection: " + token for token in connection if token.lower() not in _UPGRADE_TOKENS]
        return b"\r\n".join([*lines, b"", b""])

    def _wrong_in_head(self, version: str) -> ApiError | None:
        """Return the error for a request's head that can be parsed but is refused, or None.

        The rules for host and version (RFC 9112, 2.3, 3.2, 6.1) prevent request smuggling by a proxy that reads the head in
        another way.
        """
        if version[:2] != "1.":
            return version_not_supported()
        hosts = [value for name, value in self._headers if name == b"host"]
        if len(hosts) != 1 and (hosts or version != "1.0"):
            return invalid(f"The request has {len(hosts)} Host headers; HTTP/1.1 requires exactly one.", "Host")
        if hosts and not _HOST.fullmatch(hosts[0]):
            return invalid("The header Host is not a host with an optional port.", "Host")
        codings = [value.lower() for name, value in self._headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            return invalid("HTTP/1.0 has no Transfer-Encoding: send a Content-Length, or HTTP/1.1.", "Transfer-Encoding")
        if codings not in ([], [b"chunked"]):
            return invalid("Transfer-Encoding can only be chunked: send the body uncompressed.", "Transfer-Encoding")
        if not self._acceptor.begin(self) and self._url.partition(b"?")[0].decode("latin-1") not in OPEN_PATHS:
            return self._acceptor.too_many()
        return None

    def _count_head(self, num_bytes: int) -> None:
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refusal = request_head_too_large(MAX_HEAD_BYTES)
            raise self._refusal

    def _meaning_of(self, error: Exception) -> ApiError:
        """Return the answer to an error of the HTTP parser, chosen by the error's text."""
        match str(error):
            case "Content-Length overflow":  # 2^64 or more
                return request_too_large(self._max_body_bytes)
            case "Pause on PRI/Upgrade":  # the first line of HTTP/2
                return version_not_supported()
        return invalid("This is not a valid HTTP/1.1 request.")

    def _new_exchange(self, parser: httptools.HttpRequestParser) -> Exchange:
        version, url = parser.get_http_version(), httptools.parse_url(self._url)
        path = url.path or b"/"
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "scheme": "http" if self._encryption is None else "https",
            "method": parser.get_method().decode("ascii"),
            "path": unquote(path.decode("ascii")),
            "raw_path": path,
            "query_string": url.query or b"",
            "root_path": "",
            "headers": self._headers,
            "client": self._address("peername"),
            "server": self._address("sockname"),
        }
        is_older = version == "1.0"
        expects_continue = not is_older and any(
            name == b"expect" and value.lower() == b"100-continue" for name, value in self._headers
        )
        keeps_alive = not is_older and parser.should_keep_alive()
        return Exchange(self, scope, keeps_alive=keeps_alive, expects_continue=expects_continue)

    def _address(self, name: str) -> tuple[str, int] | None:
        """Return address and port of the `peername` or the `sockname`, or None if the client has already left."""
        address: Sequence[Any] | None = self.transport.get_extra_info(name)
        return (address[0], address[1]) if address else None

    def _decrypt(self, data: bytes, encryption: Encryption) -> bytes:
        data = encryption.decrypt(data)
        if not self.transport.is_closing():
            self.transport.write(encryption.encrypt(b""))
        if encryption.is_over:
            self.eof_received()
            self.close()
        return data

    # Waiting for the client to send

    def _await_request(self) -> None:
        self._stop_read_timer()
        self._read_timer = self._loop.call_later(self.keep_alive_s, self.close)

    def _watch_reading(self, num_bytes: int) -> None:
        # Bytes that came together with body or the beginning of a request may be part of either.
        self._num_bytes_without_body = 0 if self._has_news else self._num_bytes_without_body + num_bytes
        if self._num_bytes_without_body > MAX_HEAD_BYTES:
            self._refuse(request_head_too_large(MAX_HEAD_BYTES))
        elif self._read_timer is None:
            self._start_read_timer()

    def _start_read_timer(self) -> None:
        self._num_bytes = 0
        self._read_timer = self._loop.call_later(self.read_timeout_s, self._check_progress)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_progress(self) -> None:
        is_held_back = not self.transport.is_reading() or self._is_behind()
        if is_held_back or self._num_bytes >= MIN_BYTES_PER_CHECK:
            self._start_read_timer()
        else:
            message = f"The request is incomplete: almost no data arrived within {self.read_timeout_s:g} s. Send it again."
            self._refuse(ApiError(408, message, code="request_timeout", error_type="timeout_error"))

    # Waiting for the client to take an answer

    def _look_whether_taken(self) -> None:
        now_s, num_untaken = self._loop.time(), self._num_untaken_bytes()
        if self._num_owed - num_untaken >= MIN_BYTES_PER_CHECK:
            self._num_owed, self._owed_at_s = num_untaken, now_s
        elif now_s - self._owed_at_s >= self.write_timeout_s:
            _log.debug("a client took almost nothing of its answer in %g s", self.write_timeout_s)
            self.cut_off()
            return
        if num_untaken != self._num_untaken:
            self._num_untaken, self._taken_at_s = num_untaken, now_s
        elif now_s - self._taken_at_s > STALL_S and not self.exchanges:
            self._acceptor.idle(self)
        self._write_timer = self._loop.call_later(_LOOK_EVERY_S, self._look_whether_taken)

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _be_idle_when_taken(self) -> None:
        if self.is_taken.is_set() and not self.exchanges:
            self._acceptor.idle(self)

    def _num_untaken_bytes(self) -> int:
        """Return the number of bytes that asyncio and the system still have for the client (tcp(7), SIOCOUTQ).

        asyncio's part alone would change by megabytes at a time.
        """
        queued = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    # Refusing

    def _is_behind(self) -> bool:
        """Return whether the request being read, or the next one, waits for an earlier answer."""
        return bool(self.exchanges) and self.exchanges[0] is not self._reading

    def _refuse(self, error: ApiError, *, lingers: bool = True) -> None:
        """Refuse the request being read, and close after all earlier answers.

        The error is only sent if no earlier answer is due and this answer has not begun.
        """
        self.is_refused = True
        self._stop_read_timer()
        reading, self._reading = self._reading, None
        if self.exchanges and self.exchanges[0] is not reading:
            if reading is not None:
                self.exchanges.pop()
            self.exchanges[-1].keeps_alive = False
            return
        if self._has_hidden_end():
            self.cut_off()
            return
        if self.exchanges:
            self.exchanges.pop().leave()
        can_answer = reading is None or not reading.has_begun
        if can_answer:
            self._answer_refused(error, reading)
        self._be_idle_when_taken()
        self.close(lingers=lingers and can_answer)

    def _answer_refused(self, error: ApiError, reading: Exchange | None) -> None:
        response = error.response()
        headers = {**dict(response.raw_headers), b"connection": b"close"}
        cors = self._cors.headers(dict(reversed(self._headers))) if self._cors is not None else []
        self.write(answer_head(response.status_code, [date_header(), *cors, *headers.items()]) + bytes(response.body))
        if reading is not None:
            # The app has the request: its own line and trace have the status.
            entry = entry_of(reading.scope)
            if entry is not None:
                entry.status = error.status_code
        elif self._request_log is not None:
            assert self._parser is not None
            method = self._parser.get_method() if self._url else b""
            entry = refusal(self._address("peername"), method, self._url, error.status_code, len(response.body))
            self._request_log.add(entry)


class Exchange:
    """One request and its answer, as ASGI's `receive` and `send`."""

    def __init__(self, connection: HttpConnection, scope: Scope, *, keeps_alive: bool, expects_continue: bool) -> None:
        self.scope = scope
        self.keeps_alive = keeps_alive
        """Whether the connection stays open after the answer."""
        self.is_whole = False
        """Whether the whole request has been received."""
        self.has_begun = False
        """Whether the app has begun the answer."""
        self.is_answered = False
        self.has_left = False
        """Whether the client has left, so that nothing can be sent."""
        self.ends_with_connection = False
        """Whether the answer has neither a length nor chunks, because the client speaks HTTP/1.0."""
        self._connection = connection
        self._expects_continue = expects_continue
        self._body = bytearray()
        self._news = asyncio.Event()
        self._head = b""
        """The head of the answer, to be written together with the first piece of the body."""
        self._has_body = self._is_chunked = False

    async def run(self, app: ASGIApp) -> None:
        """Run the app, which answers the request."""
        try:
            await app(self.scope, self.receive, self.send)
        except Exception:
            _log.exception("an answer ended in the middle")
        finally:
            if not (self.is_answered or self.has_left):
                if self.ends_with_connection:
                    self._connection.cut_off()
                else:
                    self._connection.close()

    def add_body(self, data: bytes) -> bool:
        """Add a piece of the request's body. Return False if reading should stop until the app has taken it."""
        if self.is_answered:
            return True
        self._body += data
        self._news.set()
        return len(self._body) <= _MAX_BUFFERED_BODY_BYTES

    def end_body(self) -> None:
        self.is_whole = True
        self._news.set()

    def leave(self) -> None:
        """Tell the app that the client has left."""
        self.has_left = True
        self._news.set()

    async def receive(self) -> Message:
        if not (self.has_left or self.is_answered):
            if self._expects_continue and not self.has_begun:
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._expects_continue = False
            self._connection.resume_reading()
            await self._news.wait()
            self._news.clear()
        if self.has_left or self.is_answered:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        connection = self._connection
        if not connection.is_taken.is_set():
            await connection.is_taken.wait()
        if self.has_left or self.is_answered:
            return
        if message["type"] == "http.response.start":
            self._begin(message["status"], message["headers"])
            return
        data, has_more = message.get("body", b""), message.get("more_body", False)
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if not has_more:
                data += b"0\r\n\r\n"
        elif not self._has_body:
            data = b""
        if self._head:
            data, self._head = self._head + data, b""
        connection.write(data)
        if not has_more:
            self.is_answered = True
            self._news.set()
            connection.on_answered(self)

    def _begin(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        given = dict(headers)
        self._has_body = self.scope["method"] != "HEAD" and status not in (204, 304)
        if self._has_body and b"content-length" not in given:
            self.ends_with_connection = self.scope["http_version"] == "1.0"
            self._is_chunked = not self.ends_with_connection
        more: Headers = [date_header()]
        if self._expects_continue and not self.is_whole:
            # The client may or may not send the body now (RFC 9110, 10.1.1), so its next bytes are ambiguous.
            self.keeps_alive = False
        if given.get(b"connection", b"").lower() == b"close":
            self.keeps_alive = False
        elif not self.keeps_alive:
            more.append((b"connection", b"close"))
        if self._is_chunked:
            more.append((b"transfer-encoding", b"chunked"))
        self._head = answer_head(status, [*more, *headers])
        self.has_begun = True


def date_header() -> tuple[bytes, bytes]:
    return b"date", formatdate(time.time(), usegmt=True).encode()


def answer_head(status: int, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b""))]
    for name, value in headers:
        if _CONTROL.search(value):
            raise ValueError(f"A header has a control character: {value!r}")
        lines.append(name + b": " + value)
    return b"\r\n".join([*lines, b"", b""])
