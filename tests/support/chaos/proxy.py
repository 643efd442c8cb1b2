"""A TCP proxy that delays what it forwards, in both directions."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque


class Proxy:
    """Forwards connections to a port of this machine. Bytes, and ends of connections, come `delay_s` later."""

    def __init__(self, to_port: int) -> None:
        self.delay_s = 0.0
        self._to_port = to_port
        self._tasks: set[asyncio.Task] = set()

    async def start(self) -> int:
        """Return the port to dial."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.add(task := asyncio.current_task())
        task.add_done_callback(self._tasks.discard)
        with contextlib.closing(writer), contextlib.suppress(OSError):
            front_reader, front_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
            with contextlib.closing(front_writer):
                ways = [asyncio.create_task(self._forward(*way)) for way in ((reader, front_writer), (front_reader, writer))]
                try:
                    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for way in ways:
                        way.cancel()
                    await asyncio.gather(*ways, return_exceptions=True)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until its end. Each piece is delayed by itself, so none waits for those before it."""
        loop = asyncio.get_running_loop()
        late: deque[tuple[float, bytes]] = deque()
        has_come = asyncio.Event()

        async def read() -> None:
            data = b" "
            while data:
                try:
                    data = await reader.read(1 << 16)
                except OSError:
                    data = b""
                late.append((loop.time() + self.delay_s, data))
                has_come.set()

        reading = asyncio.create_task(read())
        try:
            while True:
                await has_come.wait()
                has_come.clear()
                while late:
                    at, data = late.popleft()
                    await asyncio.sleep(at - loop.time())
                    if not data:
                        return
                    writer.write(data)
                    await writer.drain()
        finally:
            reading.cancel()
