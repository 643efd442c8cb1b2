"""OpenAI's files: upload, list, get, read and delete. Only lines of batches, and their answers."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from io import FileIO
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from typing_extensions import TypedDict

from penstock.disk import cause
from penstock.jobs.store import UPLOAD, Busy, File, InUse, NoRoom
from penstock.serve.api import Route
from penstock.serve.errors import NO_RETRY, ApiError, invalid, no_room, overloaded, shorten, unavailable
from penstock.serve.http.checks import headers_of
from penstock.serve.jobs.form import FILE, Form
from penstock.serve.jobs.runner import BatchRunner
from penstock.serve.paging import ORDER, Page, count, listed
from penstock.serve.terms import read_owner

_log = logging.getLogger(__name__)

WRITTEN_AT_ONCE = 1 << 16
MIN_EXPIRES_S, MAX_EXPIRES_S = 3600, 2592000
"""OpenAI's own limits: an hour and 30 days."""
FILES_LIMIT = count("limit", 10_000, 1, 10_000)
CONTENT_TYPE = "application/octet-stream"


UploadForm = TypedDict(
    "UploadForm",
    {
        "file": bytes,
        "purpose": Literal["batch"],
        "expires_after[anchor]": NotRequired[Literal["created_at"]],
        "expires_after[seconds]": NotRequired[Annotated[int, Field(ge=MIN_EXPIRES_S, le=MAX_EXPIRES_S)]],
    },
)


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]


FileList = Page[FileObject]


class FileDeleted(TypedDict):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


def unless_disk_fails(routes: Sequence[Route]) -> Sequence[Route]:
    """Return routes that answer 429 for too many files or uploads, and 503 if the folder can't be used.

    It can't on a full disk, or while the server ends.
    """
    return [replace(route, answer=_guarded(route.answer)) for route in routes]


def _guarded(answer: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(answer)
    async def answer_or_refuse(*given: object) -> Any:
        try:
            return await answer(*given)
        except NoRoom as full:
            raise no_room(str(full)) from None
        except Busy as busy:
            raise overloaded(f"Overloaded: {busy}", retry_after_s=1.0) from None
        except (sqlite3.Error, OSError) as error:
            _log.warning("the folder of jobs can't be used: %s", error)
            raise unavailable(f"The server's folder of files can't be used now: {cause(error)}.") from None

    return answer_or_refuse


def read_expiry(anchor: str | None, seconds: object) -> int | None:
    """Return the seconds of `expires_after`, or None without it. Raises 400."""
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("'expires_after.anchor' must be 'created_at'.", "expires_after")
    if not re.fullmatch("[0-9]{1,8}", str(seconds)) or not MIN_EXPIRES_S <= int(str(seconds)) <= MAX_EXPIRES_S:
        raise invalid(f"'expires_after.seconds' must be from {MIN_EXPIRES_S} to {MAX_EXPIRES_S}.", "expires_after")
    return int(str(seconds))


class FilesEndpoint:
    def __init__(self, batches: BatchRunner) -> None:
        self._batches = batches

    async def create(self, http: HttpRequest) -> FileObject:
        """Upload a file (multipart/form-data): the lines of a batch, each a request as JSON. `purpose` is `batch`."""
        batches, owner = self._batches, read_owner(http.scope)
        form = Form(headers_of(http.scope).get(b"content-type", b"").decode("latin-1"))
        try:
            upload = await batches.on_disk(batches.store.upload, owner)
            try:
                pending = bytearray()
                async for data in http.stream():
                    pending += form.feed(data)
                    if len(pending) >= WRITTEN_AT_ONCE:
                        await batches.on_disk(upload.write, pending)
                        pending.clear()
                form.end()
                expires_s = _check_fields(form.fields)
                await batches.on_disk(upload.write, pending)
                now_s = batches.now_s()
                until_s = None if expires_s is None else now_s + expires_s
                return _as_json(await batches.on_disk(upload.keep, form.file_name or "unnamed", UPLOAD, now_s, until_s))
            finally:
                await batches.on_disk(upload.close)
        except NoRoom as full:
            raise ApiError(413, str(full), code="quota_exceeded", param=FILE, headers={"Connection": "close"}) from None
        except ClientDisconnect:
            raise invalid("The client disconnected before it had sent the whole file.") from None

    async def list(self, http: HttpRequest) -> FileList:
        """List the files, the newest first."""
        limit, after = FILES_LIMIT.read(http), http.query_params.get("after")
        purpose, ascending = http.query_params.get("purpose"), ORDER.read(http) == "asc"
        store, owner = self._batches.store, read_owner(http.scope)

        def read() -> Sequence[File]:
            if after is not None and store.file(after, owner) is None:
                raise _not_found(after, "after")
            return store.files(owner, purpose=purpose, after=after, limit=limit + 1, ascending=ascending)

        files = await self._batches.on_disk(read)
        return listed([_as_json(one) for one in files], limit)

    async def get(self, http: HttpRequest) -> FileObject:
        """Describe a file."""
        return _as_json(await self._find(http))

    async def content(self, http: HttpRequest) -> Response:
        """Return the content of a file."""
        file, batches = await self._find(http), self._batches
        try:
            content = await batches.on_disk(FileIO, batches.store.content(file.id))
        except FileNotFoundError:  # it was just deleted
            raise _not_found(file.id) from None
        size = content.seek(0, os.SEEK_END)
        if http.method != "HEAD":
            content.seek(0)
        return StreamingResponse(_pieces(content), headers={"Content-Length": str(size)}, media_type=CONTENT_TYPE)

    async def delete(self, http: HttpRequest) -> FileDeleted:
        """Delete a file."""
        file, batches = await self._find(http), self._batches
        try:
            await batches.on_disk(batches.store.delete, file)
        except InUse:
            message = "An unfinished batch reads this file. Cancel that first."
            raise ApiError(409, message, code="file_in_use", headers=NO_RETRY) from None
        return {"id": file.id, "object": "file", "deleted": True}

    async def _find(self, http: HttpRequest) -> File:
        file_id, batches = http.path_params["file_id"], self._batches
        file = await batches.on_disk(batches.store.file, file_id, read_owner(http.scope))
        if file is None:
            raise _not_found(file_id)
        return file


def _check_fields(fields: Mapping[str, str]) -> int | None:
    """Return the seconds after which the file expires, if it does. Raises 400."""
    if unknown := fields.keys() - UploadForm.__annotations__.keys():
        raise invalid(f"Unknown parameter: {shorten(min(unknown))!r}.", shorten(min(unknown)))
    if fields.get("purpose") != UPLOAD:
        raise invalid(f"'purpose' must be '{UPLOAD}': other files have no use here.", "purpose")
    return read_expiry(fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]"))


def _pieces(file: FileIO) -> Iterator[bytes]:
    with file:
        while piece := file.read(WRITTEN_AT_ONCE):
            yield piece


def _not_found(file_id: str, param: str | None = None) -> ApiError:
    return ApiError(404, f"There is no file {shorten(file_id)!r}.", code="file_not_found", param=param)


def _as_json(file: File) -> FileObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.num_bytes,
        "created_at": file.created_s,
        "expires_at": file.expires_s,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
    }
