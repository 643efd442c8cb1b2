"""OpenAI's files and batches: `/v1/files` and `/v1/batches`, if the server has a folder for them."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route, without_folder
from penstock.serve.paging import LIMIT, ORDER

_FILE, _BATCH = "/v1/files/{file_id}", "/v1/batches/{batch_id}"


def _routes(parts: Parts) -> Sequence[Route]:
    if parts.batches is None:
        return []
    from penstock.serve.jobs.batches import BatchBody, BatchesEndpoint, BatchList, BatchObject
    from penstock.serve.jobs.files import (
        CONTENT_TYPE,
        FILES_LIMIT,
        FileDeleted,
        FileList,
        FileObject,
        FilesEndpoint,
        UploadForm,
        unless_disk_fails,
    )

    files, batches = FilesEndpoint(parts.batches), BatchesEndpoint(parts, parts.batches)
    in_use, has_ended = {409: "An unfinished batch reads the file"}, {409: "The batch has ended"}
    routes = [
        Route("POST /v1/files", "Upload a file", files.create, returns=FileObject, form=UploadForm),
        Route("GET /v1/files", "List files", files.list, returns=FileList, query=["purpose", FILES_LIMIT, "after", ORDER]),
        Route(f"GET {_FILE}", "Get a file", files.get, returns=FileObject),
        Route(f"GET {_FILE}/content", "Read a file", files.content, returns=bytes, media_type=CONTENT_TYPE),
        Route(f"DELETE {_FILE}", "Delete a file", files.delete, returns=FileDeleted, more_statuses=in_use),
        Route("POST /v1/batches", "Begin a batch", batches.create, BatchBody, BatchObject),
        Route("GET /v1/batches", "List batches", batches.list, returns=BatchList, query=[LIMIT, "after"]),
        Route(f"GET {_BATCH}", "Get a batch", batches.get, returns=BatchObject),
        Route(f"POST {_BATCH}/cancel", "Cancel a batch", batches.cancel, returns=BatchObject, more_statuses=has_ended),
    ]
    return unless_disk_fails(routes)


API = Api(
    "OpenAI",
    _routes,
    refused=without_folder(
        *("POST /v1/files", "GET /v1/files", f"GET {_FILE}", f"GET {_FILE}/content", f"DELETE {_FILE}"),
        *("POST /v1/batches", "GET /v1/batches", f"GET {_BATCH}", f"POST {_BATCH}/cancel"),
    ),
)
