"""OpenAI's files and batches: `/v1/files` and `/v1/batches`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, PlainText, Route
from penstock.serve.jobs.batches import BatchBody, BatchesEndpoint, BatchList, BatchObject
from penstock.serve.jobs.files import FileDeleted, FileList, FileObject, FilesEndpoint


def _routes(parts: Parts) -> Sequence[Route]:
    files, batches, one = FilesEndpoint(parts), BatchesEndpoint(parts), "/v1/files/{file_id}"
    return [
        Route("POST /v1/files", "Upload a file", files.create, returns=FileObject),
        Route("GET /v1/files", "List files", files.list, returns=FileList, query="purpose limit after order"),
        Route(f"GET {one}", "Get a file", files.get, returns=FileObject),
        Route(f"GET {one}/content", "Read a file", files.content, returns=PlainText),
        Route(f"DELETE {one}", "Delete a file", files.delete, returns=FileDeleted),
        Route("POST /v1/batches", "Begin a batch", batches.create, BatchBody, BatchObject),
        Route("GET /v1/batches", "List batches", batches.list, returns=BatchList, query="limit after"),
        Route("GET /v1/batches/{batch_id}", "Get a batch", batches.get, returns=BatchObject),
        Route("POST /v1/batches/{batch_id}/cancel", "Cancel a batch", batches.cancel, returns=BatchObject),
    ]


API = Api("OpenAI", _routes)
