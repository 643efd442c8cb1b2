"""Writes kept responses to the folder of jobs as they change, so that they outlive the process.

A response in the background is asked again after a restart, under its id. For the event loop; the disk works in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time

import msgspec

from penstock.jobs.store import Store, unreadable
from penstock.serve.responses.kept import Headers, Kept, Key
from penstock.serve.responses.read import Past
from penstock.types.request import Owner

_log = logging.getLogger(__name__)

GATHERED_S = 0.2
"""Time in which changes gather to be written together."""
TRIED_AGAIN_S = 5.0


class ResponseDisk:
    """The changes of a `MemoryStore` on their way to the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changes: dict[Key, Kept | None] = {}
        """Latest state of each response that is not written yet. None: deleted."""
        self._uses: dict[Key, int] = {}
        """Unix time of the last use of responses, as far as it is not written."""
        self._turn = asyncio.Lock()
        self._later: asyncio.TimerHandle | None = None
        self._writing: asyncio.Task[None] | None = None

    def read(self) -> list[tuple[Kept, float]]:
        """Return the responses of earlier processes, and the seconds since the last use of each, least recent first.

        Raises ConfigError for a damaged one.
        """
        now_s = time.time()
        try:
            return [
                (_decode(owner, response_id, record), max(now_s - used_s, 0.0))
                for owner, response_id, record, used_s in self._store.responses()
            ]
        except msgspec.DecodeError as error:
            raise unreadable(self._store.folder, error) from None

    def note_use(self, key: Key) -> None:
        """Write the time of a use together with the next change."""
        self._uses[key] = int(time.time())

    def note(self, key: Key, kept: Kept | None) -> None:
        """Write the new state of a response soon."""
        self._changes[key] = kept
        self._write_in(GATHERED_S)

    def _write_in(self, seconds: float) -> None:
        if self._later is None:
            self._later = asyncio.get_running_loop().call_later(seconds, self._begin)

    def _begin(self) -> None:
        self._later = None
        self._writing = asyncio.create_task(self._write())

    async def _write(self) -> None:
        try:
            await self.settle()
        except (sqlite3.Error, OSError) as error:
            _log.warning("responses can't be written: %s", error)
            self._write_in(TRIED_AGAIN_S)

    async def settle(self) -> None:
        """Return when all changes so far are on the disk. Raises sqlite3.Error and OSError."""
        async with self._turn:
            changes, self._changes = self._changes, {}
            uses, self._uses = self._uses, {}
            if not changes and not uses:
                return
            records = {key: None if kept is None else _record(kept) for key, kept in changes.items()}
            ended = [
                (f"response.{_read_response(kept.response).status}", kept.response_id)
                for kept in changes.values()
                if kept is not None and kept.is_background and not kept.is_running
            ]
            try:
                await asyncio.to_thread(self._store.write_responses, records, ended, int(time.time()), uses)
            except BaseException:
                self._changes = changes | self._changes
                self._uses = uses | self._uses
                raise

    async def close(self) -> None:
        if self._later is not None:
            self._later.cancel()
        await self._write()
        if self._later is not None:
            self._later.cancel()


class _Response(msgspec.Struct):
    status: str


_read_response = msgspec.json.Decoder(_Response).decode


class _Record(msgspec.Struct, array_like=True):
    response: msgspec.Raw
    items: list[msgspec.Raw]
    num_asked: int
    previous_id: str | None
    is_background: bool
    asked: msgspec.Raw
    """The request's body, or null if it has ended."""
    urgency: Headers = ()
    """The request's headers about urgency. Earlier versions did not write them."""
    past: tuple[list[msgspec.Raw], dict[str, msgspec.Raw], int] | None = None
    """The fields of `Kept.past`. Earlier versions did not write them."""


_read_record = msgspec.json.Decoder(_Record).decode
_NULL = b"null"


def _record(kept: Kept) -> bytes:
    items = [msgspec.Raw(item) for item in kept.items]
    asked = msgspec.Raw(kept.asked if kept.is_running else _NULL)
    fields = (msgspec.Raw(kept.response), items, kept.num_asked, kept.previous_id, kept.is_background, asked, kept.urgency)
    past = None
    if kept.past is not None:
        referenced = {item_id: msgspec.Raw(item) for item_id, item in kept.past.referenced.items()}
        past = [*map(msgspec.Raw, kept.past.items)], referenced, kept.past.num_bytes
    return msgspec.json.encode(_Record(*fields, past))


def _decode(owner: Owner, response_id: str, data: bytes) -> Kept:
    record = _read_record(data)
    is_running, past = bytes(record.asked) != _NULL, None
    if record.past is not None:
        items, referenced, num_bytes = record.past
        past = Past([*map(bytes, items)], {item_id: bytes(item) for item_id, item in referenced.items()}, num_bytes)
    return Kept(
        owner,
        response_id,
        bytes(record.response),
        tuple(map(bytes, record.items)),
        record.num_asked,
        record.previous_id,
        is_background=record.is_background,
        is_running=is_running,
        asked=bytes(record.asked) if is_running else b"",
        urgency=record.urgency,
        past=past,
    )
