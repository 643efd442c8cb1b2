"""Parser of one answer of an OpenAI-compatible server, streamed or whole: its text, token counts and arrival times.

The HTTP client feeds bytes as they arrive and reads the result at the end. Malformed bytes set `error`; nothing here raises.
"""

from __future__ import annotations

import re
from array import array
from typing import Any

from penstock import fast_json

_DONE = b"[DONE]"
_MAX_ERROR_CHARS = 300
_QUEUE = re.compile(rb"\bqueue;dur=([0-9]{1,9}(?:\.[0-9]{1,20})?)(?![0-9.])")
_SECONDS = re.compile(rb"[0-9]{1,9}(?:\.[0-9]+)?")
_QUEUE_COMMENT = b": server-timing "
_SENSELESS = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)


class Answer:
    def __init__(self) -> None:
        self.status = 0
        self.queue_ns: int | None = None
        self.wait_ns: int | None = None
        """Wait requested by the header `Retry-After-Ms` or `Retry-After`."""
        self.first_ns: int | None = None
        """Arrival of the first event with text, else of the first with a choice. None if the answer is not a stream."""
        self.gaps_ns = array("q")
        self.texts: list[str] = []
        self.num_events = 0
        self.num_tokens_so_far = 0
        """Tokens up to the last event with text: the server's count in that event, or `num_events` if that is more."""
        self.num_prompt_tokens = 0
        self.num_cached_tokens: int | None = None
        self.num_output_tokens: int | None = None
        self.is_whole = False
        """Whether the server marked the end of the answer."""
        self.error = ""
        """The server's message, or what is malformed."""
        self._is_stream: bool | None = None
        self._first_choice_ns: int | None = None
        self._last_ns = 0
        self._body: list[bytes] = []
        self._rest = b""

    def header(self, name: bytes, value: bytes) -> None:
        if name == b"content-type":
            self._is_stream = b"text/event-stream" in value.lower() or None
        elif name == b"server-timing":
            self._note_queue(value)
        elif name == b"retry-after-ms" and _SECONDS.fullmatch(value):
            self.wait_ns = round(float(value) * 1e6)
        elif name == b"retry-after" and _SECONDS.fullmatch(value) and self.wait_ns is None:
            self.wait_ns = round(float(value) * 1e9)

    def feed(self, data: bytes, now_ns: int) -> None:
        if self._is_stream is None:
            self._is_stream = data.startswith((b"data:", b":"))
        if not self._is_stream or self.status != 200:
            self._body.append(data)
            return
        if b"\r" in data or self._rest.endswith(b"\r"):
            self._rest = (self._rest + data).replace(b"\r\n", b"\n")
            data = b""
        *events, self._rest = (self._rest + data).split(b"\n\n")
        for event in events:
            self._take(event, now_ns)

    def end(self) -> None:
        if self._is_stream and self.status == 200:
            if _data_of(self._rest) == _DONE:  # some servers leave out the blank line
                self.is_whole = True
            if self.first_ns is None:
                self.first_ns = self._first_choice_ns
        elif self._body:
            self._read_body(b"".join(self._body))

    def _note_queue(self, value: bytes) -> None:
        if found := _QUEUE.search(value):
            self.queue_ns = round(float(found[1]) * 1e6)

    def _take(self, event: bytes, now_ns: int) -> None:
        if event.startswith(_QUEUE_COMMENT):
            self._note_queue(event)
        data = _data_of(event)
        if data == _DONE:
            self.is_whole = True
        elif data and not self.error:
            try:
                self._read_event(fast_json.loads(data), now_ns)
            except _SENSELESS as error:
                self._note_senseless(error)

    def _read_event(self, event: Any, now_ns: int) -> None:
        if message := _error_message(event):
            self.error = message
            return
        self._read_usage(event.get("usage"))
        if not (choices := event.get("choices")):
            return
        choice = choices[0]
        if choice.get("finish_reason"):
            self.is_whole = True
        if self._first_choice_ns is None:
            self._first_choice_ns = now_ns
        if not (text := _text(choice["text"] if "text" in choice else _delta_text(choice["delta"]))):
            return
        self.texts.append(text)
        self.num_events += 1
        self.num_tokens_so_far = max(self.num_events, self.num_output_tokens or 0)
        if self.first_ns is None:
            self.first_ns = now_ns
        else:
            self.gaps_ns.append(now_ns - self._last_ns)
        self._last_ns = now_ns

    def _read_body(self, data: bytes) -> None:
        try:
            body = fast_json.loads(data)
            if self.status != 200:
                self.error = _error_message(body) or _beginning(data)
            elif message := _error_message(body):
                self.error = message
            else:
                self._read_usage(body.get("usage"))
                choices = body.get("choices", ())
                self.texts += [_text(one["text"] if "text" in one else one["message"]["content"]) for one in choices]
                if "data" in body:  # an answer with embeddings
                    self.num_output_tokens = 0
                self.is_whole = bool(choices or body.get("data"))
        except _SENSELESS as error:
            if self.status == 200:
                self._note_senseless(error)
            else:
                self.error = _beginning(data)

    def _read_usage(self, usage: Any) -> None:
        if not usage:
            return
        self.num_prompt_tokens = _count(usage.get("prompt_tokens") or 0)
        self.num_output_tokens = _known_count(usage.get("completion_tokens"))
        self.num_cached_tokens = _known_count((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))

    def _note_senseless(self, error: Exception) -> None:
        self.error = f"The answer is malformed: {error!r}"[:_MAX_ERROR_CHARS]


def error_of(body: bytes) -> str:
    """Return the error message in the body of a failed answer, or the beginning of a body without one."""
    try:
        return _error_message(fast_json.loads(body)) or _beginning(body)
    except _SENSELESS:
        return _beginning(body)


def _beginning(body: bytes) -> str:
    return body[:_MAX_ERROR_CHARS].decode(errors="replace")


def _error_message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or str(error)
    return str(error)[:_MAX_ERROR_CHARS] if error else ""


def _delta_text(delta: dict[str, Any]) -> Any:
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def _text(found: Any) -> str:
    if found is not None and not isinstance(found, str):
        raise TypeError(f"a {type(found).__name__} where the text should be")
    return found or ""


def _count(found: Any) -> int:
    if type(found) is not int or not 0 <= found <= 1 << 40:
        raise ValueError(f"{str(found)[:40]!r} is not a number of tokens")
    return found


def _known_count(found: Any) -> int | None:
    return None if found is None else _count(found)


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    return b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
