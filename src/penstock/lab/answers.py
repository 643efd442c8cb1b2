"""The bytes of an HTTP answer: where it ends, and what it says. Called by the client.

`Framing` is fed while the client measures: it finds the answer's end and keeps the body's pieces with their times. `read` is
for later: it finds the tokens' times, the counts and the text in them. Opens no connection, and knows no job.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

_DONE = b"[DONE]"
_MAX_HEAD_BYTES = 1 << 16
_MAX_PROVISIONAL = 100
"""Answers of 1xx before the one that counts; a server that sends more may never end."""
_MAX_ERROR_CHARS = 300
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*([0-9]+)")
_CHUNKED = re.compile(rb"\r\ntransfer-encoding:[^\r\n]*chunked")
_CLOSE = re.compile(rb"\r\nconnection:[^\r\n]*close")
_RETRY_AFTER = re.compile(rb"\r\nretry-after(-ms)?:[ \t]*([0-9]{1,9}(?:\.[0-9]+)?)[ \t]*(?=\r|$)")
_QUEUE = re.compile(rb"(?:\r\nserver-timing:|\n: server-timing )[^\r\n]*\bqueue;dur=([0-9]{1,9}(?:\.[0-9]{1,20})?)(?![0-9.])")
_MAX_LENGTH_DIGITS = 15
_CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]{1,12}")
_MAX_COUNT = 1 << 40
"""No answer has more tokens."""
SENSELESS = (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError)
"""Errors that bytes without sense cause in whoever reads them."""


class MalformedAnswer(Exception):
    """Bytes that are no answer of HTTP/1.1. The message says which."""


class Framing:
    """One answer while it comes (RFC 9112): chunked, of a known length, or until the connection closes."""

    __slots__ = (
        "_feed_body",
        "_left_bytes",
        "_num_provisional",
        "_rest",
        "head",
        "is_kept_alive",
        "num_bytes",
        "pieces",
        "status",
        "times_ns",
    )

    def __init__(self) -> None:
        self.status = 0
        """The status of HTTP; 0 before it has come."""
        self.head = b""
        """In lower case, since all that is read of it is numbers and names."""
        self.pieces: list[bytes] = []
        """The body's, without the framing."""
        self.times_ns = array("q")
        """When each piece came."""
        self.num_bytes = 0
        """Bytes of the body so far."""
        self.is_kept_alive = False
        """Whether the connection can take another request after this answer."""
        self._rest = b""
        """Bytes that say too little yet."""
        self._num_provisional = 0
        """Answers of 1xx so far."""
        self._left_bytes = 0
        """Bytes missing of the body, or of the chunk and its end of line."""
        self._feed_body: Callable[[Framing, bytes, int], bool] = Framing._feed_head  # no cycle: memory is freed at once

    @property
    def has_begun(self) -> bool:
        """Whether any byte has come."""
        return bool(self.head or self._rest)

    def feed(self, data: bytes, now_ns: int) -> bool:
        """Take what came. True once the answer is whole. Raises MalformedAnswer."""
        return self._feed_body(self, data, now_ns)

    def close(self) -> bool:
        """The connection was closed. True if the answer is whole by that."""
        return self.status != 0 and self._feed_body is Framing._feed_until_closed

    def _feed_head(self, data: bytes, now_ns: int) -> bool:
        body, self._rest = self._rest + data, b""
        status = 0
        while status < 200:  # those of 1xx are provisional, and others come after them
            head, end, body = body.partition(b"\r\n\r\n")
            if not end:
                self._rest = head
                if len(head) > _MAX_HEAD_BYTES:
                    raise MalformedAnswer("The headers of the answer do not end.")
                return False
            self.head = head = head.lower()
            if not head.startswith(b"http/1.") or not head[9:12].isdigit() or (status := int(head[9:12])) < 100:
                raise MalformedAnswer(f"The answer is no HTTP/1.1: {head[:60]!r}.")
            self._num_provisional += status < 200
            if self._num_provisional > _MAX_PROVISIONAL:
                raise MalformedAnswer(f"More than {_MAX_PROVISIONAL} provisional answers came, and no other.")
        self.status = status
        self.is_kept_alive = head.startswith(b"http/1.1") and _CLOSE.search(head) is None
        if _CHUNKED.search(head):
            self._feed_body = Framing._feed_chunks
        elif status in (204, 304):
            return True
        elif (found := _LENGTH.search(head)) is not None:
            if len(found[1]) > _MAX_LENGTH_DIGITS:
                raise MalformedAnswer(f"The Content-Length of the answer has {len(found[1])} digits.")
            self._left_bytes = int(found[1])
            self._feed_body = Framing._feed_length
            return self._feed_length(body, now_ns)
        else:
            self._feed_body = Framing._feed_until_closed
            self.is_kept_alive = False
        return self._feed_body(self, body, now_ns) if body else False

    def _feed_length(self, data: bytes, now_ns: int) -> bool:
        self._left_bytes -= len(data)
        if self._left_bytes < 0:
            raise MalformedAnswer("The answer is longer than its Content-Length.")
        self._keep(data, now_ns)
        return not self._left_bytes

    def _feed_until_closed(self, data: bytes, now_ns: int) -> bool:
        self._keep(data, now_ns)
        return False

    def _feed_chunks(self, data: bytes, now_ns: int) -> bool:
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, num_bytes, left = 0, len(data), self._left_bytes
        while at < num_bytes:
            if left:
                end = min(at + left, num_bytes)
                left -= end - at
                # The last two bytes of `left` are the end of the chunk's line.
                self._keep(data[at:end] if left >= 2 else data[at : max(at, end - 2 + left)], now_ns)
                at = end
                continue
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                if num_bytes - at > _MAX_HEAD_BYTES:
                    raise MalformedAnswer("The first line of a chunk does not end.")
                break
            digits = data[at:line_end].partition(b";")[0].rstrip(b" \t")
            if _CHUNK_SIZE.fullmatch(digits) is None:
                raise MalformedAnswer(f"A chunk of the answer begins with {data[at:line_end][:60]!r}.")
            size = int(digits, 16)
            if size == 0:
                self._rest = data[line_end:]
                self._feed_body = Framing._feed_trailer
                return self._feed_trailer(b"", now_ns)
            at = line_end + 2
            left = size + 2
        self._rest = data[at:]
        self._left_bytes = left
        return False

    def _feed_trailer(self, data: bytes, now_ns: int) -> bool:
        del now_ns
        self._rest += data
        if len(self._rest) > _MAX_HEAD_BYTES:
            raise MalformedAnswer("The trailer of the answer does not end.")
        end = self._rest.find(b"\r\n\r\n")
        if 0 <= end < len(self._rest) - 4:
            raise MalformedAnswer("Something comes after the end of the answer.")
        return end >= 0

    def _keep(self, data: bytes, now_ns: int) -> None:
        if data:
            self.pieces.append(data)
            self.num_bytes += len(data)
            self.times_ns.append(now_ns)


@dataclass(slots=True)
class Answer:
    """The content of an answer with status 200, as far as it came. Instants are those of the pieces."""

    first_ns: int | None = None
    """The first event with text; if none has any, the first with a choice. None for an answer that is not a stream."""
    gaps_ns: array[int] = field(default_factory=lambda: array("q"))
    """Between one event with text and the next."""
    text: str = ""
    num_events: int = 0
    """Events with text."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int | None = None
    """As the server counted; None: it did not say."""
    is_whole: bool = False
    """Whether the server said that it is the end."""
    error: str = ""
    """The server's own words, or which bytes make no sense."""


def read(framing: Framing) -> Answer:
    """The content of an answer, whole or broken off. Never raises: bytes without sense are its `error`."""
    answer = Answer()
    is_stream = b"text/event-stream" in framing.head or (framing.pieces and framing.pieces[0].startswith((b"data:", b":")))
    texts: list[str] = []
    try:
        if is_stream:
            _read_stream(framing, answer, texts)
        elif framing.pieces:
            _read_whole(orjson.loads(b"".join(framing.pieces)), answer, texts)
    except SENSELESS as error:
        answer.error = f"The answer makes no sense: {error!r}"[:_MAX_ERROR_CHARS]
    answer.text = "".join(texts)
    return answer


def queue_ns(framing: Framing) -> int | None:
    """Return the time in the server's queue, from its header `Server-Timing` or the stream's comment of this name (ms)."""
    found = _QUEUE.search(framing.head) or _QUEUE.search(b"\n" + b"".join(framing.pieces))
    return None if found is None else round(float(found[1]) * 1e6)


def retry_after_ns(framing: Framing) -> int | None:
    """For how long the server told the client to wait, by `Retry-After-Ms` or `Retry-After`; None: it did not say."""
    found = {name: float(value) for name, value in _RETRY_AFTER.findall(framing.head)}
    if b"-ms" in found:
        return round(found[b"-ms"] * 1e6)
    return round(found[b""] * 1e9) if b"" in found else None


def error_of(body: bytes) -> str:
    """The words in the body of an answer with another status than 200: its error's message, or how it begins."""
    try:
        message = _error_message(orjson.loads(body))
    except SENSELESS:
        message = ""
    return (message or body[:_MAX_ERROR_CHARS].decode(errors="replace"))[:_MAX_ERROR_CHARS]


def _read_whole(body: Any, answer: Answer, texts: list[str]) -> None:
    if message := _error_message(body):
        answer.error = message
        return
    _read_usage(body.get("usage"), answer)
    for choice in body.get("choices", ()):
        texts.append(_text(choice["text"] if "text" in choice else choice["message"]["content"]))
    if "data" in body:  # of embeddings
        answer.num_output_tokens = 0
    answer.is_whole = bool(body.get("choices") or body.get("data"))


def _read_stream(framing: Framing, answer: Answer, texts: list[str]) -> None:
    before_ns = first_choice_ns = None
    for time_ns, data in _events(framing):
        if data == _DONE:
            answer.is_whole = True
            continue
        event = orjson.loads(data)
        if message := _error_message(event):
            answer.error = message
            break
        if (usage := event.get("usage")) is not None:
            _read_usage(usage, answer)
        if not (choices := event.get("choices")):
            continue
        choice = choices[0]
        if choice.get("finish_reason"):
            answer.is_whole = True
        if first_choice_ns is None:
            first_choice_ns = time_ns
        if not (text := _text(choice["text"] if "text" in choice else _delta_text(choice["delta"]))):
            continue
        texts.append(text)
        answer.num_events += 1
        if before_ns is None:
            answer.first_ns = time_ns
        else:
            answer.gaps_ns.append(time_ns - before_ns)
        before_ns = time_ns
    if answer.first_ns is None:
        answer.first_ns = first_choice_ns


def _delta_text(delta: dict[str, Any]) -> Any:
    """A reasoning model's thoughts are tokens as well; servers name them in two ways."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def _text(found: Any) -> str:
    """The text; "" for null. Raises TypeError for what is none."""
    if found is not None and not isinstance(found, str):
        raise TypeError(f"a {type(found).__name__} where the text should be")
    return found or ""


def _count(found: Any) -> int:
    """A number of tokens. Raises ValueError for what is none."""
    if type(found) is not int or not 0 <= found <= _MAX_COUNT:
        raise ValueError(f"{str(found)[:40]!r} is no number of tokens")
    return found


def _read_usage(usage: Any, answer: Answer) -> None:
    if not usage:
        return
    answer.num_prompt_tokens = _count(usage.get("prompt_tokens") or 0)
    num_output_tokens = usage.get("completion_tokens")
    answer.num_output_tokens = None if num_output_tokens is None else _count(num_output_tokens)
    answer.num_cached_tokens = _count((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _error_message(body: Any) -> str:
    """The message of an error object, in OpenAI's shape or in one of the others that are seen; "" if it is none."""
    error = body.get("error") if isinstance(body, dict) else None
    if isinstance(error, dict):
        error = error.get("message") or str(error)
    return str(error)[:_MAX_ERROR_CHARS] if error else ""


def _events(framing: Framing) -> Iterator[tuple[int, bytes]]:
    """The data of each server-sent event, with the time of the piece that completed it."""
    rest = b""
    time_ns = 0
    for time_ns, piece in zip(framing.times_ns, framing.pieces, strict=True):
        if not rest and piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2 and piece.endswith(b"\n\n"):
            yield time_ns, piece[6:-2]  # one event in one piece, as most servers send it
            continue
        *events, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if data := _data_of(event):
                yield time_ns, data
    if (data := _data_of(rest)) == _DONE:  # some servers end there; anything else is a part of an event
        yield time_ns, data


def _data_of(event: bytes) -> bytes:
    return b"\n".join([line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")])
