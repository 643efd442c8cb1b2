"""A closed loop of streamed completions against a URL: the load that `serve.py` and `peers.py` measure with.

The client shares the machine with the server, so while it measures it only takes bytes and notes when they came: one
thread, one selector, one fresh connection per request. The bytes are read after the run, and every reply is checked then:
chunked framing, events, errors, the number of tokens. Works against any server that speaks OpenAI's completions and vLLM's
`ignore_eos`. Never retries; never parses while it measures.
"""

from __future__ import annotations

import json
import math
import selectors
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from urllib.parse import urlsplit

SILENCE_S = 600.0
"""No byte from any stream for this long is a failure."""
_RECEIVE_BYTES = 1 << 18
_LAST_CHUNK = b"\r\n0\r\n\r\n"
_DONE = "[DONE]"


class LoadError(RuntimeError):
    """A server that refused, broke off, or answered with other than the tokens asked for."""


@dataclass(frozen=True, slots=True)
class Job:
    prompt: str
    num_prompt_tokens: int
    """As counted with the model's tokenizer, without what a server may add."""
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One streamed answer. Times are seconds of one clock."""

    start_s: float
    token_times_s: tuple[float, ...]
    """When each event with a choice arrived; a server may put several tokens, or none that can be shown yet, into one."""
    num_tokens: int
    num_prompt_tokens: int
    text: str

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.start_s

    @property
    def tpot_s(self) -> float:
        return (self.token_times_s[-1] - self.token_times_s[0]) / max(1, self.num_tokens - 1)

    @property
    def latency_s(self) -> float:
        return self.token_times_s[-1] - self.start_s


@dataclass(frozen=True, slots=True)
class Run:
    replies: list[Reply]
    seconds: float
    """From the first request to the last byte of the last reply."""
    client_cpu_s: float
    """CPU time that this process used meanwhile."""


class Exchange:
    """One request and what came back, byte for byte, with the time of each piece."""

    __slots__ = ("connection", "pieces", "start_s", "times_s", "unsent")

    def __init__(self, address: tuple[str, int], request: bytes) -> None:
        self.unsent = request
        self.pieces: list[bytes] = []
        self.times_s: list[float] = []
        self.start_s = time.perf_counter()
        self.connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.connection.setblocking(False)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection.connect_ex(address)

    def send(self) -> bool:
        """Send what can be sent; True once nothing is left. Raises LoadError if there is no connection."""
        try:
            self.unsent = self.unsent[self.connection.send(self.unsent) :]
        except OSError as error:
            raise LoadError(f"cannot reach the server: {error}") from error
        return not self.unsent

    def receive(self) -> bool:
        """Take what has come; True once the reply has ended."""
        try:
            data = self.connection.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise LoadError(f"the connection broke: {error}") from error
        self.times_s.append(time.perf_counter())
        self.pieces.append(data)
        return not data or data.endswith(_LAST_CHUNK) or data == _LAST_CHUNK[2:]


def request_bytes(url: str, model: str, job: Job) -> bytes:
    """The whole HTTP request of one job."""
    body = {
        "model": model,
        "prompt": job.prompt,
        "max_tokens": job.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    payload = json.dumps(body).encode()
    parts = urlsplit(url)
    head = (
        f"POST {parts.path.rstrip('/')}/v1/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    )
    return f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload


def replay(url: str, model: str, jobs: Sequence[Job], concurrency: int) -> Run:
    """All jobs in order, `concurrency` at a time, each sent as soon as an earlier one has ended.

    Raises LoadError if a reply is not the number of tokens that its job asked for.
    """
    parts = urlsplit(url)
    address = (socket.gethostbyname(parts.hostname or "127.0.0.1"), parts.port or 80)
    requests = [request_bytes(url, model, job) for job in jobs]
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    exchanges = _exchange(address, requests, concurrency)
    seconds, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    replies = [read_reply(exchange, job) for exchange, job in zip(exchanges, jobs, strict=True)]
    return Run(replies, seconds, cpu_s)


def _exchange(address: tuple[str, int], requests: Sequence[bytes], concurrency: int) -> list[Exchange]:
    """Every request's exchange, in order; each is over when this returns."""
    exchanges: list[Exchange] = []
    num_open = 0
    with selectors.DefaultSelector() as selector:
        try:
            while num_open or len(exchanges) < len(requests):
                while num_open < concurrency and len(exchanges) < len(requests):
                    exchanges.append(Exchange(address, requests[len(exchanges)]))
                    selector.register(exchanges[-1].connection, selectors.EVENT_WRITE, exchanges[-1])
                    num_open += 1
                ready = selector.select(SILENCE_S)
                if not ready:
                    raise LoadError(f"no byte from {num_open} streams in {SILENCE_S:.0f} s")
                for key, _ in ready:
                    exchange: Exchange = key.data
                    if exchange.unsent:
                        if exchange.send():
                            selector.modify(exchange.connection, selectors.EVENT_READ, exchange)
                    elif exchange.receive():
                        selector.unregister(exchange.connection)
                        exchange.connection.close()
                        num_open -= 1
        finally:
            for exchange in exchanges:
                exchange.connection.close()
    return exchanges


def read_reply(exchange: Exchange, job: Job) -> Reply:
    """The answer in the bytes of an exchange. Raises LoadError unless they are a whole stream of the tokens that the job asked
    for."""
    times_s: list[float] = []
    texts: list[str] = []
    usage: dict[str, int] = {}
    is_done = False
    for time_s, data in _events(exchange):
        if data == _DONE:
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise LoadError(f"the stream ended with an error: {event['error']}")
        usage = event.get("usage") or usage
        if event["choices"]:
            times_s.append(time_s)
            texts.append(event["choices"][0]["text"])
    if not is_done or not times_s:
        raise LoadError(f"the stream broke off after {len(times_s)} events")
    if usage.get("completion_tokens") != job.max_tokens:
        raise LoadError(f"{usage.get('completion_tokens')} tokens instead of {job.max_tokens}")
    return Reply(exchange.start_s, tuple(times_s), usage["completion_tokens"], usage["prompt_tokens"], "".join(texts))


def _events(exchange: Exchange) -> Iterator[tuple[float, str]]:
    """The data of each server-sent event, with the time of the piece that completed it."""
    text = b""
    for time_s, payload in _payloads(exchange):
        text = (text + payload).replace(b"\r\n", b"\n")
        *events, text = text.split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield time_s, b"\n".join(lines).decode()


def _payloads(exchange: Exchange) -> Iterator[tuple[float, bytes]]:
    """The body, without HTTP's head and chunk sizes. Raises LoadError for any status but 200 and for another framing."""
    rest = b""
    has_head = False
    for time_s, piece in zip(exchange.times_s, exchange.pieces, strict=True):
        rest += piece
        if not has_head:
            head, end, body = rest.partition(b"\r\n\r\n")
            if not end:
                continue
            if head.split(b" ", 2)[1] != b"200" or b"transfer-encoding: chunked" not in head.lower():
                raise LoadError(b"".join(exchange.pieces).decode(errors="replace")[:2000])
            has_head, rest = True, body
        size, end, chunk = rest.partition(b"\r\n")
        while end and len(chunk) >= (num_bytes := int(size.partition(b";")[0], 16)) + 2:
            yield time_s, chunk[:num_bytes]
            rest = chunk[num_bytes + 2 :]
            size, end, chunk = rest.partition(b"\r\n")
    if not has_head:
        raise LoadError(f"no answer, but {rest[:200]!r}")


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def summarise(run: Run) -> dict[str, float]:
    """Throughput over the whole run, and latencies in milliseconds."""
    num_tokens = sum(reply.num_tokens for reply in run.replies)
    samples = {
        "ttft": [reply.ttft_s for reply in run.replies],
        "tpot": [reply.tpot_s for reply in run.replies],
        "itl": [after - before for reply in run.replies for before, after in pairwise(reply.token_times_s)] or [0.0],
        "e2e": [reply.latency_s for reply in run.replies],
    }
    figures = {
        "output_tokens_per_s": num_tokens / run.seconds,
        "prompt_tokens": sum(reply.num_prompt_tokens for reply in run.replies),
        "output_tokens": num_tokens,
        "seconds": run.seconds,
        "client_cpu_s": run.client_cpu_s,
    }
    for name, values in samples.items():
        figures |= {f"{name}_p{percent}_ms": 1e3 * quantile(values, percent / 100) for percent in (50, 90, 99)}
    return figures
