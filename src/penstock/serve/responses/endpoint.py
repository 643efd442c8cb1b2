"""The endpoints of `/v1/responses`, OpenAI's newer API.

Responses are stored, so that a later request can continue one. They can run in the background while the client polls.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response as HttpResponse

from penstock import fast_json
from penstock.calls.in_flight import RunningCall
from penstock.serve.answering import open_call
from penstock.serve.api import Parts
from penstock.serve.asking import Asked
from penstock.serve.course import Course, course_of
from penstock.serve.errors import ApiError, cancelled, internal, invalid, unavailable
from penstock.serve.http.checks import add_header, identity_of
from penstock.serve.http.entries import entry_of
from penstock.serve.paging import LIMIT, ORDER
from penstock.serve.responses.answers import Response, ResponseForgotten
from penstock.serve.responses.kept import Kept, Key, as_json
from penstock.serve.responses.read import Draft, Past, read, references
from penstock.serve.responses.schemas import ResponsesBody
from penstock.serve.responses.store import MemoryStore, has_id, past_of
from penstock.serve.responses.write import ResponsesWriter
from penstock.serve.streams import respond, write_chunks
from penstock.serve.terms import read_owner, repeated_name, urgency_of
from penstock.types.request import Owner

_log = logging.getLogger(__name__)

_CANCELLED = "the response was cancelled"
REFUSALS, RETRY_AFTER_S = (429, 503), 5.0
"""Statuses after which a response of an earlier process is asked again, and after how long."""


class _Stopped(Exception):
    """The server stops, and the next process asks the response again."""


class _Running(NamedTuple):
    """A response that is generated in the background."""

    task: asyncio.Task[None]
    """Reads the answer to its end."""
    cancel: Callable[[], object]


class ResponsesEndpoint:
    def __init__(self, parts: Parts, store: MemoryStore) -> None:
        self._config = parts.config
        self._reader = parts.reader
        self._in_flight = parts.in_flight
        self._store = store
        self._running: dict[Key, _Running] = {}
        """Unfinished responses in the background."""
        self._own = parts.own
        self._unix_time_s = parts.deployment.sources.unix_time_s
        self._is_stopping = False
        self._asking: dict[Key, asyncio.Task[None]] = {}
        """Tasks that ask responses again after a restart, until they run."""
        self._told_kinds: set[str] = set()
        """Types of left-out tools that were logged already."""

    async def create(self, data: bytes, http: HttpRequest) -> HttpResponse | fast_json.Raw:
        """Answer a list of items (messages, calls, ...) with further items. The response is kept unless `store` is false."""
        body = await self._reader.body(data, ResponsesBody, http.scope)
        identity = identity_of(http.scope)
        if body.request_id is not None:
            identity.adopt(body.request_id)
        owner, course = read_owner(http.scope), course_of(http.scope)
        sent = data if course.sent is None else course.sent
        if not body.stream and self._store.keeps and (name := repeated_name(http.scope, sent)) is not None:
            if body.request_id is None and not identity.is_from_header:
                identity.request_id = name
            with contextlib.suppress(ApiError):  # it is not known yet
                return fast_json.Raw(self._store.get(owner, f"resp_{name}").response)
            course.response_name = name
        key = owner, f"resp_{course.response_name}"
        self._check_store(body, key)
        past = self._store.past_of_running(key)
        if past is None:  # the request is new, or an earlier version kept it
            past = past_of(self._store, owner, body.previous_response_id, references(body))
        num_bytes = len(data) + past.num_bytes
        if num_bytes > self._config.max_body_bytes:
            raise ApiError(
                413,
                f"The conversation has {num_bytes} bytes, earlier items included; at most {self._config.max_body_bytes} are "
                "taken (--max-body-size).",
                code="request_too_large",
                param="previous_response_id" if past.items else "input",
            )
        keeps = self._store.keeps and not course.is_background  # a line of a batch has its answer there
        asked = Asked(self._reader, data, http.scope)
        opened, draft = await open_call(partial(read, body, past, keeps=keeps), asked, num_bytes, self._in_flight, http)
        if draft.tools.left_out:
            self._tell_left_out(draft.tools.left_out, http)
        if body.background:
            return await self._begin(opened, draft, owner, sent, past, http)
        with opened:
            writer = ResponsesWriter(opened, draft=draft, on_end=partial(self._keep, draft, owner))
            response = await respond(http, opened, lambda _: writer)
        if writer.ended is not None:
            self._keep(draft, owner, writer.ended)
        return response

    def _tell_left_out(self, kinds: Set[str], http: HttpRequest) -> None:
        add_header(http.scope, b"x-tools-left-out", ", ".join(sorted(kinds)).encode())
        for kind in sorted(kinds - self._told_kinds):
            _log.warning("tools of the type %r are left out of /v1/responses: this server does not run them", kind)
        self._told_kinds |= kinds

    def _check_store(self, body: ResponsesBody, key: Key) -> None:
        """Raise 400 and 429. `key`: of the response, if the server asks it again."""
        if body.store and not self._store.keeps:
            raise invalid("'store' is true, but this server keeps no responses (--response-store 0).", "store")
        if body.background:
            if body.store is False or not self._store.keeps:
                why = "'store' is false" if body.store is False else "this server keeps none (--response-store 0)"
                raise invalid(f"'background' needs a response that is kept, and {why}.", "background")
            self._store.check_room(key)

    def _keep(self, draft: Draft, owner: Owner, response: Response) -> None:
        if response["store"]:
            self._store.put(_new_kept(draft, owner, response))

    # In the background

    async def _begin(
        self, opened: RunningCall, draft: Draft, owner: Owner, sent: bytes, past: Past, http: HttpRequest
    ) -> fast_json.Raw:
        with opened:
            queued: Response = {**draft.response, "status": "queued"}
            kept = replace(_new_kept(draft, owner, queued), is_background=True, is_running=True, urgency=urgency_of(http.scope))
            if self._store.outlives:
                kept = replace(kept, asked=sent, past=past)
            self._store.check_room(kept.key)  # other requests may have taken the room meanwhile
            if kept.key in self._running:  # the client has sent it again at once
                opened.close()
                return fast_json.Raw(kept.response)
            writer = ResponsesWriter(opened, draft=draft, on_end=lambda _response: None)
            task = asyncio.create_task(self._run(opened, draft, kept, writer), name=f"response {kept.response_id}")
            if (entry := entry_of(http.scope)) is not None:
                entry.work, entry.count_tokens = task, writer.usage.counts
            self._running[kept.key] = _Running(task, partial(opened.stream.cancel, _CANCELLED))
            task.add_done_callback(lambda _: self._running.pop(kept.key))
            self._store.put(kept)
        try:
            await self._settle()
        except ApiError:
            if (running := self._running.get(kept.key)) is not None:  # else it has ended meanwhile
                running.cancel()
            self._store.delete(kept)
            raise
        return fast_json.Raw(kept.response)

    async def _settle(self) -> None:
        try:
            await self._store.settle()
        except (sqlite3.Error, OSError) as error:
            raise unavailable(f"The disk can't keep this now: {error}.") from None

    async def stop(self) -> None:
        """Let the next process restart responses in the background that the server ends from now on."""
        self._is_stopping = True
        for task in self._asking.values():
            task.cancel()

    def go_on(self) -> None:
        """Restart responses in the background that the previous process left unfinished."""
        for kept in self._store.read():
            task = asyncio.create_task(self._ask_again(kept), name=f"response {kept.response_id}")
            self._asking[kept.key] = task
            task.add_done_callback(partial(self._asking.pop, kept.key))

    async def _ask_again(self, kept: Kept) -> None:
        name, created_unix_s = kept.response_id.removeprefix("resp_"), fast_json.loads(kept.response)["created_at"]
        while True:
            age_ns = max(0, self._unix_time_s() - created_unix_s) * 1_000_000_000
            course, left = Course(response_name=name, created_unix_s=created_unix_s, age_ns=age_ns), asyncio.Event()
            answered = await self._own.ask(kept.owner, "/v1/responses", kept.asked, name, left, course, kept.urgency)
            if answered is None or answered.status not in REFUSALS:
                break
            await asyncio.sleep(answered.retry_after_s or RETRY_AFTER_S)
        if answered is None or answered.status != 200:
            why = "Its API key was withdrawn." if answered is None else answered.why
            message = f"The server was restarted, and the request could not be asked again. {why}"
            self._store.update(kept.ended("failed", {"code": "server_error", "message": message}))

    async def _run(self, opened: RunningCall, draft: Draft, kept: Kept, writer: ResponsesWriter) -> None:
        """Generate a response in the background, and store it."""
        try:
            response = await self._answered(opened, draft, kept, writer)
        except _Stopped:
            return
        except Exception:
            request_id = opened.terms.request_id
            _log.exception("request %s failed in the background", request_id)
            response = writer.failure(internal(request_id))
        finally:
            opened.close()
        self._store.update(kept.as_of(response, [*draft.items, *response["output"]]))

    async def _answered(self, opened: RunningCall, draft: Draft, kept: Kept, writer: ResponsesWriter) -> Response:
        is_queued = True
        while chunks := await opened.next_chunks():
            if is_queued:
                is_queued = False
                self._store.update(kept.as_of(draft.response))
            _, error = write_chunks(opened, writer, chunks)
            if error is not None:
                if self._is_stopping and self._store.outlives and error.code == "unavailable":
                    raise _Stopped
                return writer.failure(error)
        if opened.stream.is_cancelled:
            return writer.failure(cancelled(_CANCELLED))
        return writer.response()

    # Responses that are kept

    async def get(self, http: HttpRequest) -> fast_json.Raw:
        """Return a kept response in its current state."""
        if http.query_params.get("stream", "false") not in ("false", ""):
            raise invalid("'stream' is not supported here yet: poll until 'status' changes.", "stream")
        return fast_json.Raw(self._find(http).response)

    async def delete(self, http: HttpRequest) -> ResponseForgotten:
        """Delete a response. If it runs in the background, it is cancelled."""
        kept = self._find(http)
        await self._end(kept)
        self._store.delete(kept)
        await self._settle()
        return {"id": kept.response_id, "object": "response", "deleted": True}

    async def cancel(self, http: HttpRequest) -> fast_json.Raw:
        """Cancel a response in the background. If it has ended, nothing changes."""
        kept = self._find(http)
        if not kept.is_background:
            raise invalid("Only responses that were created with 'background': true can be cancelled.")
        await self._end(kept)
        await self._settle()
        return fast_json.Raw(self._find(http).response)

    async def _end(self, kept: Kept) -> None:
        """Cancel a response that runs in the background, or waits to be asked again."""
        if (asking := self._asking.get(kept.key)) is not None:
            asking.cancel()
            await asyncio.wait([asking])
        if (running := self._running.get(kept.key)) is not None:
            running.cancel()
            await asyncio.wait([running.task])
        elif asking is not None:
            self._store.update(kept.ended("cancelled"))

    async def input_items(self, http: HttpRequest) -> dict[str, Any]:
        """List the items of a response's own `input`, last first."""
        kept, limit, after = self._find(http), LIMIT.read(http), http.query_params.get("after")
        items = kept.items[: kept.num_asked]
        if ORDER.read(http) == "desc":
            items = items[::-1]
        if after is not None:
            places = [place for place, item in enumerate(items) if has_id(item, after)]
            if not places:
                raise invalid("'after' must be the id of an item of this list.", "after")
            items = items[places[0] + 1 :]
        listed = items[:limit]
        return {
            "object": "list",
            "data": [fast_json.Raw(item) for item in listed],
            "first_id": fast_json.loads(listed[0])["id"] if listed else None,
            "last_id": fast_json.loads(listed[-1])["id"] if listed else None,
            "has_more": len(items) > len(listed),
        }

    def _find(self, http: HttpRequest) -> Kept:
        return self._store.get(read_owner(http.scope), http.path_params["response_id"])


def _new_kept(draft: Draft, owner: Owner, response: Response) -> Kept:
    return Kept(
        owner,
        draft.response_id,
        fast_json.dumps(response),
        as_json([*draft.items, *response["output"]]),
        len(draft.items),
        response["previous_response_id"],
    )
