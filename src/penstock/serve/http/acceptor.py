"""Takes connections from the listening socket, and keeps their number below what the process may open. `server` makes it.

Every connection tells the acceptor when a request begins, and when no answer is owed any more. It never reads or writes a byte.

- At the limit, each new connection closes the one that has been idle for the longest, as nginx does with its `reusable
  connections`. One that became idle less than `GRACE_S` ago stays, since its request may be on its way.
- If all are busy, up to `NUM_EXTRA_CONNECTIONS` more are accepted. Their requests are answered 503, and probes as always.
- Beyond that, new connections wait in the listening socket's queue, up to `listener.BACKLOG`.
- If another process or a lower limit took the descriptors, the oldest idle connection is closed, and accepting tried again.

asyncio's own server (`loop.create_server`) has no limit: out of descriptors, it stops accepting for a second, again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Callable
from functools import partial

from penstock.serve.errors import ApiError, unavailable
from penstock.serve.http.connection import HttpConnection
from penstock.serve.http.listener import NUM_EXTRA_CONNECTIONS

_log = logging.getLogger(__name__)

GRACE_S = 0.5
"""A connection that has been idle for less is not closed for others: a request from far away takes as long to arrive."""

_CLOSING_S = 0.1
"""Time for a client to take the bytes that it was sent, if others need its place."""
_MAX_AT_ONCE = 64
"""Connections that are accepted before the event loop goes on with other work."""
_RETRY_S = 0.5
_REPORT_EVERY_S = 1.0


class Acceptor:
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
        for connection, since_s in self._idle_since_s.items():
            if self._loop.time() - since_s >= GRACE_S:
                self._num_closed += 1
                self._report()
                self.idle(connection)  # It is closing, and neither busy nor the next to leave.
                if connection in self._opening:
                    _hang_up(self._opening[connection][0])
                else:
                    connection.leave(unavailable("Other connections need the place of this one, whose request has not come."))
                    self._loop.call_later(_CLOSING_S, self._cut_off, connection)
            return

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
