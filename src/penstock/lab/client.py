"""The HTTP load generator: sends a workload to an OpenAI-compatible server and records how each request ended.

Each request in flight has its own connection, and connections are reused. Latencies count from the instant at which a request
was due, so they include the delay of a client or server that falls behind.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote

import httptools

from penstock.lab.answers import Answer
from penstock.lab.driving import drive
from penstock.lab.pacing import Pace, WarmUp
from penstock.lab.records import End, Record, Sent
from penstock.lab.target import Address, Endpoint, Prompt, Target
from penstock.lab.workload import NS_PER_S, Job, Workload
from penstock.types.errors import PenstockError, counted

_STALE_NS = 100_000_000
"""A reused connection that ends this soon after a request, without a byte, was being closed as idle: send again."""
SILENCE_S = 600.0
MAX_ANSWER_BYTES = 256 << 20
MIN_WAIT_NS = 1_000_000_000
"""Shortest wait before a refused request is sent again, even if the server asks for less."""
MAX_WAIT_NS = 3600 * 1_000_000_000
"""Longest such wait. If the server asks for more, the request is not resent, so no server can stall a run."""
_NOT_NOW = (429, 503)
_ROLES = ("user", "assistant")
_TENANT_CHARS = "._:@/-"
"""Characters of a tenant's name, besides letters and digits, that a header carries without percent-encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendOptions:
    silence_s: float = SILENCE_S
    max_s: float | None = None
    """End the run after this many seconds, with the records so far. None waits for every answer."""
    max_returns: int = 0
    """How often a request refused with `Retry-After` is sent again. Its latency includes the waits."""
    keeps_text: bool = False


def send(
    workload: Workload,
    target: Target,
    *,
    pace: Pace | None = None,
    warm_up: WarmUp | None = None,
    on_end: Callable[[], object] | None = None,
    options: SendOptions | None = None,
) -> Sent:
    """Send every job of the workload to the server and wait until the last has ended.

    `on_end` is called after each job. A failed request becomes a record, and the run goes on. Ctrl-C ends the run with the
    records so far. Raises PenstockError for a bad URL, or for a prompt of a kind that the endpoint does not take.
    """
    options = options or SendOptions()
    client = _Client(target, options)
    for job in workload.jobs:
        client.check(job)

    async def run() -> Sent:
        try:
            return await drive(
                workload,
                client.ask,
                pace=pace,
                warm_up=warm_up,
                on_end=on_end,
                keeps_text=options.keeps_text,
                max_s=options.max_s,
            )
        finally:
            await client.close()

    has_collector = gc.isenabled()
    gc.disable()  # A collection would delay answers.
    cpu_s = time.thread_time()
    try:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_PreciseSelector())) as runner:
            sent = runner.run(run())
    finally:
        if has_collector:
            gc.enable()
    return replace(sent, client_cpu_s=time.thread_time() - cpu_s, notes=tuple(client.notes()))


class _PreciseSelector(selectors.EpollSelector):
    """An `epoll` selector for exact sending times: Python's own rounds timeouts up to the next millisecond."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is not None and timeout > 0 and self.fileno() < 1024:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


class _BrokenAnswer(Exception):
    """Error for an answer that ended early. The message says why."""


class _Connection(asyncio.Protocol):
    def __init__(self, now_ns: Callable[[], int], open_connections: set[_Connection]) -> None:
        self._now_ns = now_ns
        self._open = open_connections
        self._transport: asyncio.Transport
        self._parser = httptools.HttpResponseParser(self)
        self._answer = Answer()
        self._done: asyncio.Future[None] | None = None
        self._silence: asyncio.Timeout
        self._silence_s = 0.0
        self._num_bytes = 0
        self._max_tokens: int | None = None
        self._ends_with_connection = False
        self.lost = asyncio.Event()
        self.is_reusable = True
        self.ended_ns = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._open.add(self)

    async def exchange(self, request: bytes, answer: Answer, silence_s: float, max_tokens: int | None) -> None:
        """Send a request, and parse the response into `answer` until its end or until `max_tokens` tokens have come.

        Raises _BrokenAnswer.
        """
        self._answer, self._num_bytes, self._ends_with_connection = answer, 0, True
        self._max_tokens, self._silence_s = max_tokens, silence_s
        self._done = asyncio.get_running_loop().create_future()
        try:
            self._transport.write(request)
            async with asyncio.timeout(silence_s) as self._silence:
                await self._done
        except TimeoutError:
            self.close()
            self.ended_ns = self._now_ns()
            raise _BrokenAnswer(f"No byte arrived for {silence_s:g} s.") from None
        except BaseException:
            self.close()
            raise
        finally:
            self._done = None

    @property
    def has_begun(self) -> bool:
        return self._num_bytes > 0

    def close(self) -> None:
        self.is_reusable = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self.ended_ns = self._now_ns()
        if self._done is None or self._done.done():
            self.close()  # no request is in flight
            return
        self._num_bytes += len(data)
        self._silence.reschedule(asyncio.get_running_loop().time() + self._silence_s)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._end(f"The answer is not HTTP/1.1: {error}.")
            self.close()
        if self._num_bytes > MAX_ANSWER_BYTES:
            self._end(f"The answer has more than {MAX_ANSWER_BYTES >> 20} MiB.")
        if self._max_tokens is not None and self._answer.num_tokens_so_far >= self._max_tokens:
            self._end("")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.discard(self)
        self.lost.set()
        self.is_reusable = False
        self.ended_ns = self._now_ns()
        is_whole = exc is None and self._answer.status and self._ends_with_connection
        self._end("" if is_whole else f"The connection broke: {exc}." if exc else "The server closed the connection.")

    def _end(self, error: str) -> None:
        if self._done is None or self._done.done():
            return
        if error:
            self._done.set_exception(_BrokenAnswer(error))
        else:
            self._done.set_result(None)

    # The parser calls these.

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False
        self._answer.header(name, value)

    def on_headers_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self._answer.feed(body, self.ended_ns)

    def on_message_complete(self) -> None:
        if self._answer.status < 200:  # provisional: the answer comes after it
            self._answer.status = 0
            return
        self.is_reusable = self.is_reusable and self._parser.should_keep_alive()
        self._end("")


class _Client:
    def __init__(self, target: Target, options: SendOptions) -> None:
        self._address = address = Address.of(target.url)
        self._tls = (target.tls or True) if address.scheme == "https" else None
        self._target = target
        self._options = options
        self._head = (
            f"POST {address.path}{target.endpoint.path} HTTP/1.1\r\nHost: {address.host_header}\r\n"
            "Content-Type: application/json\r\n"
            + (f"Authorization: Bearer {target.api_key}\r\n" if target.api_key is not None else "")
        )
        self._open: set[_Connection] = set()
        self._idle: list[_Connection] = []
        self._num_uncounted = 0
        self._num_stayed = 0

    def check(self, job: Job) -> None:
        endpoint = self._target.endpoint
        if job.texts and endpoint is not Endpoint.EMBEDDINGS:
            raise PenstockError("A job has a list of texts.", remedy="Send it to the endpoint of embeddings.")
        if job.texts or job.prompt is not None:
            return
        if not job.prompt_token_ids:
            raise PenstockError(
                "A job has neither a text nor token ids.", remedy="Make texts with `lab.prompts.write_prompts`."
            )
        if endpoint is Endpoint.CHAT:
            raise PenstockError("A prompt of token ids is not a message of a chat.", remedy="Use the endpoint of completions.")

    async def close(self) -> None:
        for connection in tuple(self._open):
            connection.close()
            await connection.lost.wait()

    def notes(self) -> Iterator[str]:
        if self._num_uncounted:
            yield (
                f"The server did not count the tokens of {counted(self._num_uncounted, 'answer')}: events with text were "
                "counted instead, and the workload's prompt tokens."
            )
        if self._num_stayed:
            yield (
                f"{counted(self._num_stayed, 'client')} that should have left got the whole answer: it ended early, or the "
                "server sent several tokens at once without a count of tokens."
            )

    async def ask(self, job: Job, texts: Sequence[str], record: Record, now_ns: Callable[[], int]) -> None:
        leaves = job.cancelled_after_tokens is not None
        body = self._target.body(self._prompt(job, texts), job.num_output_tokens, has_continuous_usage=leaves)
        num_left = self._options.max_returns
        while True:
            answer, error, record.ended_ns = Answer(), "", 0
            try:
                await self._exchange(job, body, answer, record, now_ns)
            except _BrokenAnswer as broken:
                error = str(broken)
            except OSError as unreachable:
                error = f"The connection failed: {_reason(unreachable)}."
            finally:
                answer.end()
                self._fill(record, answer)
            wait_ns = answer.wait_ns
            if not num_left or answer.status not in _NOT_NOW or wait_ns is None or wait_ns > MAX_WAIT_NS:
                break
            num_left -= 1
            await asyncio.sleep(max(MIN_WAIT_NS, wait_ns) / NS_PER_S)
        record.end, record.error = self._judged(answer, job, error)
        self._num_stayed += leaves and record.end is End.OK
        if record.end is End.OK and answer.num_output_tokens is None:
            self._num_uncounted += 1
            record.num_prompt_tokens = job.num_prompt_tokens

    def _prompt(self, job: Job, texts: Sequence[str]) -> Prompt | list[dict[str, str]]:
        if job.texts or not texts:
            return job.texts or job.prompt_token_ids or ()
        if self._target.endpoint is Endpoint.CHAT:
            return [{"role": _ROLES[turn % 2], "content": text} for turn, text in enumerate(texts)]
        return "".join(texts)

    async def _exchange(self, job: Job, body: bytes, answer: Answer, record: Record, now_ns: Callable[[], int]) -> None:
        while True:
            while self._idle and not self._idle[-1].is_reusable:
                self._idle.pop()
            is_new = not self._idle
            if is_new:
                loop, where = asyncio.get_running_loop(), (self._address.host, self._address.port)
                try:
                    async with asyncio.timeout(self._options.silence_s):
                        _, connection = await loop.create_connection(
                            lambda: _Connection(now_ns, self._open), *where, ssl=self._tls
                        )
                except TimeoutError:
                    raise _BrokenAnswer(f"No connection could be opened within {self._options.silence_s:g} s.") from None
            else:
                connection = self._idle.pop()
            sent_ns = now_ns()
            if not record.http_status:  # after a refusal, the client is not late but waited as the server asked
                record.sent_ns = sent_ns
            request = self._request(job, body, record.intended_ns - sent_ns)
            try:
                await connection.exchange(request, answer, self._options.silence_s, job.cancelled_after_tokens)
            except _BrokenAnswer:
                is_stale = connection.lost.is_set() and connection.ended_ns - sent_ns < _STALE_NS
                if is_new or not is_stale or connection.has_begun:
                    raise
                continue
            finally:
                record.ended_ns = connection.ended_ns
            if connection.is_reusable:
                self._idle.append(connection)
            return

    def _request(self, job: Job, body: bytes, late_ns: int) -> bytes:
        head = self._head
        if job.tenant:
            head += f"X-Tenant: {quote(job.tenant, safe=_TENANT_CHARS)}\r\n"
        if job.priority:
            head += f"X-Priority: {job.priority}\r\n"
        if job.deadline_ns is not None:
            left_ns = job.deadline_ns - job.arrival_ns + late_ns
            head += f"X-Deadline-Ms: {max(1, round(left_ns / 1e6))}\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def _fill(self, record: Record, answer: Answer) -> None:
        record.http_status, record.queue_ns = answer.status, answer.queue_ns
        record.first_ns, record.gaps_ns, record.text = answer.first_ns, answer.gaps_ns, "".join(answer.texts)
        record.num_prompt_tokens, record.num_cached_tokens = answer.num_prompt_tokens, answer.num_cached_tokens
        record.num_output_tokens = answer.num_events if answer.num_output_tokens is None else answer.num_output_tokens

    def _judged(self, answer: Answer, job: Job, error: str) -> tuple[End, str]:
        if answer.status not in (0, 200):
            error = answer.error or error or f"The status is {answer.status}."
            return (End.REFUSED if answer.status in _NOT_NOW else End.FAILED), error
        if job.cancelled_after_tokens is not None and answer.num_tokens_so_far >= job.cancelled_after_tokens:
            return End.CANCELLED, ""
        num_tokens = answer.num_output_tokens
        error = error or answer.error
        if not error and not answer.is_whole:
            error = f"The answer broke off after {counted(answer.num_events, 'event')}."
        if not error and self._target.asks_to_ignore_eos and num_tokens not in (None, job.num_output_tokens):
            error = f"{counted(num_tokens or 0, 'token')} instead of {job.num_output_tokens}."
        return (End.FAILED if error else End.OK), error


def _reason(error: OSError) -> str:
    if isinstance(error, ConnectionError) and error.errno:  # asyncio's own words name the address instead
        return os.strerror(error.errno)
    return error.strerror or str(error) or type(error).__name__
