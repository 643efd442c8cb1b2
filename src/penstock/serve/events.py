"""Reads the server-sent events of another server, as they come.

https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from penstock import fast_json

MAX_EVENT_BYTES = 1 << 20
DONE = b"[DONE]"
_END = re.compile(rb"(?>\r\n|\n|\r){2}")
_LINE = re.compile(rb"\r\n|\n|\r")
_LONGEST_END = 4


class Garbage(ValueError):
    """The other server sent something that OpenAI's API does not have. The message says what."""


@dataclass(frozen=True, slots=True)
class Event:
    raw: bytes
    """Its lines, with the empty one after them."""
    data: dict[str, Any] | None
    """None for the last event, and for those without data, such as comments."""
    is_done: bool = False


class EventReader:
    def __init__(self) -> None:
        self._rest = bytearray()
        self._looked = 0
        """Bytes of `_rest` in which no event ends."""

    def push(self, piece: bytes) -> list[Event]:
        """Return the events that are complete now. Raises Garbage."""
        self._rest += piece
        events, begin = [], 0
        for end in _END.finditer(self._rest, self._looked):
            events.append(_event(bytes(self._rest[begin : end.start()])))
            begin = end.end()
        del self._rest[:begin]
        self._looked = max(0, len(self._rest) - _LONGEST_END + 1)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Garbage(f"it sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def _event(block: bytes) -> Event:
    lines = [line for line in _LINE.split(block.removeprefix(b"\xef\xbb\xbf")) if line]
    data = b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])
    raw = b"\n".join(lines) + b"\n\n"
    if not data:
        return Event(raw, None)
    if data == DONE:
        return Event(raw, None, is_done=True)
    return Event(raw, as_object(data))


def as_object(data: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises Garbage."""
    try:
        value = fast_json.loads(data)
    except fast_json.DecodeError:
        value = None
    if not isinstance(value, dict):
        raise Garbage("it sent data that is not a JSON object")
    return value
