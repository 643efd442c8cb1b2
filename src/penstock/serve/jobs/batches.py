"""OpenAI's batches: a file of requests is answered in the background, and the answers are another file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from typing_extensions import TypedDict

from penstock.jobs.store import Batch, NoFile, new_id
from penstock.serve.api import Parts
from penstock.serve.bodies import Body, Metadata
from penstock.serve.errors import NO_RETRY, ApiError, invalid, shorten
from penstock.serve.jobs.files import read_expiry
from penstock.serve.jobs.runner import BatchRunner
from penstock.serve.paging import LIMIT, Page, listed
from penstock.serve.shapes import ResponseUsage, response_usage
from penstock.serve.terms import is_local_only, read_owner, repeated_name

KIND = "openai"
MAX_WINDOW_S = 30 * 24 * 3600
_UNITS = {"m": 60, "h": 3600, "d": 24 * 3600}
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class Expiry(Body):
    anchor: str
    seconds: int


class BatchBody(Body):
    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Annotated[str, Field(max_length=16)] = "24h"
    """A number of minutes, hours or days: `30m`, `24h`, `7d`. Lines without an answer by then are given up."""
    metadata: Metadata | None = None
    output_expires_after: Expiry | None = None


class LineError(TypedDict):
    code: str
    line: int | None
    message: str
    param: str | None


class LineErrors(TypedDict):
    object: Literal["list"]
    data: list[LineError]


class RequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None
    usage: ResponseUsage
    estimated_end_at: int | None


BatchList = Page[BatchObject]


class BatchesEndpoint:
    def __init__(self, parts: Parts, batches: BatchRunner) -> None:
        self._parts, self._batches = parts, batches

    async def create(self, data: bytes, http: HttpRequest) -> BatchObject:
        """Answer the lines of a file in the background, in what other requests leave of the machine."""
        batches, owner = self._batches, read_owner(http.scope)
        body = await self._parts.reader.body(data, BatchBody, http.scope)
        expiry, name = body.output_expires_after, repeated_name(http.scope, data)
        batch_id = new_id("batch_") if name is None else f"batch_{name}"
        if (known := await batches.on_disk(batches.store.batch, batch_id, owner, KIND)) is not None:
            return self._as_json(known)
        batch = Batch(
            id=batch_id,
            owner=owner,
            kind=KIND,
            url=body.endpoint,
            input_file=body.input_file_id,
            window_s=read_window(body.completion_window),
            created_s=batches.now_s(),
            metadata=body.metadata,
            is_local_only=is_local_only(http.scope),
            files_expire_s=None if expiry is None else read_expiry(expiry.anchor, expiry.seconds),
        )
        try:
            batch = await batches.create(batch)
        except NoFile:
            message = f"There is no file {shorten(body.input_file_id)!r}."
            raise ApiError(404, message, code="file_not_found", param="input_file_id") from None
        return self._as_json(batch)

    async def list(self, http: HttpRequest) -> BatchList:
        """List the batches, the newest first."""
        limit, after = LIMIT.read(http), http.query_params.get("after")
        store, owner = self._batches.store, read_owner(http.scope)

        def read() -> Sequence[Batch]:
            if after is not None and store.batch(after, owner, KIND) is None:
                raise batch_not_found(after, "after")
            return store.batches(owner, KIND, after=after, limit=limit + 1)

        found = await self._batches.on_disk(read)
        return listed([self._as_json(batch) for batch in found], limit)

    async def get(self, http: HttpRequest) -> BatchObject:
        """Describe a batch: its status, how many lines are answered, and when it is expected to end."""
        return self._as_json(await find_batch(http, self._batches, KIND))

    async def cancel(self, http: HttpRequest) -> BatchObject:
        """Cancel a batch. Its answers so far stay."""
        batch = await find_batch(http, self._batches, KIND)
        if batch.is_ended:
            message = f"The batch has ended already: it is {batch.status}."
            raise ApiError(409, message, code="batch_ended", headers=NO_RETRY)
        return self._as_json(await self._batches.cancel(batch))

    def _as_json(self, batch: Batch) -> BatchObject:
        batch = self._batches.current(batch)
        counts = [batch.usage.get(f"{kind}_tokens", 0) for kind in ("input", "cached", "output", "reasoning")]
        fields: dict[str, Any] = {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.url,
            "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
            "input_file_id": batch.input_file,
            "completion_window": _window(batch.window_s),
            "status": batch.status,
            "output_file_id": (batch.output_file or None) if batch.is_ended else None,
            "error_file_id": (batch.error_file or None) if batch.is_ended else None,
            "created_at": batch.created_s,
            "expires_at": batch.due_s,
            **{f"{status}_at": batch.times_s.get(status) for status in _TIMES},
            "request_counts": {"total": batch.num_lines, "completed": batch.num_completed, "failed": batch.num_failed},
            "metadata": batch.metadata,
            "usage": response_usage(*counts),
            "estimated_end_at": self._batches.ends_s(batch),
        }
        return fields  # type: ignore[return-value]


async def find_batch(http: HttpRequest, batches: BatchRunner, kind: str) -> Batch:
    """Return the batch that a path names. Raises 404."""
    batch_id = http.path_params["batch_id"]
    batch = await batches.on_disk(batches.store.batch, batch_id, read_owner(http.scope), kind)
    if batch is None:
        raise batch_not_found(batch_id)
    return batch


def read_window(text: str) -> int:
    """Return the seconds of a completion window. Raises 400."""
    found = re.fullmatch("([1-9][0-9]{0,4})([mhd])", text)
    if found is None or (window_s := int(found[1]) * _UNITS[found[2]]) > MAX_WINDOW_S:
        raise invalid("'completion_window' must be minutes, hours or days, such as 24h, and at most 30d.", "completion_window")
    return window_s


def _window(window_s: int) -> str:
    return f"{window_s // 3600}h" if window_s % 3600 == 0 else f"{window_s // 60}m"


def batch_not_found(batch_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"There is no batch {shorten(batch_id)!r}.", code="batch_not_found", param=param)
