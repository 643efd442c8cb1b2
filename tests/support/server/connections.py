"""Helpers that `server/test_connections.py` shares with other tests."""

import asyncio

from penstock import fast_json

LONG = {"prompt": "hello", "max_tokens": 1000, "temperature": 0}


def load(server):
    return server.runtime.engine.load()


async def send(server, body, path="/v1/completions"):
    """A raw request on its own connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    data = fast_json.dumps(body)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer
