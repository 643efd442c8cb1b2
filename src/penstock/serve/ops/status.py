"""`/health`, `/ready`, `/version` and `/metrics`: what machines that run the server ask. Reads, never changes anything."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import Response

import penstock
from penstock.engine.loop import EngineState
from penstock.obs.metrics import Metrics
from penstock.serve.openai.errors import unavailable
from penstock.serve.runtime import Runtime


class StatusEndpoint:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def health(self) -> dict[str, Any]:
        """Alive: 503 only when a restart is the remedy."""
        state = self._runtime.engine.state
        if state in (EngineState.FAILED, EngineState.STOPPED):
            raise unavailable(f"The engine has {state}.")
        return {"status": "ok"}

    async def ready(self) -> dict[str, Any]:
        """Can take work: 503 while starting and draining, too."""
        state = self._runtime.engine.state
        if state is not EngineState.READY:
            raise unavailable(f"Not ready: the engine is {state}.")
        return {"status": "ready"}

    async def version(self) -> dict[str, Any]:
        return {"version": penstock.__version__}

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        # In a thread of asyncio's, where no text is worked on: it takes a millisecond, and first imports the Prometheus client.
        return await asyncio.to_thread(_render, self._runtime.metrics)


def _render(metrics: Metrics) -> Response:
    from penstock.obs.prometheus import CONTENT_TYPE, expose

    return Response(expose(metrics), headers={"content-type": CONTENT_TYPE})
