"""The access log: one line for each request, at its end, on standard output.

    request --> LoggedRequests (a layer of the app) --> Entry --> queue --> thread: text or JSON --> standard output
    refusal of the connection -----------------------> Entry -----^

A slow reader of standard output does not delay answers: beyond `MAX_QUEUED`, lines are dropped and counted. Text from clients
is quoted in printable ASCII, so that it can't begin a line or move a terminal's cursor.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from queue import SimpleQueue

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.serve.http.checks import ENTRY_KEY, Entry, identity_of, key_name

_log = logging.getLogger(__name__)

MAX_QUEUED = 10_000
"""Most lines that wait to be written, some 3 MB."""
_MAX_AT_ONCE = 256
_MAX_TOLD_CHARS = 200
"""Most characters of a text from the client in a line, such as a path or a model's name."""
_CLOSE_TIMEOUT_S = 2.0


class AccessLog:
    def __init__(self, *, as_json: bool, write: Callable[[str], object] | None = None) -> None:
        """Start the thread, which `close` ends. `write` gets whole lines. The default writes to standard output."""
        self._format = json_line if as_json else text_line
        self._write = write or _to_stdout
        self._queue: SimpleQueue[Entry | None] = SimpleQueue()
        self._num_dropped = 0
        self._is_broken = False
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)
        self._thread.start()

    def add(self, entry: Entry) -> None:
        """Queue a line. Returns at once. Only for the event loop."""
        entry.ended_unix_s = time.time()
        if self._is_broken or self._queue.qsize() >= MAX_QUEUED:
            self._num_dropped += 1
        else:
            self._queue.put(entry)

    def close(self) -> None:
        """Write the queued lines, for at most `_CLOSE_TIMEOUT_S`."""
        self._queue.put(None)
        self._thread.join(_CLOSE_TIMEOUT_S)
        num_lost = self._num_dropped + (self._queue.qsize() if self._thread.is_alive() else 0)
        if num_lost:
            _log.warning("lines of the access log that were not written, as its reader was too slow or gone: %d", num_lost)
            self._num_dropped = 0

    def _run(self) -> None:
        is_open = True
        while is_open:
            entries = [self._queue.get()]
            while len(entries) < _MAX_AT_ONCE and not self._queue.empty():
                entries.append(self._queue.get())
            is_open = None not in entries
            lines = [self._format(entry) for entry in entries if entry is not None]
            try:
                self._write("".join(lines))
            except (OSError, ValueError) as error:  # ValueError: it was closed
                self._is_broken = True
                self._num_dropped += len(lines)
                _log.error("the access log ends, as it cannot be written: %s", error)
                return


class LoggedRequests:
    """ASGI middleware that gives each request an `Entry`, and logs the entry at the end of the answer."""

    def __init__(self, app: ASGIApp, *, log: AccessLog) -> None:
        self._app = app
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started_s = time.perf_counter()
        path = _words(scope["raw_path"])
        entry = scope[ENTRY_KEY] = Entry(client=client_name(scope["client"]), method=scope["method"], path=path)
        is_head, is_over = scope["method"] == "HEAD", False

        async def told_receive() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not is_over:
                entry.client_left = True
            return message

        async def told_send(message: Message) -> None:
            nonlocal is_over
            if message["type"] == "http.response.start":
                # A connection that refused the rest of the request has already set the status.
                entry.status = entry.status or message["status"]
            else:
                is_over = not message.get("more_body")
                if not is_head:
                    entry.num_bytes += len(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, told_receive, told_send)
        finally:
            entry.duration_s = time.perf_counter() - started_s
            entry.key, entry.request_id = key_name(scope), identity_of(scope).request_id
            self._log.add(entry)


def client_name(client: tuple[str, int] | None) -> str:
    """Return the client's address and port, or an empty text if unknown."""
    if client is None:
        return ""
    return f"[{client[0]}]:{client[1]}" if ":" in client[0] else f"{client[0]}:{client[1]}"


def refusal(client: tuple[str, int] | None, method: bytes, url: bytes, status: int, num_bytes: int) -> Entry:
    """Return the entry of a request that is refused before the app sees it. Method and URL may be empty."""
    path = _words(url.partition(b"?")[0])
    return Entry(client=client_name(client), method=_words(method), path=path, status=status, num_bytes=num_bytes)


def json_line(entry: Entry) -> str:
    """Return the entry as a JSON object that always has the same names. Unknown values are null."""
    return _quoted(_fields(entry)) + "\n"


def text_line(entry: Entry) -> str:
    """Return the entry as a line for people, and for tools that split at spaces outside of quotes. Unknown values are `-`."""
    fields = _fields(entry)
    words = [
        str(fields["time"]),
        entry.client or "-",
        entry.key or "-",
        _quoted(f"{entry.method} {entry.path}"),
        str(entry.status or "-"),
    ]
    names = ("bytes", "duration_s", "ttft_s", "prompt_tokens", "completion_tokens", "model", "request_id")
    words += [f"{name}={_shown(fields[name])}" for name in names]
    words += ["client_left"] if entry.client_left else []
    return " ".join(words) + "\n"


def _fields(entry: Entry) -> dict[str, object]:
    num_prompt_tokens, num_generated_tokens = (None, None) if entry.count_tokens is None else entry.count_tokens()
    return {
        "time": datetime.fromtimestamp(entry.ended_unix_s, UTC).isoformat(timespec="milliseconds"),
        "client": entry.client or None,
        "key": entry.key or None,
        "method": entry.method or None,
        "path": entry.path or None,
        "status": entry.status,
        "bytes": entry.num_bytes,
        "duration_s": None if entry.duration_s is None else round(entry.duration_s, 6),
        "ttft_s": None if entry.ttft_s is None else round(entry.ttft_s, 6),
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_generated_tokens,
        "model": None if entry.model is None else entry.model[:_MAX_TOLD_CHARS],
        "request_id": entry.request_id or None,
        "client_left": entry.client_left,
    }


def _words(text: bytes) -> str:
    return text[:_MAX_TOLD_CHARS].decode("latin-1")


def _quoted(value: object) -> str:
    """Return the value as JSON in printable ASCII. Python's `json` would leave the control character DEL."""
    return json.dumps(value).replace("\x7f", "\\u007f")


def _shown(value: object) -> str:
    match value:
        case None:
            return "-"
        case str():
            return _quoted(value)
        case float():
            return f"{value:.6f}"
    return str(value)


def _to_stdout(lines: str) -> None:
    sys.stdout.write(lines)
    sys.stdout.flush()
