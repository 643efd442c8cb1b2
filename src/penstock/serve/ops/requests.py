"""`DELETE /v1/requests/{id}`: end what runs under an id. Only its owner (the same key and tenant) can."""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest

from penstock.serve.call import read_owner
from penstock.serve.openai.errors import request_not_found
from penstock.serve.service import Service

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


class RequestsEndpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def cancel(self, request_id: str, http: HttpRequest) -> dict[str, Any]:
        """Cancel a running request, by its `X-Request-Id` or by the `id` of its answer."""
        owner = read_owner(http.scope, self._service.config)
        # In this order, and only one of them: what a client named cmpl-x must not take another call's x with it.
        if not any(self._service.cancel(candidate, owner) for candidate in _candidates(request_id)):
            raise request_not_found(request_id)
        return {"id": request_id, "object": "request", "cancelled": True}


def _candidates(request_id: str) -> list[str]:
    """The id as it stands, and as it was before it became an answer's id."""
    return [request_id, *(request_id.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if request_id.startswith(prefix))]
