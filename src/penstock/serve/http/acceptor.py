"""Accepts connections, and keeps their number below the process's limit of open files.

- At the limit, each new connection closes the one that has been idle for the longest.
- If all are busy, `NUM_EXTRA_CONNECTIONS` more are accepted. They get 503, except for health probes.
- Beyond that, or out of descriptors, new connections wait in the listening socket's queue, and `accept` is retried later.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine
from typing import Protocol

from penstock.serve.errors import ApiError, unavailable
from penstock.serve.http.listener import NUM_EXTRA_CONNECTIONS
from penstock.serve.http.tls import Encryption

_log = logging.getLogger(__name__)

GRACE_S = 0.5
"""A connection idle for less than this is not closed for others, because its request may be on the way."""
_CLOSING_S = 0.1
"""Time for a client to receive its last bytes when its connection is closed for others."""
_MAX_AT_ONCE = 64
"""Connections to accept before the event loop turns to other work."""
_READ_BYTES = 1 << 14
"""Most bytes to read from a connection at once. These can be hundreds of requests, of 3 kB of memory each."""
_RETRY_S = 0.5
_REPORT_EVERY_S = 1.0
_POLL_S = 0.05


class Connection(Protocol):
    def drain(self, error: ApiError) -> None: ...

    def close(self) -> None: ...

    def cut_off(self) -> None: ...


class Acceptor:
    """The open connections of a server, and the tasks that answer their requests.

    asyncio's own server (`loop.create_server`) has no limit of connections, and stalls without descriptors.
    """

    def __init__(
        self,
        listener: socket.socket,
        make_connection: Callable[[Acceptor, Encryption | None], asyncio.BaseProtocol],
        *,
        max_connections: int,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        """Begin to accept connections. Call `close` before closing the listener."""
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._make_connection = make_connection
        self._max_connections = max_connections
        self._ssl_context = ssl_context
        self.connections: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()
        self.buffer = bytearray(_READ_BYTES)
        """All connections read into this buffer, one after another."""
        self._is_closed = False
        self._num_opening = 0
        """Accepted connections that have no transport yet."""
        self._idle_since_s: dict[Connection, float] = {}
        """When each idle connection became idle, earliest first."""
        self._retry_timer: asyncio.TimerHandle | None = None
        """Set while accepting is paused."""
        self._num_closed = 0
        self._num_refused = 0
        self._reported_at_s = -_REPORT_EVERY_S
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop accepting connections."""
        self._is_closed = True
        self._loop.remove_reader(self._listener)
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    async def drain(self, timeout_s: float) -> None:
        """Close each connection once its client has all answers, or after `timeout_s`."""
        for connection in list(self.connections):
            connection.drain(unavailable("The server is shutting down."))
        try:
            async with asyncio.timeout(timeout_s):
                while self.connections or self.tasks:  # noqa: ASYNC110  # so seldom that events are not worth it
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            _log.warning(
                "connections whose clients had not taken their answers after %g s: %d", timeout_s, len(self.connections)
            )
            for connection in list(self.connections):
                connection.cut_off()
            await asyncio.sleep(_POLL_S)

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Use this context for new connections."""
        self._ssl_context = context

    def start(self, work: Coroutine[object, object, None]) -> None:
        """Run `work` as a task that `drain` waits for."""
        task = self._loop.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def opened(self, connection: Connection) -> None:
        """Add a connection, now that asyncio has given it a transport."""
        self._num_opening -= 1
        self.connections.add(connection)
        self.idle(connection)
        if self._is_closed:
            connection.close()

    def begin(self, connection: Connection) -> bool:
        """Count the connection as busy. Return False if too many are busy: the caller then answers with `too_many`."""
        self._idle_since_s.pop(connection, None)
        return len(self.connections) - len(self._idle_since_s) <= self._max_connections

    def too_many(self) -> ApiError:
        """Return a 503 for a request beyond the limit, and count it for the log."""
        self._num_refused += 1
        self._report()
        return unavailable(f"All {self._max_connections} connections (--max-connections) are busy.")

    def idle(self, connection: Connection) -> None:
        """Count the connection as idle, so that it may be closed for others."""
        if connection in self.connections:
            self._idle_since_s.setdefault(connection, self._loop.time())

    def lost(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self.connections.discard(connection)
        self._idle_since_s.pop(connection, None)
        if self._retry_timer is not None:
            self._resume()

    def _accept(self) -> None:
        for _ in range(_MAX_AT_ONCE):
            if len(self.connections) + self._num_opening >= self._max_connections + NUM_EXTRA_CONNECTIONS:
                self._make_room()
                self._pause()
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # asyncio's own server would go on, and log a traceback for each waiting connection.
                self._make_room()
                self._report(f"No connection can be accepted: {error.strerror}. ")
                self._pause()
                return
            self._num_opening += 1
            self.start(self._open(accepted))
            if len(self.connections) + self._num_opening > self._max_connections:
                self._make_room()

    async def _open(self, accepted: socket.socket) -> None:
        try:
            encryption = Encryption(self._ssl_context) if self._ssl_context else None
            await self._loop.connect_accepted_socket(lambda: self._make_connection(self, encryption), accepted)
        except OSError:  # The client has left.
            accepted.close()
            self._num_opening -= 1

    def _make_room(self) -> None:
        """Close the connection that has been idle for the longest, if it has been idle for at least `GRACE_S`."""
        connection = next(iter(self._idle_since_s), None)
        if connection is None or self._loop.time() - self._idle_since_s[connection] < GRACE_S:
            return
        self._num_closed += 1
        self._report()
        del self._idle_since_s[connection]
        self.idle(connection)  # Still idle while it closes, but last in line.
        connection.drain(unavailable("The server has too many connections. It closed this one: its request was incomplete."))
        self._loop.call_later(_CLOSING_S, connection.cut_off)

    def _pause(self) -> None:
        self._loop.remove_reader(self._listener)
        self._retry_timer = self._loop.call_later(_RETRY_S, self._resume)

    def _resume(self) -> None:
        assert self._retry_timer is not None
        self._retry_timer.cancel()
        self._retry_timer = None
        self._loop.add_reader(self._listener, self._accept)

    def _report(self, cause: str = "") -> None:
        """Log how many connections were closed or refused, at most once a second."""
        now_s = self._loop.time()
        if now_s - self._reported_at_s < _REPORT_EVERY_S:
            return
        _log.warning(
            "%s%d connections are open; at most %d may be busy (--max-connections, or the limit of open files). "
            "Since the last report: idle connections closed %d, requests refused with 503 %d",
            cause,
            len(self.connections),
            self._max_connections,
            self._num_closed,
            self._num_refused,
        )
        self._reported_at_s = now_s
        self._num_closed = self._num_refused = 0
