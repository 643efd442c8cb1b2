"""A response that is kept, as the store and the disk have it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from sys import getsizeof
from typing import Literal

from penstock import fast_json
from penstock.serve.responses.answers import Response, ResponseError
from penstock.serve.responses.read import Item, Past
from penstock.types.request import Owner

_ENTRY_BYTES = 760
"""Python's overhead of one response, in bytes."""

Key = tuple[Owner, str]
"""The owner and the id of a response."""
Headers = tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, eq=False, slots=True)
class Kept:
    owner: Owner
    response_id: str
    response: bytes
    """The response's current state, as JSON."""
    items: tuple[bytes, ...]
    """Items of the question, then of the answer. Each is JSON that begins with the item's id."""
    num_asked: int
    """Number of items of the question."""
    previous_id: str | None
    is_background: bool = False
    is_running: bool = False
    """The response runs in the background and has not ended."""
    asked: bytes = b""
    """The body of the request, while it is running."""
    urgency: Headers = ()
    """The request's headers about urgency, while it is running."""
    past: Past | None = None
    """The conversation before it, while it is running: other responses, which may be gone when it is asked again."""
    num_bytes: int = field(init=False)
    """Memory of the response in `MemoryStore`, Python's overhead included."""

    def __post_init__(self) -> None:
        parts: list[object] = [*self.items, self.items, self.response, self.asked]
        if self.past is not None:
            items, referenced = self.past.items, self.past.referenced
            parts += [*items, items, *referenced, *referenced.values(), referenced]
        object.__setattr__(self, "num_bytes", sum(map(getsizeof, parts)) + _ENTRY_BYTES)

    @property
    def key(self) -> Key:
        return self.owner, self.response_id

    def as_of(self, response: Response, items: Sequence[Item] | None = None) -> Kept:
        """Return a later state of a response in the background. If `items` are given, the response has ended."""
        later = replace(self, response=fast_json.dumps(response))
        return later if items is None else replace(later._over(), items=as_json(items))

    def ended(self, status: Literal["failed", "cancelled"], error: ResponseError | None = None) -> Kept:
        """Return the end of a response in the background that was not generated."""
        response: Response = fast_json.loads(self.response)
        response["status"], response["error"] = status, error
        return replace(self._over(), response=fast_json.dumps(response))

    def _over(self) -> Kept:
        return replace(self, is_running=False, asked=b"", urgency=(), past=None)


def as_json(items: Sequence[Item]) -> tuple[bytes, ...]:
    """Return items as JSON for the store."""
    return tuple([compact(fast_json.dumps(item)) for item in items])


def compact(data: bytes) -> bytes:
    """Copy bytes into memory of their own size, since the buffer of `fast_json.dumps` is up to half as large again."""
    return bytes(memoryview(data))
