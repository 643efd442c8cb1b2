"""The HTTP load generator: sends a workload to an OpenAI-compatible server, and tells what became of each request.

One thread, non-blocking sockets, `epoll`. The client shares the machine with the server, so while it measures it takes bytes
and notes when they came. Only the end of an answer is found at once (`answers.Framing`), and the text of a turn that a
conversation continues. All else is read after the run, or when more than `MAX_HELD_BYTES` wait for that. Latencies count from
the instant at which a request was due, so a client or server that falls behind hides nothing. Sends a request again only if
an idle connection was closed just before; computes no figures.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from urllib.parse import quote

from penstock.lab import answers
from penstock.lab.answers import Framing, MalformedAnswer
from penstock.lab.pacing import Pace, Pacer, Tally, WarmUp
from penstock.lab.records import End, Record, Sent
from penstock.lab.target import Address, Endpoint, Prompt, Target
from penstock.lab.workload import Job, Workload
from penstock.types.errors import PenstockError, counted

SILENCE_S = 600.0
"""An answer of which no byte comes for this long has failed."""
MAX_HELD_BYTES = 64 << 20
"""Bodies of answers that wait to be read; beyond it the oldest are read while the run goes on."""
MAX_ANSWER_BYTES = 256 << 20
"""The body of an answer that goes on beyond it has failed."""
MIN_WAIT_NS = 1_000_000_000
"""A client that is refused does not come back sooner, even if the server says so: it would do nothing else."""
MAX_WAIT_NS = 3600 * 1_000_000_000
"""A client that is told to wait for longer does not come back: a run would last as long as a server likes."""
_RECEIVE_BYTES = 1 << 16
_MAX_BEGUN_AT_ONCE = 16
"""Requests that are sent before answers are taken again, however many are due."""
_NS_PER_S = 1_000_000_000
_NOT_NOW = (429, 503)
_EVENT = b"\ndata:"
"""Before each event of a stream there is the end of a line, and in JSON there is none."""
_ROLES = ("user", "assistant")
_CHECK_NS = _NS_PER_S
"""Between two looks for silent answers."""
_TRIAL_S = 5.0
"""An address of a host with several must take a connection within that time."""
_MAX_SELECT_FD = 1024
_MAX_REASON_CHARS = 300
_TENANT_CHARS = "._:@/-"
"""Beside letters and digits, what a tenant's name has in a header; other characters are percent-encoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    """How the client behaves, whatever it sends."""

    silence_s: float = SILENCE_S
    """An answer of which no byte comes for this long has failed."""
    max_s: float | None = None
    """The run ends after so many seconds, with what there is; None: when all is answered."""
    max_returns: int = 0
    """How often a client that is refused with `Retry-After` comes back then, but not sooner than after `MIN_WAIT_NS`; its
    latency has those waits. After that, and if it is told more than `MAX_WAIT_NS`, it is refused."""
    keeps_text: bool = False
    """The records have the answers' texts."""


def send(
    workload: Workload,
    target: Target,
    *,
    pace: Pace | None = None,
    warm_up: WarmUp | None = None,
    on_end: Callable[[], object] | None = None,
    options: SendOptions | None = None,
) -> Sent:
    """Send every job to the server, and wait until the last has ended.

    `on_end` is called after each. A request that fails is a record, and the run goes on; Ctrl-C ends it with what there is.
    Raises PenstockError if the URL has no such host, or a job has no prompt that can be sent to this endpoint.
    """
    sending = _Sending(
        workload, target, pace or Pace(), warm_up or WarmUp(), on_end or (lambda: None), options or SendOptions()
    )
    return sending.run()


def _prompt(job: Job, endpoint: Endpoint) -> Prompt:
    """The prompt that a job names."""
    if job.texts:
        if endpoint is not Endpoint.EMBEDDINGS:
            raise PenstockError("A job has a list of texts.", remedy="Send it to the endpoint of embeddings.")
        return job.texts
    if job.prompt is not None:
        return job.prompt
    if not job.prompt_token_ids:
        raise PenstockError("A job has neither a text nor token ids.", remedy="Make texts with `lab.prompts.write_prompts`.")
    if endpoint is Endpoint.CHAT:
        raise PenstockError("A prompt of token ids is no message of a chat.", remedy="Use the endpoint of completions.")
    return job.prompt_token_ids


class _Exchange:
    """One request and its answer."""

    __slots__ = (
        "end",
        "ended_ns",
        "error",
        "framing",
        "has_moved",
        "index",
        "intended_ns",
        "num_events_left",
        "request",
        "sent_ns",
        "waits_ns",
    )

    def __init__(self, index: int, intended_ns: int, num_events: int | None, request: bytes) -> None:
        self.index = index
        self.intended_ns = intended_ns
        self.num_events_left = num_events
        """Events of a stream until the client goes away; None: it stays."""
        self.request = request
        """Head and body; empty once it has ended."""
        self.sent_ns = 0
        """0 before the first byte has left."""
        self.ended_ns = 0
        self.end: End | None = None
        """None: as the answer says."""
        self.error = ""
        self.framing = Framing()
        self.has_moved = False
        """Whether it was sent again, as its connection turned out to be closed."""
        self.waits_ns: tuple[int, ...] = ()
        """As in `Record`."""

    def begin_again(self, wait_ns: int) -> None:
        """It was refused, and will be sent again."""
        self.waits_ns = (*self.waits_ns, wait_ns)
        self.sent_ns = self.ended_ns = 0
        self.framing = Framing()
        self.has_moved = False


class _Connection:
    """A connection, with one request at a time."""

    __slots__ = (
        "exchange",
        "fd",
        "is_handshaking",
        "is_open",
        "is_watched",
        "last_ns",
        "num_answers",
        "socket",
        "tls",
        "unsent",
    )

    def __init__(self, exchange: _Exchange, peer: _Peer, now_ns: int) -> None:
        """Begins to connect. Raises OSError if there are no more sockets or ports."""
        self.exchange: _Exchange | None = exchange
        """None while it is idle."""
        self.unsent = exchange.request
        self.last_ns = now_ns
        """When something went either way."""
        self.num_answers = 0
        self.tls = peer.tls
        self.is_handshaking = False
        self.is_open = False
        """Whether a request can be sent."""
        self.is_watched = True
        """Whether the selector tells when it is writable."""
        self.socket = socket.socket(peer.family, socket.SOCK_STREAM)
        self.fd = self.socket.fileno()
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error = self.socket.connect_ex(peer.where)
        if error not in (0, errno.EINPROGRESS):
            self.socket.close()
            raise OSError(error, os.strerror(error))

    def open(self, host: str) -> bool:
        """Called when it became writable, or readable while it shakes hands. False: not yet. Raises OSError."""
        if not self.is_handshaking and (error := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)):
            raise OSError(error, os.strerror(error))
        if self.tls is not None:
            if not self.is_handshaking:
                self.socket = self.tls.wrap_socket(self.socket, server_hostname=host, do_handshake_on_connect=False)
                self.is_handshaking = True
            assert isinstance(self.socket, ssl.SSLSocket)
            try:
                self.socket.do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False
        self.is_open = True
        return True

    def send(self) -> None:
        """Send what can be sent. Raises OSError."""
        try:
            num_bytes = self.socket.send(self.unsent)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        self.unsent = self.unsent[num_bytes:]

    def receive(self) -> bytes | None:
        """The bytes that have come; None: none yet; empty: it was closed. Raises OSError."""
        if self.tls is None:
            try:
                return self.socket.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                return None
        pieces = []  # bytes that are decrypted already do not make the socket readable again
        try:
            while data := self.socket.recv(_RECEIVE_BYTES):
                pieces.append(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return b"".join(pieces) or None
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Peer:
    """The socket address of a server."""

    family: socket.AddressFamily
    where: tuple[str | int | bytes, ...]
    tls: ssl.SSLContext | None

    @classmethod
    def of(cls, address: Address, tls: ssl.SSLContext | None) -> _Peer:
        """The address of the host; of several, one that takes connections. Raises PenstockError if there is no such host."""
        try:
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        except OSError as error:
            raise address.unreachable(error) from None
        family, _, _, _, where = next(filter(_takes_connections, found), found[0]) if len(found) > 1 else found[0]
        return cls(family, where, (tls or ssl.create_default_context()) if address.scheme == "https" else None)


_SocketAddress = tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


def _takes_connections(found: tuple[socket.AddressFamily, socket.SocketKind, int, str, _SocketAddress]) -> bool:
    """Whether somebody listens at one of a host's addresses: a server of `localhost` may do so on only one of two."""
    try:
        with socket.socket(found[0], socket.SOCK_STREAM) as trial:
            trial.settimeout(_TRIAL_S)
            trial.connect(found[4])
    except OSError:
        return False
    return True


@dataclass(slots=True)
class _Said:
    """A conversation up to an answer, for the turns that continue it."""

    texts: list[str]
    """Those of the user and of the model in turn."""
    num_turns: int
    """Turns that have not begun."""


class _Sending:
    """A run while it goes on. Instants are nanoseconds from its begin."""

    def __init__(
        self,
        workload: Workload,
        target: Target,
        pace: Pace,
        warm_up: WarmUp,
        on_end: Callable[[], object],
        options: SendOptions,
    ) -> None:
        address = Address.of(target.url)
        self._jobs = workload.jobs
        self._target = target
        self._options = options
        self._silence_ns = round(options.silence_s * _NS_PER_S)
        self._host = address.host
        self._peer = _Peer.of(address, target.tls)
        self._head = (
            f"POST {address.path}{target.endpoint.path} HTTP/1.1\r\nHost: {address.host_header}\r\n"
            "Content-Type: application/json\r\n"
            + (f"Authorization: Bearer {target.api_key}\r\n" if target.api_key is not None else "")
        )
        self._pacer = Pacer(workload, pace)
        self._tally = Tally(workload, warm_up, on_end)
        self._begin_ns = 0
        """On the clock of the machine."""
        self._until_ns = None if options.max_s is None else round(options.max_s * _NS_PER_S)
        """When the run is over in any case."""
        self._connections: dict[int, _Connection] = {}
        """Each that is open, by its file."""
        self._idle: list[_Connection] = []
        """Connections that can be used again, and some that were closed since."""
        self._by_job: dict[int, _Connection] = {}
        """Each job under way."""
        self._away: dict[int, _Exchange] = {}
        """Each job that was refused, and comes back."""
        self._returns: list[tuple[int, int]] = []
        """A heap of (instant, job), of those that are away."""
        self._cancels: list[tuple[int, int]] = []
        """A heap of (instant, job)."""
        self._check_ns = _CHECK_NS
        """When silent answers are looked for next."""
        self._said: dict[int, _Said] = {}
        """By the job with the last answer."""
        self._saying: dict[int, list[str]] = {}
        """Job under way that will be continued -> the conversation, its own prompt included."""
        self._held: deque[_Exchange] = deque()
        """Exchanges that are over and not read."""
        self._num_held_bytes = 0
        self._num_uncounted = 0

    def run(self) -> Sent:
        """Raises PenstockError for a prompt that can't be sent this way."""
        has_collector = gc.isenabled()
        gc.disable()  # There are no cycles here, and a collection would delay answers.
        cpu_s = time.thread_time()
        self._begin_ns = time.perf_counter_ns()
        unfinished: list[Record] = []
        try:
            with select.epoll() as self._epoll:
                try:
                    self._loop()
                except KeyboardInterrupt:
                    pass  # The records say what there is.
                finally:
                    cpu_s, over_ns = time.thread_time() - cpu_s, self._now_ns()
                    for connection in self._connections.values():
                        connection.socket.close()
            while self._held:
                self._tally.records.append(self._read(self._held.popleft()))
            unfinished = self._unfinished(over_ns)
        finally:
            if has_collector:
                gc.enable()
        return self._tally.sent(unfinished, client_cpu_s=cpu_s, notes=tuple(self._notes()))

    def _unfinished(self, over_ns: int) -> list[Record]:
        """Records of the requests under way, which ended when the run did."""
        under_way = [connection.exchange for connection in self._by_job.values()]
        exchanges = [exchange for exchange in (*under_way, *self._away.values()) if exchange is not None]
        for exchange in exchanges:
            exchange.ended_ns, exchange.end, exchange.error = over_ns, End.CANCELLED, "The run was over."
        return [self._read(exchange) for exchange in exchanges]

    def _notes(self) -> Iterator[str]:
        if self._num_uncounted:
            yield (
                f"The server did not count the tokens of {counted(self._num_uncounted, 'answer')}: theirs are the events with "
                "text, and the prompt's as the workload says."
            )

    def _now_ns(self) -> int:
        return time.perf_counter_ns() - self._begin_ns

    def _loop(self) -> None:
        pacer, connections = self._pacer, self._connections
        while not pacer.is_over and not (self._until_ns and self._now_ns() >= self._until_ns):
            for _ in range(_MAX_BEGUN_AT_ONCE):
                if (taken := pacer.take(self._now_ns())) is None:
                    break
                self._begin(*taken)
            self._end_those_due()
            for fd, mask in self._wait():
                if (connection := connections.get(fd)) is not None:  # else it was closed meanwhile
                    self._go_on(connection, mask)

    def _wait(self) -> Sequence[tuple[int, int]]:
        """Until something comes, or a job is due. `epoll` alone would wake up to a millisecond late."""
        until_ns = self._pacer.next_ns()
        for heap in (self._cancels, self._returns):
            if heap and (until_ns is None or heap[0][0] < until_ns):
                until_ns = heap[0][0]
        if self._until_ns is not None and (until_ns is None or self._until_ns < until_ns):
            until_ns = self._until_ns
        if until_ns is None:
            return self._epoll.poll(_CHECK_NS / _NS_PER_S)
        if (ready := self._epoll.poll(0)) or (left_ns := until_ns - self._now_ns()) <= 0:
            return ready
        left_s = min(left_ns, _CHECK_NS) / _NS_PER_S
        if self._epoll.fileno() >= _MAX_SELECT_FD:
            return self._epoll.poll(left_s)
        select.select([self._epoll], [], [], left_s)
        return self._epoll.poll(0)

    # A request begins

    def _begin(self, index: int, intended_ns: int) -> None:
        job = self._jobs[index]
        if job.cancelled_ns is not None:
            cancel_ns = intended_ns + job.cancelled_ns - job.arrival_ns
            if cancel_ns <= self._now_ns():
                self._end_unsent(index, intended_ns, End.CANCELLED)
                return
            heappush(self._cancels, (cancel_ns, index))
        request = self._request(index, intended_ns, self._body(index))
        self._start(_Exchange(index, intended_ns, self._num_events(job), request))

    def _start(self, exchange: _Exchange) -> None:
        """Send it over a connection that is kept, or a new one."""
        while self._idle:
            connection = self._idle.pop()
            if self._connections.get(connection.fd) is connection:  # else the server has closed it
                connection.exchange, connection.unsent = exchange, exchange.request
                self._by_job[exchange.index] = connection
                self._send(connection)
                return
        self._connect(exchange)

    def _connect(self, exchange: _Exchange) -> None:
        try:
            connection = _Connection(exchange, self._peer, self._now_ns())
        except OSError as error:
            self._by_job.pop(exchange.index, None)
            self._end_unsent(exchange.index, exchange.intended_ns, End.FAILED, f"There is no connection: {_reason(error)}.")
            return
        self._connections[connection.fd] = self._by_job[exchange.index] = connection
        self._epoll.register(connection.fd, select.EPOLLOUT)

    def _body(self, index: int) -> bytes:
        """The body of a request, with what was said before in the conversation. Made once."""
        job, target = self._jobs[index], self._target
        prompt = _prompt(job, target.endpoint)
        texts: list[str] = []
        if job.after is not None and (said := self._said.get(job.after)) is not None:
            texts = said.texts
            said.num_turns -= 1
            if not said.num_turns:
                del self._said[job.after]
        asked: Prompt | list[dict[str, str]] = prompt
        if isinstance(prompt, str):
            texts = [*texts, prompt]
            if self._pacer.continues(index):
                self._saying[index] = texts
            asked = "".join(texts)
            if target.endpoint is Endpoint.CHAT:
                asked = [{"role": _ROLES[turn % 2], "content": text} for turn, text in enumerate(texts)]
        return target.body(asked, job.num_output_tokens)

    def _request(self, index: int, intended_ns: int, body: bytes) -> bytes:
        """The head, as it is true now, and the body."""
        job, head = self._jobs[index], self._head
        if job.tenant:
            head += f"X-Tenant: {quote(job.tenant, safe=_TENANT_CHARS)}\r\n"
        if job.priority:
            head += f"X-Priority: {job.priority}\r\n"
        if job.deadline_ns is not None:
            left_ns = intended_ns + job.deadline_ns - job.arrival_ns - self._now_ns()
            head += f"X-Deadline-Ms: {max(1, round(left_ns / 1e6))}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _num_events(self, job: Job) -> int | None:
        """Events of a stream after which the client of a job goes away; the first of a chat has no text."""
        num_tokens = job.cancelled_after_tokens
        return None if num_tokens is None else num_tokens + (self._target.endpoint is Endpoint.CHAT)

    # Bytes go and come

    def _go_on(self, connection: _Connection, mask: int) -> None:
        if not connection.is_open:
            try:
                if not connection.open(self._host):
                    self._epoll.modify(connection.fd, select.EPOLLIN)
                    connection.is_watched = False
                    return
            except OSError as error:
                self._break(connection, f"There is no connection: {_reason(error)}.")
                return
            self._send(connection)
            return
        if mask & select.EPOLLOUT and connection.unsent:
            self._send(connection)
        if mask & ~select.EPOLLOUT and connection.fd in self._connections:
            self._receive(connection)

    def _send(self, connection: _Connection) -> None:
        exchange = connection.exchange
        assert exchange is not None
        connection.last_ns = now_ns = self._now_ns()
        try:
            connection.send()
        except OSError:
            connection.unsent = b""  # An early answer may be there to be read; if there is none, reading fails, too.
        exchange.sent_ns = exchange.sent_ns or now_ns
        if connection.is_watched != bool(connection.unsent):
            connection.is_watched = bool(connection.unsent)
            self._epoll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if connection.unsent else 0))

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.receive()
        except OSError as error:
            self._break(connection, f"The connection broke: {_reason(error)}.")
            return
        if data is None:
            return
        connection.last_ns = now_ns = self._now_ns()
        exchange = connection.exchange
        if exchange is None or not data:
            self._break(connection, "The server closed the connection.")
            return
        try:
            if not exchange.framing.feed(data, now_ns):
                if exchange.num_events_left is not None:
                    exchange.num_events_left -= data.count(_EVENT)
                    if exchange.num_events_left <= 0:
                        self._give_up(connection, End.CANCELLED, "")
                return
        except (MalformedAnswer, *answers.SENSELESS) as error:
            self._break(connection, str(error) or type(error).__name__)
            return
        exchange.ended_ns = now_ns
        connection.num_answers += 1
        connection.exchange = None
        if exchange.framing.is_kept_alive and not connection.unsent:
            self._idle.append(connection)
        else:
            self._close(connection)
        self._end(exchange)

    def _break(self, connection: _Connection, error: str) -> None:
        """The connection is of no use any more."""
        self._close(connection)
        exchange = connection.exchange
        if exchange is None:
            return
        if connection.num_answers and not exchange.framing.has_begun and not exchange.has_moved:
            exchange.has_moved = True  # The server closed it as idle, when the request was on its way.
            exchange.sent_ns = 0
            self._connect(exchange)
            return
        exchange.ended_ns = self._now_ns()
        if not exchange.framing.close():
            exchange.end, exchange.error = End.FAILED, error
        self._end(exchange)

    def _close(self, connection: _Connection) -> None:
        del self._connections[connection.fd]
        connection.socket.close()  # which takes it out of the selector

    def _end_those_due(self) -> None:
        """Cancel requests whose clients go away now, and those that have been silent for too long; send those that return."""
        now_ns = self._now_ns()
        while self._cancels and self._cancels[0][0] <= now_ns:
            index = heappop(self._cancels)[1]
            if (connection := self._by_job.get(index)) is not None:
                self._give_up(connection, End.CANCELLED, "")
            elif (exchange := self._away.pop(index, None)) is not None:
                exchange.ended_ns, exchange.end = now_ns, End.CANCELLED
                self._end(exchange)
        while self._returns and self._returns[0][0] <= now_ns:
            exchange = self._away.pop(heappop(self._returns)[1], None)
            if exchange is not None:  # else its client has gone
                body = exchange.request.partition(b"\r\n\r\n")[2]
                exchange.request = self._request(exchange.index, exchange.intended_ns, body)
                self._start(exchange)
        if now_ns >= self._check_ns:
            self._check_ns = now_ns + min(_CHECK_NS, self._silence_ns)
            for connection in list(self._by_job.values()):
                if now_ns - connection.last_ns > self._silence_ns:
                    silence_s = self._silence_ns / _NS_PER_S
                    self._give_up(connection, End.FAILED, f"No byte came for {silence_s:g} s.")
                elif connection.exchange is not None and connection.exchange.framing.num_bytes > MAX_ANSWER_BYTES:
                    self._give_up(connection, End.FAILED, f"The answer has more than {MAX_ANSWER_BYTES >> 20} MiB.")

    def _give_up(self, connection: _Connection, end: End, error: str) -> None:
        exchange = connection.exchange
        assert exchange is not None
        self._close(connection)
        exchange.ended_ns, exchange.end, exchange.error = self._now_ns(), end, error
        self._end(exchange)

    # A request ends

    def _end(self, exchange: _Exchange) -> None:
        index, now_ns = exchange.index, exchange.ended_ns
        self._by_job.pop(index, None)
        may_return = len(exchange.waits_ns) < self._options.max_returns
        if may_return and exchange.end is None and exchange.framing.status in _NOT_NOW:
            wait_ns = answers.retry_after_ns(exchange.framing)
            if wait_ns is not None and wait_ns <= MAX_WAIT_NS:
                wait_ns = max(MIN_WAIT_NS, wait_ns)
                exchange.begin_again(wait_ns)
                self._away[index] = exchange
                heappush(self._returns, (now_ns + wait_ns, index))
                return
        exchange.request = b""
        if not self._pacer.continues(index):
            self._pacer.end(index, now_ns)
            self._hold(exchange)
        else:
            record = self._read(exchange)
            said = self._saying.pop(index, None)
            if record.end in (End.OK, End.CANCELLED):
                num_turns = self._pacer.end(index, now_ns)
                if said is not None:
                    self._said[index] = _Said([*said, record.text], num_turns)
            else:
                self._lose_turns(index, now_ns)
            if not self._options.keeps_text:
                record.text = ""
            self._tally.add(record)

    def _end_unsent(self, index: int, intended_ns: int, end: End, error: str = "") -> None:
        """A job is over without a request."""
        now_ns = self._now_ns()
        self._saying.pop(index, None)
        self._lose_turns(index, now_ns)
        self._tally.add_unsent(index, now_ns, intended_ns=intended_ns, end=end, error=error)

    def _lose_turns(self, index: int, now_ns: int) -> None:
        """A job is over without an answer, so the turns after it can't be sent."""
        for turn in self._pacer.fail(index, now_ns):
            self._tally.add_lost_turn(turn, now_ns)

    def _hold(self, exchange: _Exchange) -> None:
        """Keep an exchange to read it later; if too many bytes are kept, read the oldest now."""
        if not self._tally.note_end(exchange.index, exchange.intended_ns, exchange.ended_ns):
            return
        self._held.append(exchange)
        self._num_held_bytes += exchange.framing.num_bytes
        while self._num_held_bytes > MAX_HELD_BYTES:
            oldest = self._held.popleft()
            self._num_held_bytes -= oldest.framing.num_bytes
            self._tally.records.append(self._read(oldest))

    def _read(self, exchange: _Exchange) -> Record:
        """The record of a request that is over, whatever its answer is: no answer ends the run."""
        record = Record(
            index=exchange.index,
            intended_ns=exchange.intended_ns,
            sent_ns=exchange.sent_ns or exchange.ended_ns,
            ended_ns=exchange.ended_ns,
            http_status=exchange.framing.status,
            tenant=self._jobs[exchange.index].tenant,
            error=exchange.error,
            waits_ns=exchange.waits_ns,
        )
        try:
            self._read_answer(exchange, record)
        except answers.SENSELESS as error:
            record.end, record.error = End.FAILED, f"The answer makes no sense: {error!r}"[:_MAX_REASON_CHARS]
        return record

    def _read_answer(self, exchange: _Exchange, record: Record) -> None:
        index, framing = exchange.index, exchange.framing
        job = self._jobs[index]
        record.queue_ns = answers.queue_ns(framing)
        if framing.status not in (0, 200):
            record.end = exchange.end or (End.REFUSED if framing.status in _NOT_NOW else End.FAILED)
            record.error = answers.error_of(b"".join(framing.pieces))
            return
        answer = answers.read(framing)
        record.first_ns, record.gaps_ns = answer.first_ns, answer.gaps_ns
        record.num_prompt_tokens, record.num_cached_tokens = answer.num_prompt_tokens, answer.num_cached_tokens
        record.num_output_tokens = answer.num_events if answer.num_output_tokens is None else answer.num_output_tokens
        if self._options.keeps_text or index in self._saying:
            record.text = answer.text
        if exchange.end is not None:
            record.end = exchange.end
        elif error := self._fault(answer, job):
            record.end, record.error = End.FAILED, error
        elif answer.num_output_tokens is None:
            self._num_uncounted += 1
            record.num_prompt_tokens = job.num_prompt_tokens

    def _fault(self, answer: answers.Answer, job: Job) -> str:
        """The reason why an answer is no good one; "" if it is one."""
        if answer.error:
            return answer.error
        if not answer.is_whole:
            return f"The answer broke off after {counted(answer.num_events, 'event')}."
        num_tokens = answer.num_output_tokens
        if self._target.asks_to_ignore_eos and num_tokens not in (None, job.num_output_tokens):
            return f"{counted(num_tokens or 0, 'token')} instead of {job.num_output_tokens}."
        return ""


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
