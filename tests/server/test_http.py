"""Bytes that come before a request can be routed: heads without end, requests that stop half way, offers of other protocols."""

import asyncio
import contextlib
import logging
from functools import partial

import httpx
import pytest

from penstock import fast_json
from penstock.config import ServerConfig
from penstock.serve.http.acceptor import Acceptor
from penstock.serve.http.connection import MAX_HEAD_BYTES, HttpConnection
from penstock.serve.http.listener import bind_socket
from support.server.harness import GatedExecutor, LiveServer, make_runtime, running, until
from support.server.http import BODY, CHUNKED, GET, check_error, connected, head, post, read_answer
from support.server.waits import set_waits

OFFER = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")


async def exchange(server, data):
    """The one answer, after which the server closes."""
    async with connected(server) as (reader, writer):
        writer.write(data)
        answer = await read_answer(reader)
        assert await reader.read() == b""
        return answer


@pytest.mark.parametrize(
    "data",
    [
        post(BODY, "X-Long: " + "a" * MAX_HEAD_BYTES),
        post(BODY, *[f"X-{i}: a" for i in range(10_000)]),
        b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n",
        post(BODY, "X-Long: " + "a" * MAX_HEAD_BYTES, *OFFER),
        b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 10_000,
    ],
    ids=["one header", "many headers", "address", "offer of HTTP/2", "headers of few bytes"],
)
async def test_a_head_beyond_the_limit_is_a_431(live, data):
    error = check_error(await exchange(live, data), 431, "request_header_fields_too_large")
    assert str(MAX_HEAD_BYTES) in error["message"]


NONSENSE = pytest.mark.parametrize(
    ("nonsense", "status"), [(b"HELO\r\n", 400), (post(BODY, "X-Long: " + "a" * MAX_HEAD_BYTES), 431)], ids=["no HTTP", "head"]
)


@NONSENSE
async def test_nonsense_behind_a_request_ends_the_connection_after_its_answer(gated, gate, nonsense, status):
    async with connected(gated) as (reader, writer):
        writer.write(post() + nonsense + GET)
        # All of it, so that the answer can't come before the nonsense.
        await until(lambda: any(connection.is_refused for connection in gated.server.acceptor.connections))
        gate.open()
        assert (await read_answer(reader))[0] == 200
        assert await reader.read() == b""


@NONSENSE
async def test_nonsense_after_an_answer_is_refused(live, nonsense, status):
    async with connected(live) as (reader, writer):
        writer.write(GET)
        assert (await read_answer(reader))[0] == 200
        writer.write(nonsense + GET)
        assert (await read_answer(reader))[0] == status
        assert await reader.read() == b""


@pytest.mark.parametrize(
    "begin",
    [b"GET /health HTTP/1.1\r\nX-Long: ", b"GET /", post(b"0\r\nX-Trailer: ", CHUNKED), post(b"1;", CHUNKED)],
    ids=["header", "address", "trailer", "chunk extension"],
)
async def test_what_never_ends_is_refused_long_before_it_fills_the_memory(live, begin):
    async with connected(live) as (reader, writer):
        writer.write(begin)
        answer = asyncio.create_task(read_answer(reader))
        num_bytes = 0
        while not answer.done():
            writer.write(b"a" * 10_000)
            num_bytes += 10_000
            await writer.drain()
            await asyncio.sleep(0)
            assert num_bytes < 64 << 20
        check_error(await answer, 431, "request_header_fields_too_large")


async def test_a_head_within_the_limit_is_read_however_it_comes(live):
    data = post(BODY, "X-Long: " + "a" * (MAX_HEAD_BYTES - 500), "Connection: close")
    async with connected(live) as (reader, writer):
        for begin in range(0, len(data), 999):
            writer.write(data[begin : begin + 999])
            await writer.drain()
        assert (await read_answer(reader))[0] == 200


async def test_trailers_are_passed_over(live):
    chunks = b"%x\r\n%s\r\n0\r\nX-Request-Id: two words\r\n\r\n" % (len(BODY), BODY)
    answer = await exchange(live, post(chunks, CHUNKED, "Connection: close"))
    assert answer[0] == 200


@pytest.mark.parametrize("num_pieces", [1, 7, 1000])
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_an_offer_of_http2_is_passed_over(live, num_pieces, is_chunked, caplog):
    """Java's HttpClient and `curl --http2` make it with every first request."""
    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY) if is_chunked else BODY
    data = post(body, *OFFER, *([CHUNKED] if is_chunked else []))
    size = -(-len(data) // num_pieces)
    with caplog.at_level(logging.WARNING):
        async with connected(live) as (reader, writer):
            for begin in range(0, len(data), size):
                writer.write(data[begin : begin + size])
                await asyncio.sleep(0)
            assert (await read_answer(reader))[0] == 200
            writer.write(GET)  # The connection goes on as HTTP/1.1.
            assert (await read_answer(reader))[0] == 200
    assert not caplog.records


async def test_an_offer_of_websockets_gets_a_plain_answer(live):
    head = b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n\r\n"
    async with connected(live) as (reader, writer):
        writer.write(head + GET)
        assert (await read_answer(reader))[0] == 200
        assert (await read_answer(reader))[0] == 200


async def test_a_tunnel_is_refused(live):
    answer = await exchange(live, b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n")
    check_error(answer, 400, "invalid_request_error")


async def test_what_is_no_http_is_an_error_object_and_not_in_the_log(live, caplog):
    with caplog.at_level(logging.WARNING):
        for data in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5, b"HELO x\r\n\r\n", post(length=-5)):
            check_error(await exchange(live, data), 400, "invalid_request_error")
    assert not caplog.records


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        ["Host: a", "Host: a"],
        ["Host: a", "host: b"],
        ["Host: a b"],
        ["Host: a\tb "],
        ["Host: a/b"],
        ["Host: user@a"],
        ["Host: a:80:81"],
        ["Host: a:http"],
        ["Host: [::1"],
        ["Host: a, b"],
    ],
)
async def test_a_request_has_one_host(live, hosts):
    error = check_error(await exchange(live, head("GET /health HTTP/1.1", *hosts)), 400, "invalid_request_error")
    assert error["param"] == "Host"


@pytest.mark.parametrize(
    "host", ["", "a", "a ", "a:80 \t", "\t a\t", "A_b-c.example.:", "127.0.0.1:8000", "[::1]", "[fe80::1%25eth0]:80", "%41"]
)
@pytest.mark.parametrize("version", ["1.0", "1.1", "1.2", "1.9"])
async def test_every_host_and_version_that_may_be_is_served(live, host, version):
    """A later HTTP/1 is to be understood as the latest that is known: RFC 9110, 2.5."""
    assert (await exchange(live, head(f"GET /health HTTP/{version}", f"Host: {host}", "Connection: close")))[0] == 200


async def test_http_1_0_needs_no_host_but_has_no_chunks(live):
    assert (await exchange(live, head("GET /health HTTP/1.0")))[0] == 200
    answer = await exchange(live, head("POST /v1/completions HTTP/1.0", CHUNKED) + b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY))
    assert check_error(answer, 400, "invalid_request_error")["param"] == "Transfer-Encoding"
    assert check_error(await exchange(live, head("GET / HTTP/1.0", "Host: a", "Host: a")), 400, "invalid_request_error")


@pytest.mark.parametrize("line", ["GET /health HTTP/2.0", "GET /health HTTP/3.0", "GET /health HTTP/0.9", "GET /health"])
async def test_another_version_of_http_is_a_505(live, line):
    check_error(await exchange(live, head(line, "Host: x")), 505, "http_version_not_supported")


async def test_http2_without_an_offer_is_a_505(live):
    check_error(await exchange(live, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505, "http_version_not_supported")


@pytest.mark.parametrize(
    "length", [str(2**63), str(10**19), str(2**64 - 1), str(2**64), "9" * 5000], ids=lambda text: text[:21]
)
async def test_a_length_beyond_every_limit_is_a_413_at_once(live, length):
    sent = head("POST /v1/completions HTTP/1.1", "Host: x", f"Content-Length: {length}")
    error = check_error(await exchange(live, sent), 413, "request_too_large")
    assert "--max-body-size" in error["message"]


async def test_a_length_may_begin_with_zeros(live):
    sent = head("POST /v1/completions HTTP/1.1", "Host: x", "Connection: close", f"Content-Length: {len(BODY):05000}")
    assert (await exchange(live, sent + BODY))[0] == 200


@pytest.fixture
def impatient(monkeypatch):
    """A server that waits a tenth of a second where others wait half a minute."""
    set_waits(monkeypatch, read_timeout_s=0.1)
    with running() as server:
        yield server


@pytest.mark.parametrize("data", [b"POST /v1/comp", post(b"{", length=1000), post(b"5\r\n", CHUNKED)])
async def test_half_a_request_times_out(impatient, data, caplog):
    for before in (b"", GET):
        async with connected(impatient) as (reader, writer):
            writer.write(before + data)
            if before:
                assert (await read_answer(reader))[0] == 200
            check_error(await read_answer(reader), 408, "request_timeout")
            assert await reader.read() == b""
    await until(lambda: not impatient.server.acceptor.connections)
    await until(lambda: not impatient.server.acceptor.tasks)
    assert not caplog.records


@pytest.mark.parametrize("data", [b"", b"\r\n"])
async def test_a_connection_without_any_request_is_closed(impatient, data, monkeypatch):
    set_waits(monkeypatch, keep_alive_s=0.1)
    async with connected(impatient) as (reader, writer):
        writer.write(data)
        assert await reader.read() == b""


async def test_a_slow_upload_that_goes_on_is_waited_for(impatient):
    body = BODY.ljust(500_000)
    async with connected(impatient) as (reader, writer):
        writer.write(post(b"", length=len(body)))
        for begin in range(0, len(body), 50_000):
            await asyncio.sleep(0.04)
            writer.write(body[begin : begin + 50_000])
        assert (await read_answer(reader))[0] == 200


async def test_a_request_behind_a_long_answer_has_time(monkeypatch):
    """It cannot come whole while nobody reads it."""
    set_waits(monkeypatch, read_timeout_s=0.1)
    gate = GatedExecutor()
    with running(gate) as server:
        async with connected(server) as (reader, writer):
            second = post(BODY.ljust(300_000), "Connection: close")
            writer.write(post() + second[:200_000])
            await until(lambda: server.runtime.engine.load().num_running == 1)
            async with connected(server) as (other_reader, other):
                other.write(b"GET")
                check_error(await read_answer(other_reader), 408, "request_timeout")
            set_waits(monkeypatch, read_timeout_s=20.0)
            gate.open()
            assert (await read_answer(reader))[0] == 200
            writer.write(second[200_000:])
            assert (await read_answer(reader))[0] == 200


async def test_a_request_that_was_answered_early_may_still_end():
    with running(config=ServerConfig(port=0, api_keys=("key",), shutdown_timeout_s=0.0)) as server:
        async with connected(server) as (reader, writer):
            writer.write(post(BODY[:5], length=len(BODY)))
            assert (await read_answer(reader))[0] == 401
            writer.write(BODY[5:] + GET)
            assert (await read_answer(reader))[0] == 200


async def test_shutdown_does_not_wait_for_half_requests(caplog):
    runtime = make_runtime()
    with caplog.at_level(logging.WARNING), LiveServer(runtime, ServerConfig(port=0, shutdown_timeout_s=30.0)) as server:
        async with contextlib.AsyncExitStack() as stack:
            clients = []
            for data in (b"", b"POST /v1", post(b"{", length=1000), post(b"5\r\n", CHUNKED), GET + b"POST"):
                clients.append(await stack.enter_async_context(connected(server)))
                clients[-1][1].write(data)
            assert (await read_answer(clients[-1][0]))[0] == 200
            await until(lambda: len(server.server.acceptor.tasks) == 2)
            server.server.request_shutdown()
            for reader, _ in clients[1:]:
                check_error(await read_answer(reader), 503, "unavailable")
                assert await reader.read() == b""
            assert await clients[0][0].read() == b""
            server.thread.join(3)
            assert not server.thread.is_alive()
        assert server.server.ended_cleanly
    assert not caplog.records


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/version", "/v1/models", "/v1/models/toy"])
async def test_head_is_get_without_a_body(live, path):
    async with httpx.AsyncClient(base_url=live.url, timeout=20) as client:
        head, get = await client.head(path), await client.get(path)
        assert head.status_code == get.status_code == 200
        assert head.content == b""
        assert head.headers["content-type"] == get.headers["content-type"]
        assert (await client.head("/v1/completions")).status_code == 405


async def test_a_stream_to_http_1_0_ends_with_the_connection(live):
    """HTTP/1.0 knows no chunks."""
    body = fast_json.dumps({"prompt": "a", "max_tokens": 2, "stream": True})
    async with connected(live) as (reader, writer):
        writer.write(post(body).replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = (await reader.read()).lower()
    assert b"transfer-encoding" not in answer
    assert answer.endswith(b"data: [done]\n\n")


@contextlib.asynccontextmanager
async def serving(app):
    """Serve an ASGI app. Yields its acceptor, and a client's reader and writer."""
    with bind_socket("127.0.0.1", 0) as listener:
        make_connection = partial(HttpConnection, app, max_body_bytes=1)
        acceptor = Acceptor(listener, make_connection, max_connections=1, ssl_context=None)
        reader, writer = await asyncio.open_connection(*listener.getsockname(), limit=1 << 10)
        try:
            yield acceptor, reader, writer
        finally:
            writer.close()
            acceptor.close()


def answering(body, *, ends):
    """An ASGI app that sends a body without a length: all of it (`whole`), or a part, and then fails or waits for the end."""

    async def app(_scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": ends != "whole"})
        if ends == "fails":
            raise RuntimeError
        while ends == "waits" and (await receive())["type"] != "http.disconnect":
            pass

    return app


MUCH = b"x" * (32 << 20)
"""More than the system's buffers hold."""


@pytest.mark.parametrize(("version", "is_reset"), [("1.0", True), ("1.1", False)])
async def test_half_an_answer_never_looks_whole(version, is_reset):
    """Chunks show where an answer ends. HTTP/1.0 has none, and the end of the connection would look like the answer's."""
    async with serving(answering(b"half", ends="fails")) as (_, reader, writer):
        writer.write(head(f"GET / HTTP/{version}", "Host: a"))
        if is_reset:
            with pytest.raises(ConnectionResetError):
                await reader.read()
        else:
            assert (await reader.read()).endswith(b"\r\n4\r\nhalf\r\n")


@pytest.mark.parametrize("ends", ["whole", "waits"])
@pytest.mark.parametrize("way", ["drain", "stall"])
async def test_an_answer_to_http_1_0_that_is_cut_off_never_looks_whole(monkeypatch, way, ends):
    if way == "stall":
        set_waits(monkeypatch, look_every_s=0.01, write_timeout_s=0.1)
    async with serving(answering(MUCH, ends=ends)) as (acceptor, reader, writer):
        writer.write(head("GET / HTTP/1.0"))
        await reader.readexactly(5)
        if way == "drain":
            await acceptor.drain(0.1)
        await until(lambda: not acceptor.connections)
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_half_answered_http_1_0_client_that_closes_its_side_is_reset():
    async with serving(answering(b"half", ends="waits")) as (_, reader, writer):
        writer.write(head("GET / HTTP/1.0"))
        await reader.readuntil(b"half")
        writer.write_eof()
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_a_half_answered_http_1_0_client_whose_request_stalls_is_reset(monkeypatch):
    set_waits(monkeypatch, read_timeout_s=0.1)
    async with serving(answering(b"half", ends="waits")) as (_, reader, writer):
        writer.write(head("POST / HTTP/1.0", "Content-Length: 2"))
        with pytest.raises(ConnectionResetError):
            await reader.read()


async def test_the_rest_of_a_request_that_is_refused_early_may_still_come(live):
    """The answer is not lost to a reset."""
    async with connected(live) as (reader, writer):
        writer.write(post(BODY[:5], length=1 << 40))
        for _ in range(100):
            writer.write(b"x" * 10_000)
        check_error(await read_answer(reader), 413, "request_too_large")
        assert await reader.read() == b""


async def test_the_second_of_two_requests_is_refused_after_the_first_is_answered(gated, gate):
    async with connected(gated) as (reader, writer):
        writer.write(post() + post(b"5\r\nabc", CHUNKED)[:-3] + b"no chunk\r\n")
        await until(lambda: any(connection.is_refused for connection in gated.server.acceptor.connections))
        gate.open()
        assert (await read_answer(reader))[0] == 200
        assert await reader.read() == b""


async def test_nothing_is_timed_of_a_connection_that_was_closed_after_an_early_answer(monkeypatch):
    timed = []
    start = HttpConnection._start_read_timer
    monkeypatch.setattr(HttpConnection, "_start_read_timer", lambda connection: (timed.append(connection), start(connection)))
    set_waits(monkeypatch, read_timeout_s=0.05)
    with running() as server:
        check_error(await exchange(server, post(BODY[:5], length=1 << 40)), 413, "request_too_large")
        await until(lambda: not server.server.acceptor.connections)
        timed.clear()
        check_error(await exchange(server, b"GET"), 408, "request_timeout")  # as long as the timer of the other takes
    assert len(set(timed)) == 1


async def test_a_crowd_of_requests_behind_a_long_answer_is_not_read(gated, gate):
    """Each takes a hundred times the memory of its bytes."""
    short = b"GET /health HTTP/1.1\r\nHost:\r\n\r\n"
    async with connected(gated) as (reader, writer):
        writer.write(post())
        await until(lambda: gated.runtime.engine.load().num_running == 1)
        (connection,) = gated.server.acceptor.connections
        writer.write(short * 4000)
        await until(lambda: not connection.transport.is_reading())
        most = len(connection.exchanges)
        gate.open()
        assert (await read_answer(reader))[0] == 200
        for _ in range(4000):
            assert (await read_answer(reader))[0] == 200
            most = max(most, len(connection.exchanges))
    assert most < 1000


async def test_a_client_that_waits_for_100_continue_may_keep_its_body_after_a_refusal(live):
    """Whether the body comes is not known, so what comes next cannot be read: the connection is closed (RFC 9110, 10.1.1)."""
    sent = head("POST /nowhere HTTP/1.1", "Host: x", "Expect: 100-continue", f"Content-Length: {len(GET)}")
    async with connected(live) as (reader, writer):
        writer.write(sent)
        check_error(await read_answer(reader), 404, "not_found")
        writer.write(GET + GET)
        assert await reader.read() == b""


async def test_http_1_0_knows_no_100_continue(live):
    async with connected(live) as (reader, writer):
        writer.write(post(b"", "Expect: 100-continue", length=len(BODY)).replace(b"HTTP/1.1", b"HTTP/1.0"))
        await until(lambda: any(connection.exchanges for connection in live.server.acceptor.connections))
        writer.write(BODY)
        assert (await read_answer(reader))[0] == 200


async def test_white_space_behind_a_value_does_not_count(live):
    """RFC 9112, 5.1."""
    async with connected(live) as (reader, writer):
        writer.write(post(b"", "Expect: 100-continue \t", "X-Request-Id: trace ", length=f"{len(BODY)} "))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(BODY)
        status, headers, _ = await read_answer(reader)
        assert (status, headers["x-request-id"]) == (200, "trace")


async def test_a_body_that_is_compressed_for_its_transfer_is_refused(live):
    sent = head("POST /v1/completions HTTP/1.1", "Host: x", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n"
    error = check_error(await exchange(live, sent), 400, "invalid_request_error")
    assert error["param"] == "Transfer-Encoding"


async def test_an_address_with_a_host_may_have_no_path(live):
    """RFC 9112, 3.2.2."""
    async with connected(live) as (reader, writer):
        writer.write(head("HEAD http://toy?a=1 HTTP/1.1", "Host: toy"))
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")


async def test_each_of_several_requests_may_offer_http2(live):
    offer = head("GET /health HTTP/1.1", "Host: x", *OFFER)
    async with connected(live) as (reader, writer):
        writer.write(offer * 3)
        for _ in range(3):
            assert (await read_answer(reader))[0] == 200


async def test_an_answer_before_nonsense_is_not_lost_to_a_reset(gated, gate):
    async with connected(gated) as (reader, writer):
        writer.write(post() + b"HELO\r\n")
        await until(lambda: any(connection.is_refused for connection in gated.server.acceptor.connections))
        gate.open()
        await until(lambda: not gated.server.acceptor.tasks)
        for _ in range(10):
            writer.write(b"x" * 10_000)
            await asyncio.sleep(0.01)
        assert (await read_answer(reader))[0] == 200
        assert await reader.read() == b""
