"""Writes down what clients send to a server and what they get, so that `make test` can hold it without them.

    python tests/clients/recorder.py 8000 127.0.0.1:8971 FILE      # listens on 8000, passes everything on; run.sh starts it

It stands between the two and changes nothing: bytes are passed on as they come. FILE has a line for each request that was
answered well: what was asked, and of the answer which fields it had, of which types. Ids, times and the answers' words are left
out, long texts and lists are cut, and requests that differ in their words alone are there once.
`tests/server/test_recorded_clients.py` sends the requests again. It runs in Penstock's environment, which has httptools.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httptools

MAX_TEXT, MAX_DESCRIPTION = 200, 40
"""Characters that are kept of a text, and of a tool's or a parameter's description."""
MAX_NUMBERS = 24
ID = re.compile(r"\b(call|chatcmpl|toolu|msg|rs|fc|resp|cmpl|aitxt|item)[_-][0-9A-Za-z_-]{6,}")
DEVICE = re.compile(r"\b[0-9a-f]{64}\b")
TEMPORARY = re.compile(r"/tmp/[\w-]+")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
LEFT_OUT = ("/load", "/ready", "/api/show", "/api/tags", "/api/ps")
"""Questions of these scripts themselves, and about the files of a model."""
WORDS = ("messages", "prompt", "input", "inputs", "system", "metadata", "client_metadata", "prompt_cache_key")
"""Fields whose values do not make a request another one: it is the same if their shapes and the types of their parts are."""
Shape = Any
"""The name of a type; a list with the shape of its items; or an object of shapes. None: null, of which nothing is known."""


def shape_of(value: Any) -> Shape:
    if isinstance(value, dict):
        if value and all(isinstance(number, float) for number in value.values()):  # tokens and their log-probabilities
            return {"*": "number"}
        return {key: shape_of(part) for key, part in value.items()}
    if isinstance(value, list):
        shape: Shape = None
        for part in value:
            shape = joined(shape, shape_of(part))
        return [shape]
    if isinstance(value, bool | str):
        return type(value).__name__
    return None if value is None else "number"


def joined(one: Shape, other: Shape) -> Shape:
    """The shape of something that has now one of them, now the other."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {key: joined(one.get(key), other.get(key)) for key in one | other}
    if isinstance(one, list) and isinstance(other, list):
        return [joined(one[0], other[0])]
    if one is None or one == other:
        return other
    return one if other is None else "any"


def lacking(wanted: Shape, found: Shape, path: str = "") -> Iterator[str]:
    """The paths of what one shape has and the other has not, or has in another type."""
    if isinstance(wanted, dict) and isinstance(found, dict):
        for key, part in wanted.items():
            if key in found:
                yield from lacking(part, found[key], f"{path}.{key}")
            else:
                yield f"{path}.{key} is missing"
    elif isinstance(wanted, list) and isinstance(found, list):
        yield from lacking(wanted[0], found[0], f"{path}[]")
    elif wanted is not None and wanted != found:
        yield f"{path} is {found}, not {wanted}"


def kinds_of(value: Any) -> set[str]:
    """The types that parts of a value have, such as `tool_result`."""
    if isinstance(value, list):
        return set().union(*map(kinds_of, value))
    if not isinstance(value, dict):
        return set()
    kinds = {kind} if isinstance(kind := value.get("type"), str) else set()
    return kinds.union(*map(kinds_of, value.values()))


def shape_of_answer(content_type: str, body: bytes) -> Shape:
    """For a stream, an object with the shape of each kind of event; else the shape of the body."""
    if content_type.startswith("application/json"):
        return shape_of(json.loads(body))
    kinds: dict[str, Shape] = {}
    for line in body.decode().splitlines():
        data = line.removeprefix("data:").removeprefix(" ")
        if content_type.startswith("application/x-ndjson") or line != data:
            value = data if data == "[DONE]" else json.loads(data)
            kind = value if isinstance(value, str) else value.get("type", "event")
            kinds[kind] = joined(kinds.get(kind), shape_of(value))
    return kinds


def cut(value: Any, max_text: int = MAX_TEXT) -> Any:
    """A request's body without ids, long texts and long lists of numbers."""
    if isinstance(value, dict):
        return {key: cut(part, MAX_DESCRIPTION if key == "description" else MAX_TEXT) for key, part in value.items()}
    if isinstance(value, list):
        is_numbers = all(isinstance(part, int) for part in value)
        return [cut(part) for part in (value[:MAX_NUMBERS] if is_numbers else value)]
    if not isinstance(value, str):
        return value
    value = TEMPORARY.sub("/tmp/work", DEVICE.sub("DEVICE", value))
    return UUID.sub("UUID", ID.sub(r"\1_0", value))[:max_text]


@dataclass
class Message:
    """A request or an answer, as far as it has come."""

    target: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    method: str = ""
    status: int = 0


class Listener:
    """Makes the messages of one direction of a connection. The last one may be on its way still."""

    def __init__(self, make_parser: Callable[[Any], Any], on_whole: Callable[[], None]) -> None:
        self._parser = make_parser(self)
        self._on_whole = on_whole
        self.messages: list[Message] = []

    def feed(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.messages.append(Message())

    def on_url(self, url: bytes) -> None:
        self.messages[-1].target += url.decode()

    def on_header(self, name: bytes, value: bytes) -> None:
        self.messages[-1].headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        if isinstance(self._parser, httptools.HttpRequestParser):
            self.messages[-1].method = self._parser.get_method().decode()
        else:
            self.messages[-1].status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        self.messages[-1].body += body

    def on_message_complete(self) -> None:
        self._on_whole()


class Recording:
    """The lines of one file, each of which is there once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: list[tuple[str, Any]] = []
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)

    def add(self, request: Message, answer: Message) -> None:
        """Leaves out what was refused, and what only the same server or model can answer."""
        if not 200 <= answer.status < 300 or request.target in LEFT_OUT:
            return
        if ID.search(request.target) or b"previous_response_id" in request.body:
            return
        key = request.headers.get("x-api-key", request.headers.get("authorization", "").removeprefix("Bearer "))
        version = request.headers.get("anthropic-version")
        body = json.loads(request.body) if request.body else None
        words = {name: [shape_of(value), kinds_of(value)] for name, value in (body or {}).items() if name in WORDS}
        fields = (body or {}) | words
        if (request.target, fields) in self._known:
            return
        self._known.append((request.target, fields))
        exchange = {
            "client": self._path.stem if key in ("", "none") else key,
            "request": f"{request.method} {request.target}",
            **({"headers": {"anthropic-version": version}} if version else {}),
            **({"body": cut(body)} if body is not None else {}),
            "answer": shape_of_answer(answer.headers.get("content-type", ""), answer.body),
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(exchange, ensure_ascii=False) + "\n")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, listener: Listener) -> None:
    """Passes on what comes until it ends, and then closes the other side."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(65536):
            listener.feed(data)
            writer.write(data)
            await writer.drain()
    writer.close()


async def record(listener: socket.socket, server: str, recording: Recording) -> None:
    """Goes on until it is cancelled."""

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection(*server.split(":"))
        # The n-th answer is that of the n-th request, of which not all need have come: a server may refuse it before.
        requests = Listener(httptools.HttpRequestParser, lambda: None)
        answers = Listener(
            httptools.HttpResponseParser,
            lambda: recording.add(requests.messages[len(answers.messages) - 1], answers.messages[-1]),
        )
        await asyncio.gather(pump(reader, to_server, requests), pump(from_server, writer, answers))

    async with await asyncio.start_server(connect, sock=listener) as listening:
        await listening.serve_forever()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
        asyncio.run(record(listener, sys.argv[2], Recording(Path(sys.argv[3]))))
