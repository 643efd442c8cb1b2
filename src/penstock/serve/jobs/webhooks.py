"""Posts an event to a URL when a batch or a response ends, in the form of OpenAI's webhooks.

The event is signed as https://www.standardwebhooks.com describes.
An event has ids and no content. It is sent until the URL accepts it, also after a restart; for the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import sqlite3
import time

import httpx2

from penstock import fast_json
from penstock.jobs.store import Event, Store
from penstock.types.errors import ConfigError

_log = logging.getLogger(__name__)

LOOKED_EACH_S = 1.0
AT_ONCE = 16
TIMEOUT_S = 10.0
FIRST_PAUSE_S, LAST_PAUSE_S = 5, 3600
"""Pauses between attempts double from the first to the last."""
KEPT_S = 3 * 24 * 3600
"""Time after which an event that nobody accepts is dropped, as at OpenAI."""
_PREFIX = "whsec_"


def key_of(url: str, secret: str) -> bytes:
    """Return the key of signatures: of `whsec_` and at least 24 bytes as base64. Raises ConfigError, also for a wrong URL."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error:
        key = b""
    if not secret.startswith(_PREFIX) or len(key) < 24:
        remedy = "Set PENSTOCK_WEBHOOK_SECRET to such a text: `echo whsec_$(head -c 32 /dev/urandom | base64)` makes one."
        raise ConfigError(f"The secret of webhooks is not {_PREFIX} and 24 bytes or more as base64.", remedy=remedy)
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is not the address of a webhook.", remedy="Begin it with https://.")
    return key


class Webhooks:
    def __init__(self, store: Store, url: str, key: bytes) -> None:
        """`store`: one that notes events. `key`: from `key_of`."""
        self._store, self._url, self._key = store, url, key
        self._task: asyncio.Task[None] | None = None
        self._problems: dict[Event, str] = {}
        """An event that was sent -> why it was not accepted, or "", until the disk has taken that."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="webhooks")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        async with httpx2.AsyncClient(timeout=TIMEOUT_S, follow_redirects=False, trust_env=False) as client:
            while True:
                try:
                    events = await asyncio.to_thread(self._store.due_events, int(time.time()), AT_ONCE)
                    ends = await asyncio.gather(*[self._deliver(client, event) for event in events], return_exceptions=True)
                    for error in filter(None, ends):
                        raise error
                except (sqlite3.Error, OSError) as error:
                    _log.warning("events can't be read or noted: %s", error)
                    events = []
                except Exception:
                    _log.exception("events can't be sent")
                    events = []
                if len(events) < AT_ONCE:
                    await asyncio.sleep(LOOKED_EACH_S)

    async def _deliver(self, client: httpx2.AsyncClient, event: Event) -> None:
        """Send an event and note how that went. If the disk fails, only the note is tried again."""
        if event not in self._problems:
            self._problems[event] = await self._send(client, event)
        problem, now_s = self._problems[event], int(time.time())
        if not problem:
            await asyncio.to_thread(self._store.forget, event)
        elif now_s - event.created_s > KEPT_S:
            await asyncio.to_thread(self._store.forget, event)
            _log.warning(
                "the event %s of %s is dropped: the webhook never accepted it (%s)", event.kind, event.subject, problem
            )
        else:
            pause_s = min(FIRST_PAUSE_S << min(event.num_attempts, 20), LAST_PAUSE_S)
            await asyncio.to_thread(self._store.put_off, event, now_s + pause_s)
            if not event.num_attempts:
                _log.warning("the webhook did not accept %s of %s: %s; it is sent again", event.kind, event.subject, problem)
        del self._problems[event]

    async def _send(self, client: httpx2.AsyncClient, event: Event) -> str:
        """Return why the event was not accepted, or "" if it was."""
        now_s, event_id = int(time.time()), f"evt_{event.created_s:x}{event.number:08x}"
        body = fast_json.dumps(
            {
                "id": event_id,
                "object": "event",
                "created_at": event.created_s,
                "type": event.kind,
                "data": {"id": event.subject},
            }
        )
        headers = self._headers(event_id, now_s, body)
        try:
            async with asyncio.timeout(TIMEOUT_S), client.stream("POST", self._url, content=body, headers=headers) as answer:
                return "" if answer.is_success else f"it answered {answer.status_code}"
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError) as error:
            return type(error).__name__

    def _headers(self, event_id: str, now_s: int, body: bytes) -> dict[str, str]:
        signed = f"{event_id}.{now_s}.".encode() + body
        signature = base64.b64encode(hmac.digest(self._key, signed, hashlib.sha256)).decode()
        return {
            "content-type": "application/json",
            "webhook-id": event_id,
            "webhook-timestamp": str(now_s),
            "webhook-signature": f"v1,{signature}",
        }
