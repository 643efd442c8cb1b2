"""Reads the server-sent events of another server, as they come, and checks that they are complete.

https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from penstock import fast_json

MAX_EVENT_BYTES = 1 << 20
DONE = b"[DONE]"


class Garbage(ValueError):
    """What came is not a stream of OpenAI's API. The message says why."""


@dataclass(frozen=True, slots=True)
class Event:
    raw: bytes
    """Its lines, with the empty one after them."""
    data: dict[str, Any] | None
    """None for the last event, and for those without data, such as comments."""
    is_done: bool = False


class EventReader:
    def __init__(self) -> None:
        self._rest = b""

    def push(self, piece: bytes) -> list[Event]:
        """Return the events that are complete now. Raises Garbage."""
        *whole, self._rest = (self._rest + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Garbage(f"it sent an event of more than {MAX_EVENT_BYTES} bytes")
        return [_event(lines) for lines in whole]


def _event(lines: bytes) -> Event:
    data = b"\n".join([line[5:].removeprefix(b" ") for line in lines.split(b"\n") if line.startswith(b"data:")])
    raw = lines + b"\n\n"
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
        raise Garbage("it sent what is not a JSON object")
    return value
