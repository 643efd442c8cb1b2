"""Helpers that `server/test_http.py` shares with other tests."""

import asyncio
import contextlib

from penstock import fast_json

BODY = b'{"prompt": "a", "max_tokens": 2}'

CHUNKED = "Transfer-Encoding: chunked"


def post(body=BODY, *headers, length=None, path="/v1/completions"):
    """A request's bytes; its connection stays open unless a header says otherwise."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", *headers]
    if CHUNKED not in headers:
        lines.append(f"Content-Length: {len(body) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + body


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@contextlib.asynccontextmanager
async def connected(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(20):
            yield reader, writer
    finally:
        writer.close()


async def read_answer(reader):
    """Status, headers and body of the next answer."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    status, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(status.split(" ")[1]), headers, body


def check_error(answer, status, code):
    assert answer[0] == status, answer
    error = fast_json.loads(answer[2])["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    assert answer[1]["connection"] == "close"
    return error


def head(*lines):
    return "\r\n".join([*lines, "", ""]).encode()
