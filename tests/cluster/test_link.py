"""A connection between the front and a replica."""

from __future__ import annotations

import asyncio
import socket

import msgspec

from penstock.cluster.link import Link
from penstock.serve.http.listener import bind_socket


def read_all(peer: socket.socket) -> bytes:
    read = bytearray()
    while data := peer.recv(1 << 20):
        read += data
    return bytes(read)


def test_what_was_sent_before_the_end_arrives_at_an_end_that_reads_late() -> None:
    async def send_and_finish() -> None:
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()
        with bind_socket("127.0.0.1", 0) as listener:
            link = Link(lambda *_: None, lambda _, cause: lost.set_result(cause))
            await loop.create_connection(lambda: link, *listener.getsockname())
            peer, _ = listener.accept()
        with peer:
            message = bytes(50_000_000)  # more than the buffers of sockets take
            link.send(message)
            link.finish("it leaves")
            link.send(b"too late")
            read = await loop.run_in_executor(None, read_all, peer)
        assert read[4:] == msgspec.msgpack.encode(message)
        assert await lost == "it leaves"

    asyncio.run(send_and_finish())
