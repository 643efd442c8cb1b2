"""Streams over HTTP: each event comes with its step, and a client that does not read costs a bounded amount of memory."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from penstock import fast_json
from penstock.engine.bridge import MERGE_ABOVE_CHUNKS, Stream
from penstock.serve.http.connection import MIN_BYTES_PER_CHECK, Exchange
from support.server.harness import GatedExecutor, LiveServer, running, until
from support.server.waits import set_waits

COMPLETION = ("/v1/completions", {"prompt": "hello"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
NUM_TOKENS = 12
END = b"data: [DONE]\n\n\r\n0\r\n\r\n"
SMALL_BUFFER_BYTES = 4096
"""Asked for at both ends of the connection, so that what a client leaves unread stays in the server; the system doubles it."""


class Watched:
    """Every piece of a body that was written, and what was held for slow clients in that moment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[bytes] = []
        self.num_buffered_bytes: list[int] = []
        self.num_chunks: list[int] = []
        send, put = Exchange.send, Stream.put

        async def watched_send(exchange: Exchange, message: Any) -> None:
            await send(exchange, message)
            if message["type"] == "http.response.body":
                self.pieces.append(message["body"])
                self.num_buffered_bytes.append(exchange._connection.transport.get_write_buffer_size())

        def watched_put(stream: Stream, chunk: object) -> None:
            put(stream, chunk)
            self.num_chunks.append(len(stream._chunks))

        monkeypatch.setattr(Exchange, "send", watched_send)
        monkeypatch.setattr(Stream, "put", watched_put)

    @property
    def is_held_back(self) -> bool:
        return max(self.num_buffered_bytes, default=0) > 0


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


def events(data: str) -> Iterator[dict]:
    return (fast_json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {"))


@pytest.mark.parametrize(("path", "question"), [COMPLETION, CHAT], ids=["completion", "chat"])
async def test_each_event_comes_with_its_step(gated, gate, watched, path, question):
    body = question | {"max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    gate.allow()
    async with (
        httpx.AsyncClient(base_url=gated.url, timeout=20) as client,
        client.stream("POST", path, json=body) as response,  # goes on when the headers are there
    ):
        for num_steps in range(1, NUM_TOKENS):
            await until(lambda expected=1 + num_steps: len(watched.pieces) == expected)
            gate.allow()
        answer = (await response.aread()).decode()
    await until(lambda: len(watched.pieces) == 1 + NUM_TOKENS)  # the last one is noted when the client may have it already
    assert all(piece.decode() in answer for piece in watched.pieces)
    [*_, last] = events(answer)
    assert last["choices"][0]["finish_reason"] == "length"


async def open_unread(server, num_tokens: int) -> socket.socket:
    """Ask for a stream on a connection with small buffers, and read nothing."""
    body = {"prompt": "unread", "max_tokens": num_tokens, "temperature": 0, "stream": True, "logprobs": 5, "ignore_eos": True}
    return await ask_unread(server, "/v1/completions", body)


async def ask_unread(server, path: str, body: dict[str, Any], more_head: str = "") -> socket.socket:
    """Send a request on a connection with small buffers, and read nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", server.port))
    data = fast_json.dumps(body)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{more_head}\r\n"
    )
    await asyncio.get_running_loop().sock_sendall(client, head.encode() + data)
    return client


async def read_answer(client: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(END):
        piece = await asyncio.get_running_loop().sock_recv(client, 1 << 16)
        assert piece, "the connection was closed before the answer's end"
        data += piece
    return bytes(data)


async def test_a_client_that_does_not_read_is_bounded_and_nobody_notices(watched):
    """Ten times as much is generated as is written: the rest is kept as tokens, merged, and is sent when the client reads."""
    num_tokens = 2000
    executor = GatedExecutor()
    with running(executor) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)  # accepted ones inherit it
        with await open_unread(server, num_tokens) as unread:
            await until(lambda: server.runtime.engine.load().num_running == 1)
            # Event by event until it is held back: on a busy machine an event of many steps could have most of the tokens.
            while not watched.is_held_back:
                num_pieces = len(watched.pieces)
                assert num_pieces < num_tokens, "the client was not slow enough to be held back"
                executor.allow()
                await until(lambda before=num_pieces: len(watched.pieces) > before)
            executor.open()
            async with httpx.AsyncClient(base_url=server.url, timeout=20) as client:
                other = await client.post("/v1/completions", json={"prompt": "other", "max_tokens": 100, "stream": True})
            assert other.text.endswith("data: [DONE]\n\n")
            await until(lambda: server.runtime.engine.load().num_running == 0)
            largest_event = max(map(len, watched.pieces))
            assert max(watched.num_buffered_bytes) <= largest_event + len(b"fffff\r\n\r\n")
            assert max(watched.num_chunks) <= MERGE_ABOVE_CHUNKS
            num_written_while_unread = sum(map(len, watched.pieces))
            answer = await asyncio.wait_for(read_answer(unread), 20)
    said = [token for event in events(answer.decode()) for token in event["choices"][0]["logprobs"]["tokens"]]
    assert len(said) == num_tokens
    assert num_written_while_unread < len(answer) / 2, "most of the answer has to be held back for this test to say anything"


@contextlib.asynccontextmanager
async def unread_stream(monkeypatch, write_timeout_s: float) -> AsyncIterator[tuple[LiveServer, socket.socket]]:
    """A stream whose request has ended and of which the client has read nothing yet."""
    set_waits(monkeypatch, write_timeout_s=write_timeout_s)
    with running() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        with await open_unread(server, 2000) as unread:
            await until(lambda: server.runtime.engine.load().num_running == 1)
            await until(lambda: server.runtime.engine.load().num_running == 0)
            yield server, unread


async def test_a_client_that_never_reads_is_cut_off(monkeypatch):
    async with unread_stream(monkeypatch, write_timeout_s=0.1) as (server, unread):
        await until(lambda: not server.server.acceptor.connections)
        await until(lambda: not server.server.acceptor.tasks)
        with pytest.raises((ConnectionResetError, AssertionError)):  # the end of it is missing
            await asyncio.wait_for(read_answer(unread), 20)


@pytest.mark.parametrize("more_head", ["", "Connection: close\r\n"])
async def test_a_client_that_never_reads_a_short_answer_is_cut_off_too(monkeypatch, more_head):
    """All of the answer is written, and so little of it waits that writing is not paused."""
    set_waits(monkeypatch, look_every_s=0.01)
    with running() as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SMALL_BUFFER_BYTES)
        body = {"prompt": "a" * 5000, "return_token_strs": True}  # 45 kB are the answer
        with await ask_unread(server, "/tokenize", body, more_head) as unread:
            await until(lambda: server.server.acceptor.connections)
            (connection,) = server.server.acceptor.connections
            await until(lambda: connection.transport.get_write_buffer_size() > 0 and not connection.exchanges)
            set_waits(monkeypatch, write_timeout_s=0.2, stall_s=0.1)
            await until(lambda: not server.server.acceptor.connections)
            with pytest.raises((ConnectionResetError, AssertionError)):  # the end of it is missing
                await asyncio.wait_for(read_answer(unread), 20)


async def test_a_client_that_reads_slowly_is_not(monkeypatch):
    """The time of the server's loop goes on whenever the client has taken enough, however slow the machine is."""
    async with unread_stream(monkeypatch, write_timeout_s=60.0) as (server, unread):
        loop, passed_s = server.server._loop, 0.0
        loop_s = loop.time
        monkeypatch.setattr(loop, "time", lambda: loop_s() + passed_s)
        data, num_seen = bytearray(), 0
        while not data.endswith(END):
            piece = await asyncio.get_running_loop().sock_recv(unread, 1 << 16)
            assert piece, "it was cut off"
            data += piece
            if len(data) - num_seen > 2 * MIN_BYTES_PER_CHECK:
                num_seen, passed_s = len(data), passed_s + 50.0
                # A turn of the loop, in which it looks whether the client has taken something.
                await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    assert passed_s > 3 * 60.0, "it was not slow"


async def test_a_kept_connection_streams_again(live):
    """A stream leaves the connection ready for the next request."""
    data = fast_json.dumps({"prompt": "again", "max_tokens": 3, "temperature": 0, "stream": True})
    request = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(data) + data
    reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
    for num_requests in (1, 1, 3):  # the last three one behind the other
        writer.write(request * num_requests)
        for _ in range(num_requests):
            assert (await asyncio.wait_for(reader.readuntil(END), 20)).startswith(b"HTTP/1.1 200 ")
    writer.close()
