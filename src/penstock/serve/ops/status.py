"""`/health`, `/ready`, `/load`, `/version` and `/metrics`: questions of the programs that run the server. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import Response

import penstock
from penstock.deploy.running import Deployment, RunningModel
from penstock.engine.thread import EngineState
from penstock.obs.metrics import Metrics
from penstock.obs.signals import WINDOW_S
from penstock.serve.errors import unavailable
from penstock.serve.openai.read import find_model


class StatusEndpoint:
    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    async def health(self) -> dict[str, Any]:
        """Is the process alive? 503 only when a restart of the process is the remedy for one of its models."""
        for running in self._deployment.models:
            state = running.engine.state
            if state in (EngineState.FAILED, EngineState.STOPPED):
                raise unavailable(f"The engine{self._of(running)} has {state}.")
        return {"status": "ok"}

    async def ready(self) -> dict[str, Any]:
        """Can the server take work for every model? 503 while one starts, drains or is made anew, too."""
        for running in self._deployment.models:
            state = running.engine.state
            if state is not EngineState.READY:
                raise unavailable(f"Not ready: the engine{self._of(running)} is {state}.")
        return {"status": "ready"}

    async def load(self, model: str | None = None) -> dict[str, Any]:
        """How busy is a model, now and sustained over half a minute? `server_load` is vLLM's name."""
        metrics = find_model(model, self._deployment).metrics
        now, sustained = metrics.read_load(), metrics.read_signals()
        waste = await asyncio.to_thread(metrics.read_waste)  # may wait for the engine's thread
        return {
            "server_load": now.num_running + now.num_waiting,
            "requests_running": now.num_running,
            "requests_waiting": now.num_waiting,
            "waiting_for": now.waits_for.value or None,
            "kv_blocks_free": now.num_blocks_free + now.num_blocks_cached,
            "kv_blocks": now.num_blocks_total,
            "kv_waste_ratio": round(waste, 5),
            "sustained": {
                "window_s": WINDOW_S,
                "queue_depth": round(sustained.queue_depth, 3),
                "queue_delay_s": round(sustained.queue_delay_s, 3),
                "utilisation": round(sustained.utilisation, 4),
                "kv_headroom": round(sustained.kv_headroom, 4),
                "arrivals_per_s": round(sustained.arrivals_per_s, 3),
                "drain_rate": round(sustained.drain_rate, 3),
            },
            "desired_replicas": sustained.desired_replicas,
        }

    def _of(self, running: RunningModel) -> str:
        """The model's name, where it is not the only one."""
        return f" of {running.name}" if len(self._deployment.models) > 1 else ""

    async def version(self) -> dict[str, Any]:
        return {"version": penstock.__version__}

    async def metrics(self) -> Response:
        """Prometheus' text format."""
        # In a thread of asyncio's, where no text is worked on: it takes a millisecond, and first imports the Prometheus client.
        return await asyncio.to_thread(_render, [running.metrics for running in self._deployment.models])


def _render(metrics: Sequence[Metrics]) -> Response:
    from penstock.obs.prometheus import CONTENT_TYPE, expose

    return Response(expose(*metrics), headers={"content-type": CONTENT_TYPE})
