"""A server of OpenAI's API that answers by scripts, with faults, for tests of upstreams."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


def whole(text: str = "far away") -> dict:
    message = {"role": "assistant", "content": text, "refusal": None}
    choice = {"index": 0, "message": message, "finish_reason": "stop", "stop_reason": None, "logprobs": None}
    usage = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
    about = {"id": "x", "object": "chat.completion", "created": 1, "model": "m", "system_fingerprint": "f"}
    return about | {"choices": [choice], "usage": usage}


def event(text: str | None, **fields: object) -> bytes:
    choice = {"index": 0, "delta": {} if text is None else {"content": text}, "finish_reason": None, "logprobs": None}
    about = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "system_fingerprint": "f"}
    return b"data: " + json.dumps(about | {"choices": [choice | fields]}).encode() + b"\n\n"


END = event(None, finish_reason="stop")
DONE = b"data: [DONE]\n\n"


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict


Script = Callable[[asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Server:
    """Answers each request by the next script, the last one again and again."""

    scripts: list[Script]
    asked: list[Asked] = field(default_factory=list)
    url: str = ""
    listener: asyncio.Server | None = None
    connections: set[asyncio.Task] = field(default_factory=set)
    num_connections: int = 0

    async def on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        task = asyncio.current_task()
        self.connections.add(task)
        task.add_done_callback(self.connections.discard)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().split("\r\n")
                headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines if line)}
                body = json.loads(await reader.readexactly(int(headers["content-length"])))
                self.asked.append(Asked(first.split()[1], headers, body))
                await self.scripts[min(len(self.asked), len(self.scripts)) - 1](writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError, ssl.SSLError):
                await writer.wait_closed()


@asynccontextmanager
async def serving(*scripts: Script, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(list(scripts))
    listener = await asyncio.start_server(server.on_connection, "127.0.0.1", 0, ssl=tls)
    server.listener = listener
    port = listener.sockets[0].getsockname()[1]
    server.url = f"{'http' if tls is None else 'https'}://localhost:{port}/v1"
    try:
        yield server
    finally:
        listener.close()
        for task in server.connections:
            task.cancel()
        await asyncio.gather(*server.connections, return_exceptions=True)


def answers(status: int, value: object, **headers: str) -> Script:
    async def script(writer: asyncio.StreamWriter) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        lines = [f"HTTP/1.1 {status} Said", f"Content-Length: {len(data)}", "Content-Type: application/json"]
        lines += [f"{name.replace('_', '-')}: {content}" for name, content in headers.items()]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)

    return script


def streams(*pieces: bytes, ends: bool = True, pause: asyncio.Event | None = None) -> Script:
    """Pieces of a stream; without `ends` the connection then breaks. `pause`: waited for before the last piece."""

    async def script(writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, piece in enumerate(pieces, 1):
            if pause is not None and number == len(pieces):
                await pause.wait()
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
        if ends:
            writer.write(b"0\r\n\r\n")
        else:
            writer.transport.abort()

    return script


async def silence(writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(30)


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.transport.abort()
