"""The responses that a server remembers, for `GET` and for those that follow them: in memory, within bounds, by their owners.

All of it belongs to the event loop. A response is kept as JSON, so its size is known. Where room is short, the
owner who has most loses the response that was not used for longest. One that runs in the background stays until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from sys import getsizeof

import orjson

from penstock.calls.call import Owner
from penstock.clock import Clock
from penstock.serve.errors import ApiError, overloaded, shorten
from penstock.serve.responses.answers import Response
from penstock.serve.responses.read import Item, Past
from penstock.types.errors import counted

MAX_KEPT = 1 << 14
MAX_RUNNING = 256
"""Responses in the background that have not ended."""
MAX_REMEMBERED = 1 << 12
"""Responses of which it is known why they were forgotten."""
_RETRY_AFTER_S = 5.0
_ENTRY_BYTES = 640
"""Python's share of one response: its `Kept`, its names, and its places in the store's dictionaries."""


@dataclass(eq=False, slots=True)
class Kept:
    owner: Owner
    response_id: str
    response: bytes
    """As it is told now: JSON."""
    items: tuple[bytes, ...]
    """The items of the question, and of the answer behind them: each as JSON, which begins with its id."""
    num_asked: int
    """Items of the question."""
    previous_id: str | None
    used_ns: int = 0
    cancel: Callable[[], object] | None = None
    """Ends a response that runs in the background; None: it has ended, or never ran there."""
    ended: asyncio.Future[None] | None = None
    """Done when such a response has ended: the task that reads it."""
    was_background: bool = False

    def __post_init__(self) -> None:
        self.response = _compact(self.response)

    @property
    def num_bytes(self) -> int:
        """Memory of the response with all that the store needs for it."""
        return sum(map(getsizeof, self.items)) + getsizeof(self.items) + getsizeof(self.response) + _ENTRY_BYTES


def as_json(items: Sequence[Item]) -> tuple[bytes, ...]:
    """Return items as they are kept."""
    return tuple([_compact(orjson.dumps(item)) for item in items])


def _compact(data: bytes) -> bytes:
    """Copy bytes into an allocation of their own size: those of `orjson.dumps` lie in a buffer of 4 KB or more."""
    return bytes(memoryview(data))


def has_id(item: bytes, item_id: str) -> bool:
    """Whether a kept item has this id. It is not parsed for that."""
    return item.startswith(b'{"id":' + orjson.dumps(item_id))


class _Shelf:
    """The responses of one owner, the least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0


class ResponseStore:
    def __init__(self, max_bytes: int, ttl_s: float, clock: Clock, *, max_kept: int = MAX_KEPT) -> None:
        """`max_bytes`: of all that is kept; 0: nothing is. `ttl_s`: time after its last use for which a response is kept."""
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_kept = max_kept
        self._shelves: dict[Owner, _Shelf] = {}
        self._used: OrderedDict[Kept, None] = OrderedDict()
        """All that is kept, the least recently used first."""
        self._num_bytes = 0
        self._running: set[Kept] = set()
        """Those in the background that have not ended, the forgotten among them."""
        self._gone: OrderedDict[tuple[Owner, str], str] = OrderedDict()
        """Why those that were forgotten last were."""

    @property
    def keeps(self) -> bool:
        return self._max_bytes > 0

    def get(self, owner: Owner, response_id: str, param: str | None = None) -> Kept:
        """Raises 404, which says why there is none. `param`: the field that names it."""
        self._forget_old()
        shelf = self._shelves.get(owner)
        kept = None if shelf is None else shelf.kept.get(response_id)
        if kept is None:
            raise self._not_found(owner, response_id, param)
        self._use(kept)
        return kept

    def past(self, owner: Owner, previous_id: str | None, referenced: list[str]) -> Past:
        """The conversation before a response that follows another one, and the items that it names. Raises 404."""
        groups: list[tuple[bytes, ...]] = []
        response_id, param = previous_id, "previous_response_id"
        while response_id is not None:
            # From the last to the first, so that a conversation loses its beginning last.
            kept = self.get(owner, response_id, param)
            if kept.cancel is not None:
                message = f"The response {shorten(response_id)!r} has not ended: poll it, and follow it then."
                raise ApiError(409, message, code="response_not_ended", param=param)
            groups.append(kept.items)
            response_id = kept.previous_id
        before = [item for group in reversed(groups) for item in group]
        named = {item_id: self._item(owner, item_id) for item_id in dict.fromkeys(referenced)}
        num_bytes = sum(map(len, before)) + sum([len(named[item_id]) for item_id in referenced])
        return Past(before, named, num_bytes)

    def keep(self, kept: Kept) -> None:
        """Remember a response, and forget others for it."""
        if kept.cancel is not None:
            self._running.add(kept)
        kept.used_ns = self._clock.now_ns()
        shelf = self._shelves.setdefault(kept.owner, _Shelf())
        shelf.kept[kept.response_id] = kept
        shelf.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._used[kept] = None
        self._make_room()

    def update(self, kept: Kept, response: Response, items: Sequence[Item] | None = None) -> None:
        """Tell another state of a response that runs in the background; with `items` it has ended."""
        before = kept.num_bytes
        kept.response = _compact(orjson.dumps(response))
        if items is not None:
            kept.items = as_json(items)
            kept.cancel = None
            self._running.discard(kept)
        if kept in self._used:
            self._shelves[kept.owner].num_bytes += kept.num_bytes - before
            self._num_bytes += kept.num_bytes - before
            self._use(kept)
            self._make_room()

    def delete(self, kept: Kept) -> None:
        self._forget(kept, "it was deleted")

    def check_room(self) -> None:
        """Raise 429 if too many run in the background already, or if these fill the room of all that is kept."""
        num_bytes = sum([kept.num_bytes for kept in self._running])
        if len(self._running) >= MAX_RUNNING or num_bytes >= self._max_bytes:
            running = f"{counted(len(self._running), 'response')} of {num_bytes} bytes"
            raise overloaded(f"Overloaded: {running} run in the background already.", _RETRY_AFTER_S)

    def _item(self, owner: Owner, item_id: str) -> bytes:
        """An item by the id that it was given here: its kind, that of its response, and its place there."""
        _, _, rest = item_id.partition("_")
        name, _, place = rest.rpartition("_")
        kept = self.get(owner, f"resp_{name}", "input")
        found = kept.items[int(place) :][:1] if place.isdecimal() and len(place) < 8 else ()
        if found and has_id(found[0], item_id):
            return found[0]
        raise ApiError(404, f"There is no item {shorten(item_id)!r}.", code="item_not_found", param="input")

    def _use(self, kept: Kept) -> None:
        kept.used_ns = self._clock.now_ns()
        self._used.move_to_end(kept)
        self._shelves[kept.owner].kept.move_to_end(kept.response_id)

    def _forget_old(self) -> None:
        oldest_ns = self._clock.now_ns() - int(self._ttl_s * 1e9)
        why = f"nobody asked for it for {self._ttl_s:g} s (--response-ttl)"
        for kept in [*self._due(oldest_ns)]:
            self._forget(kept, why)

    def _due(self, oldest_ns: int) -> list[Kept]:
        due: list[Kept] = []
        for kept in self._used:
            if kept.used_ns > oldest_ns:
                break
            if kept.cancel is None:
                due.append(kept)
        return due

    def _make_room(self) -> None:
        self._forget_old()
        if not self._is_full():
            return
        shelves = [(-shelf.num_bytes, nth, shelf) for nth, shelf in enumerate(self._shelves.values())]
        heapify(shelves)
        while shelves and self._is_full():
            _, nth, shelf = heappop(shelves)
            victim = next((kept for kept in shelf.kept.values() if kept.cancel is None), None)
            if victim is None:
                continue
            self._forget(victim, "others took its room (--response-store)")
            if shelf.kept:
                heappush(shelves, (-shelf.num_bytes, nth, shelf))

    def _is_full(self) -> bool:
        return self._num_bytes > self._max_bytes or len(self._used) > self._max_kept

    def _forget(self, kept: Kept, why: str) -> None:
        shelf = self._shelves[kept.owner]
        del shelf.kept[kept.response_id], self._used[kept]
        shelf.num_bytes -= kept.num_bytes
        self._num_bytes -= kept.num_bytes
        if not shelf.kept:
            del self._shelves[kept.owner]
        self._gone[kept.owner, kept.response_id] = why
        if len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    def _not_found(self, owner: Owner, response_id: str, param: str | None) -> ApiError:
        if not self.keeps:
            why = "This server keeps none (--response-store 0)."
        elif (known := self._gone.get((owner, response_id))) is not None:
            why = f"It was forgotten: {known}. Send the conversation's items instead."
        else:
            why = "It was never kept for this key ('store': false), was forgotten long ago, or the server was started anew."
        message = f"There is no response {shorten(response_id)!r}. {why}"
        return ApiError(404, message, code="response_not_found", param=param)
