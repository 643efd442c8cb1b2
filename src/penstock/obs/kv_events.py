"""Publishes changes of the prefix cache as vLLM's KV events, for routers.

A ZeroMQ message has three frames: the topic, a sequence number, and a batch in MessagePack. A router that missed messages
requests them at the next port, by the first missing number. Events are arrays, as in vLLM before 2026:
https://docs.vllm.ai/en/v0.15.0/api/vllm/distributed/kv_events/. Imported only if `--kv-events` is set.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence

import msgspec
import zmq

NUM_KEPT = 10_000
"""Batches kept for replay: as many as vLLM keeps."""
MAX_KEPT_BYTES = 32 << 20
NUM_LIVE = 1000
"""Most batches queued for one slow reader."""
MAX_QUESTION_BYTES = 1024
CLOSE_MS = 1000
"""Time in which the last message must be sent."""
MEDIUM = "GPU"
"""vLLM's name for the cache that a model reads, even on CPUs."""
NUMBER_BYTES = 8
END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""The number of the message that ends an answer."""


class Event(msgspec.Struct, array_like=True, tag=True, gc=False):
    pass


class BlockStored(Event):
    block_hashes: Sequence[int]
    parent_block_hash: int | None
    token_ids: Sequence[int]
    block_size: int
    lora_id: None = None
    medium: str = MEDIUM
    lora_name: None = None


class BlockRemoved(Event):
    block_hashes: Sequence[int]
    medium: str = MEDIUM


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    """Unix time in seconds."""
    events: Sequence[Event]
    data_parallel_rank: int = 0


class Publisher:
    """Two sockets: one publishes, under a lock; on the other, a thread resends messages to readers that missed them.

    Publishing never blocks. A slow reader loses messages, which it sees by their numbers.
    """

    def __init__(self, host: str, port: int, topic: str) -> None:
        """`port`: for subscribers. Readers that missed messages ask at the next port. Raises OSError if either is taken."""
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[bytes, bytes]] = deque()
        """Number and batch."""
        self._kept_bytes = self._block_size = 0
        # Readers skip numbers that are not greater than the last one, even after a server restart.
        self._next = time.time_ns()
        self._lock = threading.Lock()
        self._context = zmq.Context()
        self._live = self._bound(zmq.PUB, host, port, NUM_LIVE)
        self._asked = self._bound(zmq.ROUTER, host, port + 1, 2 * NUM_KEPT)
        self._thread = threading.Thread(target=self._answer, name="kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, host: str, port: int, num_waiting: int) -> zmq.Socket[bytes]:
        """Return a bound socket that queues at most `num_waiting` messages for one reader, and drops more."""
        socket = self._context.socket(kind)
        socket.set(zmq.LINGER, CLOSE_MS)
        socket.set(zmq.SNDHWM, num_waiting)
        socket.set(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)  # of incoming messages
        socket.set(zmq.IPV6, ":" in host)
        try:
            socket.bind(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(error.errno, error.strerror) from error
        return socket

    def clear(self, block_size: int) -> None:
        """Report that the cache is empty. Its blocks have `block_size` tokens."""
        self._block_size = block_size
        self._publish([AllBlocksCleared()])

    def change(self, stored: Iterable[tuple[int | None, Sequence[int], Sequence[int]]], removed: Sequence[int]) -> None:
        """Report changes: `stored` runs of blocks (parent, hashes, tokens) and `removed` hashes."""
        events: list[Event] = [BlockRemoved(removed)] if removed else []
        events += [BlockStored(names, parent, token_ids, self._block_size) for parent, names, token_ids in stored]
        if events:
            self._publish(events)

    def _publish(self, events: Sequence[Event]) -> None:
        batch = self._encoder.encode(EventBatch(time.time(), events))
        with self._lock:
            if self._live.closed:
                return
            number = self._next.to_bytes(NUMBER_BYTES, "big")
            self._next += 1
            self._kept.append((number, batch))
            self._kept_bytes += len(batch)
            while self._kept_bytes > MAX_KEPT_BYTES or len(self._kept) > NUM_KEPT:
                self._kept_bytes -= len(self._kept.popleft()[1])
            self._live.send_multipart((self._topic, number, batch))

    def close(self) -> None:
        """Report that nothing is cached any more, and release the ports. Takes up to `CLOSE_MS`."""
        self._publish([AllBlocksCleared()])
        with self._lock:
            self._live.close()
        self._context.term()  # wakes the thread
        self._thread.join()

    def _answer(self) -> None:
        with self._asked, contextlib.suppress(zmq.ContextTerminated):
            while True:
                asking, *_, first = self._asked.recv_multipart()
                with self._lock:
                    kept = list(self._kept)
                for number, batch in (*(one for one in kept if one[0] >= first), (END, b"")):
                    self._asked.send_multipart((asking, b"", number, batch))
