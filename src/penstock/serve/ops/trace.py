"""`GET /debug/trace`, for admins: a model's next steps, for https://ui.perfetto.dev."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock.deploy.deployment import Deployment
from penstock.obs.explain.journal import Journal
from penstock.obs.perfetto import document
from penstock.serve.asking import find_for_admin
from penstock.serve.errors import ApiError, invalid
from penstock.serve.http.checks import require_admin, unless_gone
from penstock.serve.paging import Parameter

MAX_SECONDS = 60
SECONDS = Parameter(
    "seconds", Annotated[float, Field(gt=0, le=MAX_SECONDS)], 5.0, f"a number above 0 and at most {MAX_SECONDS}"
)


class TraceEndpoint:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        self._is_busy = False
        self._is_stopping = asyncio.Event()

    async def stop(self) -> None:
        """End the trace early, so that the shutdown need not wait for it."""
        self._is_stopping.set()

    async def trace(self, http: HttpRequest) -> Response:
        """Record a model's steps and the requests in them for `seconds` (default 5, at most 60), and return the trace.

        Only one trace is recorded at a time.
        """
        require_admin(http.scope)
        seconds = SECONDS.read(http)
        running = find_for_admin(http.query_params.get("model"), self._deployment).answerer()
        journal = running.journal
        if not isinstance(journal, Journal):
            why = ": --explained-requests is 0" if journal is None else " here: it runs on replicas"
            raise invalid(f"{running.name} can't be traced{why}.", "model")
        if self._is_busy:
            raise ApiError(409, "Another trace is being taken.", code="trace_running", error_type="invalid_request_error")
        self._is_busy = True
        try:
            with journal.watched(running.clock.now_ns) as window, suppress(TimeoutError):
                await unless_gone(http, asyncio.wait_for(self._is_stopping.wait(), seconds))
            data = await asyncio.to_thread(lambda: "".join(document(window.events(running.name))).encode())
        finally:
            self._is_busy = False
        headers = {"X-Trace-Cut": "true"} if window.is_cut else None
        return Response(data, media_type="application/json", headers=headers)
