"""A reader of KV events, for tests."""

from __future__ import annotations

import contextlib
import random
import socket
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)
TIMEOUT_MS = 20_000


def free_ports() -> int:
    """Return the first of two free ports on loopback, below the range from which systems choose."""
    while True:
        port = random.randrange(10_000, 30_000)
        with (
            contextlib.suppress(OSError),
            socket.create_server(("127.0.0.1", port)),
            socket.create_server(("127.0.0.1", port + 1)),
        ):
            return port


def asked(port: int, first: int) -> tuple[list[int], list[Any]]:
    """Return the numbers and the batches from number `first` on, as vLLM's readers ask for them."""
    numbers: list[int] = []
    batches: list[Any] = []
    with zmq.Context() as context, context.socket(zmq.DEALER) as reader:
        reader.set(zmq.LINGER, 0)
        reader.set(zmq.RCVTIMEO, TIMEOUT_MS)
        reader.set(zmq.RCVHWM, 0)
        reader.connect(f"tcp://127.0.0.1:{port + 1}")
        reader.send_multipart([b"", first.to_bytes(8, "big")])
        while True:
            empty, number, batch = reader.recv_multipart()
            assert empty == b""
            if number == END:
                return numbers, batches
            numbers.append(int.from_bytes(number, "big"))
            batches.append(msgspec.msgpack.decode(batch))
