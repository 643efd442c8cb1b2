"""`/v1/requests`: the requests under an id, why they take as long as they do, and how to cancel them.

Only a request's owner (the same key and tenant) sees it.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request as HttpRequest
from starlette.responses import Response

from penstock.serve.errors import request_not_found, request_not_known
from penstock.serve.openai.in_flight import InFlight, Told
from penstock.serve.openai.terms import read_owner
from penstock.serve.ops.explanation import explanation
from penstock.serve.ops.json_answer import json_answer

_ANSWER_PREFIXES = ("chatcmpl-", "cmpl-")


class RequestsEndpoint:
    def __init__(self, in_flight: InFlight) -> None:
        self._in_flight = in_flight

    async def list(self, http: HttpRequest) -> Response:
        """The caller's requests that wait or run, the oldest first."""
        owner = read_owner(http.scope, self._in_flight.config)
        tell = self._in_flight.explain_running(owner)
        return await json_answer(lambda: {"object": "list", "data": [_call(told) for told in tell()]})

    async def explain(self, request_id: str, http: HttpRequest) -> Response:
        """Why a request takes, or took, as long as it does; by its `X-Request-Id` or by the `id` of its answer."""
        owner = read_owner(http.scope, self._in_flight.config)
        asks = [self._in_flight.explain(candidate, owner) for candidate in _candidates(request_id)]

        def make() -> dict[str, Any]:
            for tell in asks:
                if told := tell():
                    return _call(told)
            raise request_not_known(request_id)

        return await json_answer(make)

    async def cancel(self, request_id: str, http: HttpRequest) -> dict[str, Any]:
        """Cancel a running request, by its `X-Request-Id` or by the `id` of its answer."""
        owner = read_owner(http.scope, self._in_flight.config)
        # In this order, and only one of them: what a client named cmpl-x must not take another call's x with it.
        if not any(self._in_flight.cancel(candidate, owner) for candidate in _candidates(request_id)):
            raise request_not_found(request_id)
        return {"id": request_id, "object": "request", "cancelled": True}


def _call(told: Told) -> dict[str, Any]:
    choices = [explanation(choice, index) for index, choice in told.choices]
    return {
        "id": told.request_id,
        "object": "request",
        "created": told.created_unix_s,
        "summary": told.summary,
        "choices": choices,
        "forgotten_choices": told.num_forgotten,
    }


def _candidates(request_id: str) -> list[str]:
    """The id as it stands, and as it was before it became an answer's id."""
    return [request_id, *(request_id.removeprefix(prefix) for prefix in _ANSWER_PREFIXES if request_id.startswith(prefix))]
