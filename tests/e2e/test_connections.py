"""Clients that speak HTTP in odd ways or not at all, in crowds: the stream beside them says what it says alone."""

from __future__ import annotations

import gzip
import json
import socket
import struct
from collections.abc import Iterable

import httpx
import pytest

from support.e2e.process import COMPLETIONS, GOOD, TIMEOUT_S, Answer, RealServer, undisturbed, until

pytestmark = pytest.mark.model

BODY = json.dumps({"prompt": "Hi", "max_tokens": 2, "temperature": 0}).encode()


def connect(server: RealServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=TIMEOUT_S)


def post(body: bytes = BODY, *headers: str, version: str = "1.1", length: int | None = -1, closes: bool = True) -> bytes:
    """A request's bytes. A length of -1 is the right one, None is none at all."""
    lines = [f"POST {COMPLETIONS} HTTP/{version}", "Host: penstock", "Content-Type: application/json", *headers]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length == -1 else length}")
    if closes:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode() + body


def chunked(body: bytes, size: int) -> bytes:
    pieces = [body[i : i + size] for i in range(0, len(body), size)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in [*pieces, b""])


def exchange(server: RealServer, sent: bytes | Iterable[bytes]) -> bytes:
    """All that comes back until the server closes the connection."""
    received = b""
    with connect(server) as connection:
        for part in [sent] if isinstance(sent, bytes) else sent:
            connection.sendall(part)
        while data := connection.recv(1 << 16):
            received += data
    return received


def status(received: bytes) -> int:
    assert received.startswith(b"HTTP/1.1 "), received[:200]
    return int(received.split(b" ", 2)[1])


ODD_BUT_RIGHT = {
    "HTTP/1.0": post(version="1.0"),
    "in pieces": [post()[:7], post()[7:90], post()[90:]],
    "chunked by the byte": post(b"", "Transfer-Encoding: chunked", length=None) + chunked(BODY, 1),
    "long header": post(BODY, "X-Unknown: " + "a" * 30_000),
    "offer of HTTP/2": post(BODY, "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA").replace(
        b"Connection: close", b"Connection: Upgrade, HTTP2-Settings, close"
    ),
    "expect": [post(b"", "Expect: 100-continue", length=len(BODY)), BODY],
    "no content type": post().replace(b"Content-Type: application/json\r\n", b"", 1),
}


def test_odd_but_right(server: RealServer, good: Answer) -> None:
    with undisturbed(server, good):
        for name, sent in ODD_BUT_RIGHT.items():
            received = exchange(server, sent).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert status(received) == 200, name
            assert json.loads(received.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2, name


WRONG = {
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 9, 400),
    "SMTP": (b"HELO example.org\r\n\r\n", 400),
    "negative length": (post(length=-5), 400),
    "two lengths": (post(BODY, "Content-Length: 7"), 400),
    "length and chunked": (post(b"", "Transfer-Encoding: chunked", length=9) + chunked(BODY, 9), 400),
    "malformed chunk": (post(b"", "Transfer-Encoding: chunked", length=None) + b"zz\r\n", 400),
    "no length": (post(length=None), 400),
    "enormous length": (post(length=10**9), 413),
    "OPTIONS": (post().replace(b"POST", b"OPTIONS", 1), 405),
    "GET": (post().replace(b"POST", b"GET", 1), 405),
    "unknown path": (post().replace(b"/v1/", b"/v3/", 1), 404),
    "CONNECT": (b"CONNECT example.org:443 HTTP/1.1\r\nHost: example.org\r\n\r\n", 400),
    "long path": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431),
    "long header": (post(BODY, "X-Unknown: " + "a" * 70_000), 431),
    "endless header": (post(BODY, "X-Unknown: " + "a" * 5_000_000), 431),
    "compressed": (post(gzip.compress(BODY), "Content-Encoding: gzip"), 415),
}


def test_wrong(server: RealServer, good: Answer) -> None:
    with undisturbed(server, good):
        for name, (sent, wanted) in WRONG.items():
            received = exchange(server, sent)
            assert status(received) == wanted, name
            assert set(json.loads(received.partition(b"\r\n\r\n")[2])) == {"error"}, name
    assert "WARNING" not in server.log.read_text()


def test_pipelined_requests_are_answered_in_order(server: RealServer, good: Answer) -> None:
    lengths = [3, 1, 2, 4]
    bodies = [json.dumps({"prompt": "Hi", "max_tokens": length, "ignore_eos": True}).encode() for length in lengths]
    sent = b"".join(post(body, closes=number == len(bodies) - 1) for number, body in enumerate(bodies))
    with undisturbed(server, good):
        received = exchange(server, sent)
    assert received.count(b"HTTP/1.1 200 OK") == len(lengths)
    counts = [int(part.split(b",")[0]) for part in received.split(b'"completion_tokens":')[1:]]
    assert counts == lengths


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", post(length=1_000_000)], ids=["nothing", "half a head", "half a body"])
def test_slow_clients_in_a_crowd_keep_nobody_waiting(server: RealServer, good: Answer, sent: bytes) -> None:
    crowd = [connect(server) for _ in range(300)]
    try:
        with undisturbed(server, good):
            for connection in crowd:
                connection.sendall(sent)
            assert status(exchange(server, post())) == 200
    finally:
        for connection in crowd:
            connection.close()
    assert status(exchange(server, post())) == 200


def reset(connection: socket.socket) -> None:
    """Close it rudely: the server gets an RST, and not a FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_thousands_of_connections_that_come_to_nothing(server: RealServer, good: Answer) -> None:
    with undisturbed(server, good):
        for number in range(2_000):
            connection = connect(server)
            reset(connection) if number % 2 else connection.close()
    assert status(exchange(server, post())) == 200


def test_a_storm_of_clients_that_leave_at_once_leaves_nothing_behind(server: RealServer, good: Answer) -> None:
    """Some leave before their request is read, some while it waits, some with the first byte of the answer."""
    endless = json.dumps({**GOOD, "prompt": "Again", "max_tokens": 8000, "stream": True}).encode()
    with undisturbed(server, good):
        for number in range(150):
            connection = connect(server)
            connection.sendall(post(endless))
            if number % 10 == 0:
                assert connection.recv(1)
            reset(connection) if number % 2 else connection.close()
    until(lambda: server.metric("requests_running") + server.metric("requests_waiting") == 0)
    assert server.metric("kv_blocks", state="held") == 0
    assert server.metric("request_success_total", finish_reason="error") == 0


def test_a_client_that_does_not_read_holds_up_nobody(server: RealServer, good: Answer) -> None:
    lazy = socket.socket()
    lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    with lazy:
        lazy.connect(("127.0.0.1", server.port))
        lazy.sendall(post(json.dumps({**GOOD, "max_tokens": 400, "stream": True, "logprobs": 20}).encode()))
        with undisturbed(server, good), httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as client:
            assert client.get("/ready").status_code == 200
        reset(lazy)
    until(lambda: server.metric("requests_running") == 0)
