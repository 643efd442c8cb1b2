"""Anthropic's message batches, on the store of OpenAI's: their requests are stored as the lines of an internal file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.jobs.lines import NOT_IN_A_BATCH
from penstock.jobs.store import INTERNAL, Batch, File, Store, new_id
from penstock.serve.anthropic.endpoints import LIMIT
from penstock.serve.api import Parts, Route
from penstock.serve.bodies import Body, parse_body
from penstock.serve.errors import ApiError, invalid
from penstock.serve.jobs.batches import batch_not_found, find_batch
from penstock.serve.jobs.files import unless_disk_fails
from penstock.serve.jobs.runner import CANCELLED, EXPIRED, BatchRunner
from penstock.serve.shapes import Object, utc
from penstock.serve.terms import read_owner, repeated_name
from penstock.types.request import Owner

KIND, URL = "anthropic", "/v1/messages"
WINDOW_S, KEPT_S = 24 * 3600, 29 * 24 * 3600
"""As at Anthropic: a batch has a day, and its results are kept for 29."""
MAX_REQUESTS = (fast_json.MAX_CONTAINERS - 2) // 4
"""Each request has at least four of the objects and lists that a body may have, which has two itself."""
RESULTS_TYPE = "application/x-jsonl"
_WRITTEN_AT_ONCE = 1 << 16


class BatchRequest(Body):
    custom_id: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    params: dict[str, Any]


class MessageBatchBody(Body):
    requests: Annotated[list[BatchRequest], Field(min_length=1, max_length=MAX_REQUESTS, fail_fast=True)]


class MessageCounts(TypedDict):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(TypedDict):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class MessageBatchDeleted(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


class MessageBatchResult(TypedDict):
    """A line of a batch's results."""

    custom_id: str
    result: Object


def batch_routes(parts: Parts, batches: BatchRunner) -> Sequence[Route]:
    made, one = MessageBatches(parts, batches), f"{URL}/batches/{{batch_id}}"
    routes = [
        Route(f"POST {URL}/batches", "Begin a batch of messages", made.create, MessageBatchBody, MessageBatch),
        Route(
            f"GET {URL}/batches",
            "List batches of messages",
            made.list,
            returns=MessageBatchList,
            query=[LIMIT, "before_id", "after_id"],
        ),
        Route(f"GET {one}", "Get a batch of messages", made.get, returns=MessageBatch),
        Route(
            f"GET {one}/results",
            "Read the results of a batch of messages",
            made.results,
            returns=MessageBatchResult,
            media_type=RESULTS_TYPE,
        ),
        Route(f"POST {one}/cancel", "Cancel a batch of messages", made.cancel, returns=MessageBatch),
        Route(f"DELETE {one}", "Delete a batch of messages", made.delete, returns=MessageBatchDeleted),
    ]
    return unless_disk_fails(routes)


class MessageBatches:
    def __init__(self, parts: Parts, batches: BatchRunner) -> None:
        self._parts, self._batches = parts, batches

    async def create(self, data: bytes, http: HttpRequest) -> MessageBatch:
        """Answer many messages in the background, in what other requests leave of the machine."""
        batches, owner = self._batches, read_owner(http.scope)
        name = repeated_name(http.scope, data)
        batch_id = new_id("msgbatch_") if name is None else f"msgbatch_{name}"
        if (known := await batches.on_disk(batches.store.batch, batch_id, owner, KIND)) is not None:
            return self._as_json(known)
        num_requests, lines = await self._parts.reader.parse(data, lambda: self._lines(data), http.scope)
        now_s = batches.now_s()
        file = await batches.on_disk(_keep, batches.store, owner, lines, now_s)
        made = Batch(
            id=batch_id,
            owner=owner,
            kind=KIND,
            url=URL,
            input_file=file.id,
            window_s=WINDOW_S,
            created_s=now_s,
            files_expire_s=KEPT_S,
            num_lines=num_requests,
        )
        try:
            made = await batches.create(made)
        finally:
            if not batches.is_running(made) or made.input_file != file.id:  # it was refused, or sent twice at once
                await batches.on_disk(batches.store.delete, file)
        return self._as_json(made)

    def _lines(self, data: bytes) -> tuple[int, bytes]:
        requests = parse_body(data, MessageBatchBody, self._parts.reader.ignored).requests
        seen: set[str] = set()
        for index, one in enumerate(requests):
            if one.custom_id in seen:
                place = f"requests[{index}].custom_id"
                raise invalid(f"'{place}' is {one.custom_id!r}, as that of an earlier request.", place)
            for name in NOT_IN_A_BATCH:
                if one.params.get(name):
                    place = f"requests[{index}].params.{name}"
                    raise invalid(f"'{place}' can't be used in a batch.", place)
            seen.add(one.custom_id)
        lines = [{"custom_id": one.custom_id, "method": "POST", "url": URL, "body": one.params} for one in requests]
        return len(lines), b"\n".join(map(fast_json.dumps, lines)) + b"\n"

    async def list(self, http: HttpRequest) -> MessageBatchList:
        """List the batches, the newest first."""
        query = http.query_params
        limit = LIMIT.read(http)
        if "after_id" in query and "before_id" in query:
            raise invalid("Give one of 'after_id' and 'before_id'.", "before_id")
        store, owner = self._batches.store, read_owner(http.scope)
        goes_back = "before_id" in query
        place = query.get("before_id" if goes_back else "after_id")

        def read() -> Sequence[Batch]:
            if place is not None and store.batch(place, owner, KIND) is None:
                raise batch_not_found(place)
            return store.batches(owner, KIND, after=place, limit=limit + 1, ascending=goes_back)

        found = await self._batches.on_disk(read)
        page = [*found[:limit]]
        if goes_back:
            page.reverse()
        return {
            "data": [self._as_json(batch) for batch in page],
            "has_more": len(found) > limit,
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
        }

    async def get(self, http: HttpRequest) -> MessageBatch:
        """Describe a batch."""
        return self._as_json(await find_batch(http, self._batches, KIND))

    async def cancel(self, http: HttpRequest) -> MessageBatch:
        """Cancel a batch. Messages without an answer get the result `canceled`."""
        batch = await find_batch(http, self._batches, KIND)
        return self._as_json(await self._batches.cancel(batch))

    async def delete(self, http: HttpRequest) -> MessageBatchDeleted:
        """Delete a batch that has ended, and its results."""
        batch, store = await find_batch(http, self._batches, KIND), self._batches.store
        if not batch.is_ended:
            raise invalid("The batch has not ended. Cancel it first.")
        await self._batches.on_disk(_delete, store, batch)
        return {"id": batch.id, "type": "message_batch_deleted"}

    async def results(self, http: HttpRequest) -> Response:
        """Return the results of a batch that has ended, one in each line, in any order."""
        batch, store = await find_batch(http, self._batches, KIND), self._batches.store
        if not batch.is_ended:
            raise ApiError(404, "The batch has not ended: it has no results yet.", code="not_found")
        paths = [store.content(file_id) for file_id in (batch.output_file, batch.error_file) if file_id]
        try:
            await self._batches.on_disk(lambda: [path.stat() for path in paths])
        except FileNotFoundError:
            raise ApiError(404, "The results were deleted.", code="not_found") from None
        return StreamingResponse(_results(paths), media_type=RESULTS_TYPE)

    def _as_json(self, batch: Batch) -> MessageBatch:
        batch = self._batches.current(batch)
        num_cancelled, num_expired = batch.usage.get(CANCELLED, 0), batch.usage.get(EXPIRED, 0)
        num_answered = batch.num_completed + batch.num_failed
        ended_s = batch.times_s.get(batch.status) if batch.is_ended else None
        cancelled_s = batch.times_s.get("cancelling")
        status: Literal["in_progress", "canceling", "ended"] = "in_progress"
        if batch.is_ended:
            status = "ended"
        elif batch.status == "cancelling":
            status = "canceling"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": status,
            "request_counts": {
                "processing": 0 if batch.is_ended else batch.num_lines - num_answered,
                "succeeded": batch.num_completed,
                "errored": batch.num_failed - num_cancelled - num_expired,
                "canceled": num_cancelled,
                "expired": num_expired,
            },
            "created_at": utc(batch.created_s),
            "expires_at": utc(batch.due_s),
            "ended_at": None if ended_s is None else utc(ended_s),
            "cancel_initiated_at": None if cancelled_s is None else utc(cancelled_s),
            "archived_at": None,
            # A path, which the client adds to the address that it knows: a proxy may have another scheme than this server.
            "results_url": f"{URL}/batches/{batch.id}/results" if batch.is_ended else None,
        }


def _keep(store: Store, owner: Owner, lines: bytes, now_s: int) -> File:
    with closing(store.upload(owner)) as upload:
        upload.write(lines)
        return upload.keep("requests.jsonl", INTERNAL, now_s)


def _delete(store: Store, batch: Batch) -> None:
    for file_id in (batch.output_file, batch.error_file):
        if file_id and (file := store.file(file_id, batch.owner)) is not None:
            store.delete(file)
    store.delete_batch(batch)  # last: a full disk takes no change before a content is deleted


# Results, made of the lines that OpenAI's clients would read


class _Response(msgspec.Struct):
    status_code: int
    body: msgspec.Raw


class _Failure(msgspec.Struct):
    code: str
    message: str


class _Line(msgspec.Struct):
    custom_id: str
    response: _Response | None
    error: _Failure | None


_read_line = msgspec.json.Decoder(_Line).decode


def _results(paths: Sequence[Path]) -> Iterator[bytes]:
    pieces, num_bytes = list[bytes](), 0
    for path in paths:
        with path.open("rb") as lines:
            for line in lines:
                pieces.append(_result(_read_line(line)))
                num_bytes += len(pieces[-1])
                if num_bytes >= _WRITTEN_AT_ONCE:
                    yield b"".join(pieces)
                    pieces, num_bytes = [], 0
    yield b"".join(pieces)


def _result(line: _Line) -> bytes:
    result: dict[str, Any]
    if line.response is not None and line.response.status_code == 200:
        result = {"type": "succeeded", "message": line.response.body}
    elif line.response is not None:
        result = {"type": "errored", "error": line.response.body}
    else:
        assert line.error is not None, "a line has a response or an error"
        if line.error.code == CANCELLED:
            result = {"type": "canceled"}
        elif line.error.code == EXPIRED:
            result = {"type": "expired"}
        else:
            error = {"type": "api_error", "message": line.error.message}
            result = {"type": "errored", "error": {"type": "error", "error": error}}
    return fast_json.dumps({"custom_id": line.custom_id, "result": result}) + b"\n"
