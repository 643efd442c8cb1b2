"""More connections than may be open: who leaves for whom, who is told 503, and what the log says."""

import asyncio
import contextlib
import errno
import logging
import resource
import shutil
import socket
import ssl
import struct
import subprocess
from functools import partial
from pathlib import Path

import pytest

from penstock import fast_json
from penstock.config import ServerConfig
from penstock.serve.http.acceptor import Acceptor
from penstock.serve.http.connection import HttpConnection
from penstock.serve.http.listener import NUM_EXTRA_CONNECTIONS, connection_limit
from penstock.types.errors import ConfigError
from support.server.connections import LONG, load, send
from support.server.harness import GatedExecutor, running, until
from support.server.http import GET, check_error, connected, post, read_answer
from support.server.waits import set_waits

MAX = 4
MOST = MAX + NUM_EXTRA_CONNECTIONS


@contextlib.contextmanager
def narrow(executor=None):
    with running(executor, config=ServerConfig(port=0, max_connections=MAX, shutdown_timeout_s=0.0)) as server:
        yield server


@contextlib.asynccontextmanager
async def crowd(server, number, data=b""):
    """So many clients, who send this and no more."""
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(connected(server)) for _ in range(number)]
        for _, writer in clients:
            writer.write(data)
        yield clients


async def ask(server, data=GET):
    async with connected(server) as (reader, writer):
        writer.write(data)
        return await read_answer(reader)


@pytest.mark.parametrize("sent", [b"", b"\r\n", b"GET /health HTTP/1.1\r\nHost"], ids=["nothing", "a line", "half a head"])
async def test_who_has_no_request_leaves_for_others(sent, caplog, monkeypatch):
    set_waits(monkeypatch, grace_s=0.1)
    with narrow() as server:
        async with crowd(server, 3 * MOST, sent):
            for _ in range(3):
                assert (await ask(server))[0] == 200
                assert (await ask(server, post()))[0] == 200
            assert len(server.server.acceptor.connections) <= MOST
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) <= 10
    assert all("--max-connections" in message for message in warnings)


async def test_who_waits_longest_leaves_first_and_is_told(monkeypatch):
    set_waits(monkeypatch, grace_s=0.0)
    with narrow() as server:
        async with crowd(server, MAX) as clients:
            readers = [reader for reader, _ in clients]
            for reader, writer in clients:
                writer.write(GET)
                assert (await read_answer(reader))[0] == 200
            # The first is no longer the one that has waited longest, and the second has begun to ask.
            clients[0][1].write(GET)
            assert (await read_answer(readers[0]))[0] == 200
            clients[1][1].write(b"GET /health HT")
            await until(lambda: any(connection.is_reading for connection in server.server.acceptor.connections))
            async with crowd(server, 2):
                check_error(await read_answer(readers[1]), 503, "unavailable")
                assert await readers[2].read() == b""
                await until(lambda: len(server.server.acceptor.connections) == MAX)
                assert not readers[0].at_eof()
                assert not readers[3].at_eof()
                clients[0][1].write(GET)
                assert (await read_answer(readers[0]))[0] == 200


async def test_if_all_are_busy_a_request_is_told_503_and_a_probe_is_answered(monkeypatch):
    set_waits(monkeypatch, grace_s=0.1)
    gate = GatedExecutor()
    with narrow(gate) as server:
        streams = [await send(server, LONG | {"max_tokens": 3, "stream": True}) for _ in range(MAX)]
        await until(lambda: load(server).num_running + load(server).num_waiting == MAX)
        async with crowd(server, 2 * MOST):
            for _ in range(2):
                refused = await ask(server, post())
                check_error(refused, 503, "unavailable")
                assert int(refused[1]["retry-after"]) >= 1
                assert (await ask(server))[0] == 200
                for target in (b"/ready", b"/health?x=1", b"/ready?"):
                    assert (await ask(server, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200
        gate.open()
        for reader, writer in streams:
            assert b"data: [DONE]" in await reader.readuntil(b"0\r\n\r\n")
            writer.close()
        assert (await ask(server, post()))[0] == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """The paths of a key and of its certificate."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    key, paper = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=x"]
    subprocess.run([*command, "-days", "9", "-keyout", key, "-out", paper], check=True, capture_output=True)
    return str(key), str(paper)


LARGE = {"prompt": "a", "max_tokens": 200, "n": 32, "logprobs": 20, "temperature": 1}
"""Its answer is megabytes, more than the system's buffers hold."""


def is_written(connection):
    """The app has given its answer, of which a part waits for the client."""
    return not connection.exchanges and connection.transport.get_write_buffer_size() > 0


@contextlib.asynccontextmanager
async def large_answer(server, context=None):
    """A client that asks for it and reads only what the test reads; the app has written it all."""
    server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    plain = socket.create_connection(("127.0.0.1", server.port))
    plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
    reader, writer = await asyncio.open_connection(
        sock=plain, ssl=context, server_hostname="x" if context else None, limit=1 << 15
    )
    try:
        writer.write(post(fast_json.dumps(LARGE)))
        await until(lambda: any(is_written(connection) for connection in server.server.acceptor.connections))
        yield reader
    finally:
        writer.transport.abort()
        await until(lambda: not server.server.acceptor.connections)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_who_takes_its_answer_slowly_gets_all_of_it(monkeypatch, certificate, has_tls):
    """Each piece is read only after others have come and needed a place."""
    set_waits(monkeypatch, grace_s=0.0, closing_s=0.0)
    key, paper = certificate if has_tls else (None, None)
    config = ServerConfig(port=0, max_connections=MAX, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0)
    trust = ssl.create_default_context(cafile=paper) if has_tls else None
    if trust is not None:
        trust.check_hostname = False
    calls = []
    make_room = Acceptor._make_room
    monkeypatch.setattr(Acceptor, "_make_room", lambda acceptor: (calls.append(acceptor), make_room(acceptor)))
    with running(config=config) as server:
        async with large_answer(server, trust) as reader:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            num_bytes = int(head.partition("content-length: ")[2].split("\r\n")[0])
            assert num_bytes > 2 << 20
            num_read = 0
            while num_read < num_bytes:
                if num_read < 1 << 18:
                    calls.clear()
                    async with crowd(server, 2 * MAX):
                        await until(lambda: calls)
                num_read += len(await reader.readexactly(min(1 << 16, num_bytes - num_read)))


async def test_who_takes_no_more_of_its_answer_leaves_for_others(monkeypatch):
    set_waits(monkeypatch, grace_s=0.0, stall_s=0.0, look_every_s=0.01)
    with narrow() as server:
        async with large_answer(server):
            (connection,) = server.server.acceptor.connections
            assert connection.transport.get_write_buffer_size() > 1 << 20
            await until(lambda: connection in server.server.acceptor._idle_since_s)
            async with crowd(server, 2 * MOST):
                await until(lambda: connection not in server.server.acceptor.connections)


async def test_who_takes_nothing_of_its_answer_holds_no_place(monkeypatch):
    """To close such a connection waits for the client; its place does not."""
    set_waits(monkeypatch, grace_s=0.0)
    with narrow() as server:
        async with connected(server) as (reader, writer):
            writer.write(GET)
            await read_answer(reader)
            (connection,) = server.server.acceptor.connections
            transport = connection.transport
            server.server._loop.call_soon_threadsafe(transport.write, b"x" * (64 << 20))
            await until(lambda: transport.get_write_buffer_size() > 0)
            async with crowd(server, 2 * MOST):
                await until(lambda: connection not in server.server.acceptor.connections)


async def test_who_takes_an_answer_by_drops_is_cut_off(monkeypatch):
    """The rate is the one that requests need."""
    set_waits(monkeypatch, look_every_s=0.01, write_timeout_s=0.2)
    with narrow() as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 11)
        client.connect(("127.0.0.1", server.port))
        client.sendall(post(fast_json.dumps(LARGE)))
        await until(lambda: any(is_written(connection) for connection in server.server.acceptor.connections))
        for _ in range(50):
            client.recv(1 << 10)
            await asyncio.sleep(0.04)
            if not server.server.acceptor.connections:
                return
    pytest.fail("it was never cut off")


@pytest.mark.parametrize(
    ("has_handshake", "sent"), [(False, b""), (True, b""), (True, GET[:-2] + b"Connection: close\r\n\r\n")]
)
async def test_a_silent_crowd_with_tls_leaves_for_others(certificate, has_handshake, sent, monkeypatch):
    """Before the handshake, after it, and after the answer: without the good-bye that TLS wants."""
    set_waits(monkeypatch, grace_s=0.1)
    key, paper = certificate
    config = ServerConfig(port=0, max_connections=MAX, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0)
    trust = ssl.create_default_context(cafile=paper)
    trust.check_hostname = False
    with running(config=config) as server, contextlib.ExitStack() as stack:

        def connect(context=trust):
            plain = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            return stack.enter_context(context.wrap_socket(plain)) if context else plain

        for _ in range(2 * MOST):
            (await asyncio.to_thread(connect, trust if has_handshake else None)).sendall(sent)
        connection = await asyncio.to_thread(connect)
        connection.sendall(GET)
        assert (await asyncio.to_thread(connection.recv, 1 << 16)).startswith(b"HTTP/1.1 200 ")
        stack.close()
        await until(lambda: not server.server.acceptor.connections)


async def test_a_client_that_was_refused_over_tls_is_closed_with_the_server(certificate, caplog):
    key, paper = certificate
    config = ServerConfig(port=0, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0)
    trust = ssl.create_default_context(cafile=paper)
    trust.check_hostname = False
    with running(config=config) as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain:
        client = await asyncio.to_thread(trust.wrap_socket, plain)
        client.sendall(b"HELO\r\n")
        assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 400 ")
        await asyncio.to_thread(server.stop)
        client.close()
    assert server.server.ended_cleanly
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_says_goodbye_over_tls_hears_one(certificate):
    key, paper = certificate
    config = ServerConfig(port=0, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0)
    trust = ssl.create_default_context(cafile=paper)
    trust.check_hostname = False
    with running(config=config) as server, socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain:
        client = await asyncio.to_thread(trust.wrap_socket, plain)
        client.sendall(GET)
        assert (await asyncio.to_thread(client.recv, 1 << 16)).startswith(b"HTTP/1.1 200 ")
        plain = await asyncio.to_thread(client.unwrap)  # An SSLError without the server's own.
        assert plain.recv(1) == b""
        plain.close()


async def test_a_goodbye_over_tls_is_heard_behind_nonsense(certificate):
    """It ends the request that runs, though nothing else is read any more."""
    key, paper = certificate
    config = ServerConfig(port=0, ssl_keyfile=key, ssl_certfile=paper, shutdown_timeout_s=0.0)
    trust = ssl.create_default_context(cafile=paper)
    trust.check_hostname = False
    gate = GatedExecutor()
    with running(gate, config=config) as server:
        plain = await asyncio.to_thread(socket.create_connection, ("127.0.0.1", server.port), 5)
        with await asyncio.to_thread(trust.wrap_socket, plain) as client:
            client.sendall(post() + b"HELO\r\n")
            await until(lambda: any(connection.is_refused for connection in server.server.acceptor.connections))
            (await asyncio.to_thread(client.unwrap)).close()
        gate.open()
        await until(lambda: not server.server.acceptor.tasks)


async def test_pieces_after_a_reset_are_dropped_in_silence(caplog):
    """The app may write several before the event loop turns to the end of the connection."""
    has_ended = asyncio.Event()
    client = socket.socket()

    async def app(_scope, _receive, send):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"piece", "more_body": True})
        has_ended.set()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        acceptor = Acceptor(listener, partial(HttpConnection, app, max_body_bytes=1), max_connections=MAX, ssl_context=None)
        client.connect(listener.getsockname())
        client.sendall(GET)
        async with asyncio.timeout(20):
            await has_ended.wait()
            acceptor.close()
            await acceptor.drain(20)
    assert not caplog.records


async def test_a_connection_that_opens_while_the_server_ends_does_not_hold_it_up():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        make_connection = partial(HttpConnection, None, max_body_bytes=1)
        acceptor = Acceptor(listener, make_connection, max_connections=MAX, ssl_context=None)
        with socket.create_connection(listener.getsockname()):
            while not acceptor.tasks:  # noqa: ASYNC110  # `until` would let the connection open
                await asyncio.sleep(0)
            acceptor.close()
            async with asyncio.timeout(3):
                await acceptor.drain(20)


class ExhaustedListener:
    """Connections wait there always, and there is no descriptor for them."""

    def __init__(self, readable):
        self.fileno = readable.fileno
        self.num_tries = 0

    def setblocking(self, is_blocking):
        assert not is_blocking

    def accept(self):
        self.num_tries += 1
        raise OSError(errno.EMFILE, "Too many open files")


async def test_without_descriptors_it_tries_again_and_tells_it_once(monkeypatch, caplog):
    set_waits(monkeypatch, retry_s=0.001)
    readable, other = socket.socketpair()
    with readable, other:
        other.send(b"x")
        listener = ExhaustedListener(readable)
        acceptor = Acceptor(
            listener, lambda acceptor, encryption: pytest.fail("there is none"), max_connections=MAX, ssl_context=None
        )
        await until(lambda: listener.num_tries >= 20)
        acceptor.close()
        assert acceptor._retry_timer is None
        assert not asyncio.get_running_loop().remove_reader(readable)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "Too many open files" in record.message


def limit_open_files(monkeypatch, num_files):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (num_files, num_files))


@pytest.mark.parametrize(
    ("beside", "asked", "least", "most"), [(240, None, 100, 192), (240, 50, 50, 50), (1 << 20, None, 8192, 8192)]
)
def test_the_limit_of_open_files_leaves_so_many_connections(monkeypatch, beside, asked, least, most):
    """`beside`: the open files that the limit allows beside those of this process, of which other tests leave some."""
    soft = beside + sum(1 for _ in Path("/dev/fd").iterdir())
    limit_open_files(monkeypatch, soft)
    assert least <= connection_limit(ServerConfig(max_connections=asked)) <= most


@pytest.mark.parametrize(("soft", "asked"), [(64, None), (256, 250)])
def test_too_low_a_limit_of_open_files_is_told_with_a_remedy(monkeypatch, soft, asked):
    limit_open_files(monkeypatch, soft)
    with pytest.raises(ConfigError, match=f"may open only {soft}.*ulimit -Hn"):
        connection_limit(ServerConfig(max_connections=asked))


def test_a_limit_of_open_files_that_is_none(monkeypatch):
    limit_open_files(monkeypatch, resource.RLIM_INFINITY)
    assert connection_limit(ServerConfig(max_connections=10**6)) == 10**6
    assert connection_limit(ServerConfig()) == 8192
