"""The store of responses, in memory.

If memory is short, the owner with the most bytes loses the least recently used response. Unfinished responses in the background
are never evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import takewhile
from typing import TYPE_CHECKING

from penstock import fast_json
from penstock.clock import Clock
from penstock.serve.errors import ApiError, overloaded, shorten
from penstock.serve.responses.kept import Kept, Key, compact
from penstock.serve.responses.read import Past
from penstock.types.errors import counted
from penstock.types.request import Owner

if TYPE_CHECKING:  # with a database, which few servers need
    from penstock.serve.responses.durable import ResponseDisk

MAX_KEPT = 1 << 14
"""Most responses, however small."""
MAX_RUNNING = 256
"""Most unfinished responses in the background."""


def past_of(store: MemoryStore, owner: Owner, previous_id: str | None, referenced: list[str]) -> Past:
    """Return the conversation up to the response `previous_id`, and the items with the ids `referenced`. Raises 404 and 409."""
    groups: list[tuple[bytes, ...]] = []
    response_id, param = previous_id, "previous_response_id"
    while response_id is not None:
        # From the last to the first, so that the beginning counts as used most recently and is evicted last.
        kept = store.get(owner, response_id, param)
        if kept.is_running:
            message = f"The response {shorten(response_id)!r} has not ended. Poll it, and follow it when it has."
            raise ApiError(409, message, code="response_not_ended", param=param)
        groups.append(kept.items)
        response_id = kept.previous_id
    before = [item for group in reversed(groups) for item in group]
    named = {item_id: _item(store, owner, item_id) for item_id in dict.fromkeys(referenced)}
    num_bytes = sum(map(len, before)) + sum([len(named[item_id]) for item_id in referenced])
    return Past(before, named, num_bytes)


def _item(store: MemoryStore, owner: Owner, item_id: str) -> bytes:
    """Return an item by its id, which has its kind, the name of its response and its index there. Raises 404."""
    _, _, rest = item_id.partition("_")
    name, _, place = rest.rpartition("_")
    kept = store.get(owner, f"resp_{name}", "input")
    found = kept.items[(at := int(place)) : at + 1] if place.isdecimal() and len(place) < 8 else ()
    if found and has_id(found[0], item_id):
        return found[0]
    raise ApiError(404, f"There is no item {shorten(item_id)!r}.", code="item_not_found", param="input")


def has_id(item: bytes, item_id: str) -> bool:
    """Return whether a kept item has this id, without parsing the item."""
    return item.startswith(b'{"id":' + fast_json.dumps(item_id))


class _Shelf:
    """The responses of one owner, least recently used first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, Kept] = OrderedDict()
        self.num_bytes = 0


class MemoryStore:
    def __init__(self, max_bytes: int, ttl_s: float, clock: Clock, *, disk: ResponseDisk | None = None) -> None:
        """`max_bytes` limits all responses; 0 keeps none. A response is kept for `ttl_s` after its last use.

        `disk` receives each change, and returns the responses of earlier processes.
        """
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._shelves: dict[Owner, _Shelf] = {}
        self._used_ns: OrderedDict[Key, int] = OrderedDict()
        """Time of the last use of each response, least recent first."""
        self._num_bytes = 0
        self._running: dict[Key, Kept] = {}
        """Unfinished responses in the background, including deleted ones."""
        self._gone: OrderedDict[Key, str] = OrderedDict()
        """Recently forgotten responses -> the reason."""
        self._disk = disk

    def read(self) -> list[Kept]:
        """Take the responses of earlier processes from the disk, and return those in the background that have not ended."""
        disk, self._disk = self._disk, None
        if disk is not None:
            known, now_ns = disk.read(), self._clock.now_ns()
            for kept, unused_s in known:
                self.put(kept)
                if kept.key in self._used_ns:
                    self._used_ns[kept.key] = now_ns - int(unused_s * 1e9)
            self._forget_old()
            for kept, _ in known:
                if kept.key not in self._used_ns:
                    disk.note(kept.key, None)
            self._disk = disk
        return [*self._running.values()]

    async def settle(self) -> None:
        """Wait until all changes are on the disk, if there is one. Raises sqlite3.Error and OSError."""
        if self._disk is not None:
            await self._disk.settle()

    @property
    def keeps(self) -> bool:
        """False if the server keeps no responses."""
        return self._max_bytes > 0

    @property
    def outlives(self) -> bool:
        """Whether responses are kept for later processes."""
        return self._disk is not None

    def get(self, owner: Owner, response_id: str, param: str | None = None) -> Kept:
        """Return a response. Raises 404 with the reason if the owner has none of this id. `param`: the field with the id."""
        self._forget_old()
        shelf = self._shelves.get(owner)
        kept = None if shelf is None else shelf.kept.get(response_id)
        if kept is None:
            raise self._not_found(owner, response_id, param)
        self._use(kept)
        if self._disk is not None:
            self._disk.note_use(kept.key)
        return kept

    def past_of_running(self, key: Key) -> Past | None:
        """Return the conversation before a response in the background that has not ended, or None if it is not kept."""
        return None if (kept := self._running.get(key)) is None else kept.past

    def put(self, kept: Kept) -> None:
        """Add a response, or replace one that is asked again."""
        if kept.is_running:
            self._running[kept.key] = kept
        if kept.key in self._used_ns:  # it is asked again
            self._remove(kept)
        self._place(kept)
        self._make_room()

    def update(self, kept: Kept) -> None:
        """Replace a running response by its later state. Nothing changes if it has ended, or was deleted meanwhile."""
        if kept.key not in self._running:
            return
        if kept.is_running:
            self._running[kept.key] = kept
        else:
            del self._running[kept.key]
        if kept.key in self._used_ns:
            self.put(kept)

    def delete(self, kept: Kept) -> None:
        if kept.key in self._used_ns:
            self._forget(kept, "it was deleted")

    def check_room(self, key: Key) -> None:
        """Raise 429 if unfinished responses in the background leave no room for this one, unless it is one of them.

        Those of one tenant may take half of it.
        """
        if key in self._running:
            return
        owner, running = key[0], [*self._running.values()]
        _check_room("", running, MAX_RUNNING, self._max_bytes)
        if owner.tenant:
            own = [kept for kept in running if kept.owner == owner]
            _check_room(" of this tenant", own, MAX_RUNNING // 2, self._max_bytes // 2)

    def _use(self, kept: Kept) -> None:
        self._used_ns[kept.key] = self._clock.now_ns()
        self._used_ns.move_to_end(kept.key)
        self._shelves[kept.owner].kept.move_to_end(kept.response_id)

    def _place(self, kept: Kept) -> None:
        kept = replace(kept, response=compact(kept.response))
        shelf = self._shelves.setdefault(kept.owner, _Shelf())
        shelf.kept[kept.response_id] = kept
        shelf.num_bytes += kept.num_bytes
        self._num_bytes += kept.num_bytes
        self._use(kept)
        if self._disk is not None:
            self._disk.note(kept.key, kept)

    def _remove(self, kept: Kept) -> None:
        shelf = self._shelves[kept.owner]
        stored = shelf.kept.pop(kept.response_id)
        shelf.num_bytes -= stored.num_bytes
        self._num_bytes -= stored.num_bytes
        del self._used_ns[kept.key]
        if not shelf.kept:
            del self._shelves[kept.owner]
        if self._disk is not None:
            self._disk.note(kept.key, None)

    def _forget_old(self) -> None:
        oldest_ns = self._clock.now_ns() - int(self._ttl_s * 1e9)
        why = f"nobody asked for it for {self._ttl_s:g} s (--response-ttl)"
        due = list(takewhile(lambda key: self._used_ns[key] <= oldest_ns, self._used_ns))
        for owner, response_id in due:
            kept = self._shelves[owner].kept[response_id]
            if not kept.is_running:
                self._forget(kept, why)

    def _make_room(self) -> None:
        self._forget_old()
        if not self._is_full():
            return
        shelves = [(-shelf.num_bytes, nth, shelf) for nth, shelf in enumerate(self._shelves.values())]
        heapify(shelves)
        while shelves and self._is_full():
            _, nth, shelf = heappop(shelves)
            victim = next((kept for kept in shelf.kept.values() if not kept.is_running), None)
            if victim is None:
                continue
            self._forget(victim, "others took its room (--response-store)")
            if shelf.kept:
                heappush(shelves, (-shelf.num_bytes, nth, shelf))

    def _is_full(self) -> bool:
        return self._num_bytes > self._max_bytes or len(self._used_ns) > MAX_KEPT

    def _forget(self, kept: Kept, why: str) -> None:
        self._remove(kept)
        self._gone[kept.key] = why
        if len(self._gone) > 1 << 12:
            self._gone.popitem(last=False)

    def _not_found(self, owner: Owner, response_id: str, param: str | None) -> ApiError:
        if not self.keeps:
            why = "This server keeps none (--response-store 0)."
        elif (known := self._gone.get((owner, response_id))) is not None:
            why = f"It was forgotten: {known}. Send the conversation's items instead."
        else:
            why = (
                "It is not kept for this key: it has not ended, its client left before its end, it was created with "
                "'store': false, it was forgotten long ago, or the server was restarted."
            )
        message = f"There is no response {shorten(response_id)!r}. {why}"
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        return ApiError(404, message, code=code, param=param)


def _check_room(whose: str, running: Sequence[Kept], most: int, most_bytes: int) -> None:
    num_bytes = sum([kept.num_bytes for kept in running])
    if len(running) >= most or num_bytes >= most_bytes:
        told = f"{counted(len(running), 'response')}{whose} of {num_bytes} bytes"
        raise overloaded(f"Overloaded: {told} run in the background already.", retry_after_s=5.0)
