"""`/health`, `/ready`, `/load`, `/version` and `/metrics`: the state of the server."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, NotRequired

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

import penstock
from penstock.deploy.routes import stats_of
from penstock.deploy.running import RunningModel, ServedModel
from penstock.engine.state import EngineState
from penstock.machine import CpuMeter
from penstock.obs.signals import WINDOW_S
from penstock.serve.api import Parts
from penstock.serve.asking import find_allowed, may_ask, models_of, visible_models
from penstock.serve.errors import unavailable
from penstock.serve.shapes import Count, Status, Version
from penstock.types.plan import Capacity
from penstock.types.stats import AdapterCounts, AdapterStats, ReplicaLoad, RouteStats


class ModelLoad(TypedDict):
    name: str
    state: str
    requests_running: Count
    requests_waiting: Count
    requests_waiting_for_load: Count
    memory_bytes: Mapping[str, Count]
    machine_s: float
    last_used_s: float | None


class Replica(TypedDict):
    name: str
    address: str
    ready: bool
    requests_in_flight: Count
    requests_running: Count
    requests_waiting: Count
    tokens_left: Count
    kv_blocks_free: Count
    kv_blocks: Count
    silent_s: float


class Decision(TypedDict):
    age_s: float
    replicas: Count
    reason: str


Memory = TypedDict("Memory", {"limit_bytes": Count, "free_bytes": Count, "stuck_bytes": Count})


RouteTotals = TypedDict("RouteTotals", {"name": str, "usd": float | None, "saved_usd": float | None, "drift": float | None})


class Load(TypedDict):
    state: str
    server_load: Count
    requests_running: Count
    requests_waiting: Count
    requests_background: Count
    waiting_for: str | None
    kv_blocks_free: Count
    kv_blocks: Count
    kv_waste_ratio: float
    adapters: NotRequired[dict[str, Count]]
    sustained: dict[str, float]
    desired_replicas: Count
    replicas: NotRequired[list[Replica]]
    scaling: NotRequired[list[Decision]]
    settings: NotRequired[dict[str, Any]]
    capacity: NotRequired[dict[str, Count]]
    models: NotRequired[list[ModelLoad]]
    memory: NotRequired[Memory]
    routes: NotRequired[list[RouteTotals]]


class StatusEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._deployment, self._upstreams, self._batches = parts.deployment, parts.upstreams, parts.batches
        self._count_traces = parts.count_traces
        self._has_vllm_names = parts.config.metrics_compat == "vllm"
        self._cpu_meter = CpuMeter()

    async def health(self, _http: HttpRequest) -> Status:
        """Report whether the process is alive. 503 means that a restart of the process is needed."""
        for running in self._deployment.staying:
            state = running.engine.state
            if state in (EngineState.FAILED, EngineState.STOPPED):
                raise unavailable(f"The engine{self._of(running)} has {state}.")
        return {"status": "ok"}

    async def ready(self, _http: HttpRequest) -> Status:
        """Report whether the server takes requests: 503 while it or a model drains, a model restarts, or none can be loaded."""
        if self._deployment.is_closing:
            raise unavailable("Not ready: the server is shutting down.")
        if all(map(self._deployment.refusal, self._deployment.served)):  # ready afterwards: only a request tries again
            raise unavailable(f"Not ready: no model can be loaded. {self._deployment.default.failure}")
        for running in self._deployment.staying:
            state = running.engine.state
            if state is not EngineState.READY:
                raise unavailable(f"Not ready: the engine{self._of(running)} is {state}.")
        return {"status": "ready"}

    async def load(self, http: HttpRequest) -> Load:
        """Report the load of a model, now and over half a minute. `server_load` is vLLM's name.

        Without `model`, report the first model that the key allows, and list all allowed models with their memory. With
        `model`, also report its settings that differ from the defaults, and the resulting limits. Raises 404 if the key allows
        none.
        """
        name, deployment, scope = http.query_params.get("model"), self._deployment, http.scope
        first = next(visible_models(deployment, scope), None) if name is None else None
        served = find_allowed(name, deployment, scope)[0] if first is None else first[1]
        metrics = served.metrics
        now, sustained = metrics.read_load(), metrics.read_signals()
        waste = await asyncio.to_thread(metrics.read_waste)  # it may wait for the engine
        load: Load = {
            "state": served.state.value,
            "server_load": now.num_running + now.num_waiting,
            "requests_running": now.num_running,
            "requests_waiting": now.num_waiting,
            "requests_background": now.num_background,
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
        if metrics.read_adapters is not None and metrics.holds_adapters:
            load["adapters"] = _adapters(now.adapters, metrics.read_adapters())
        if metrics.read_replicas is not None:
            load["replicas"] = [_replica(one) for one in metrics.read_replicas()]
            load["scaling"] = [
                {"age_s": round(one.age_ns / 1e9, 1), "replicas": one.num_replicas, "reason": one.reason}
                for one in metrics.read_decisions()
            ]
        if name is not None and served.running is not None:
            load["settings"], load["capacity"] = dict(served.running.model.settings), capacity_of(served.running.model.capacity)
        if name is None:
            memory, now_ns = deployment.memory, deployment.clock.now_ns()
            if routes := [one for one in deployment.routes.values() if models_of(one, deployment, scope)]:
                load["routes"] = [_route(stats_of(one)) for one in routes]
            there = [one for one in deployment.served if one.is_there and may_ask(scope, one, one.name, deployment)]
            load["models"] = [_line(one, now_ns) for one in there]
            load["memory"] = {
                "limit_bytes": memory.total_bytes(),
                "free_bytes": max(0, memory.left_bytes()),
                "stuck_bytes": memory.stuck_bytes(),
            }
        return load

    def _of(self, running: RunningModel) -> str:
        """Return " of NAME" if several models are served, else an empty text."""
        return f" of {running.name}" if len(self._deployment.served) > 1 else ""

    async def version(self, _http: HttpRequest) -> Version:
        return {"version": penstock.__version__}

    async def metrics(self, http: HttpRequest) -> Response:
        """Return metrics in Prometheus' text format, or as OpenMetrics if the scraper accepts that."""
        upstreams = [one.stats() for one in self._upstreams.values()]
        routes = [stats_of(one) for one in self._deployment.routes.values()]
        batches = None if self._batches is None else self._batches.stats()
        traces = None if self._count_traces is None else self._count_traces()
        metrics = [served.metrics for served in self._deployment.served]
        is_open = "application/openmetrics-text" in http.headers.get("accept", "")

        def render() -> Response:
            from penstock.obs.prometheus import OPEN_METRICS, PLAIN, expose

            content_type = OPEN_METRICS if is_open else PLAIN
            times = self._cpu_meter.read()
            body = expose(
                *metrics,
                upstreams=upstreams,
                routes=routes,
                batches=batches,
                traces=traces,
                cpu_ns=None if times is None else {"running": times.run_ns, "waiting": times.wait_ns, "others": times.other_ns},
                process=True,
                vllm=self._has_vllm_names,
                content_type=content_type,
            )
            return Response(body, headers={"content-type": content_type})

        # It takes a millisecond, and the first call imports the Prometheus client.
        return await asyncio.to_thread(render)


def _route(stats: RouteStats) -> RouteTotals:
    paid = sum(stats.paid.values()) if stats.paid else None
    saved = None if paid is None else stats.full - paid
    drift = None if stats.drift is None else round(stats.drift, 4)
    return {"name": stats.name, "usd": paid, "saved_usd": saved, "drift": drift}


def capacity_of(capacity: Capacity) -> dict[str, int]:
    """Return the limits that the settings come to, as `/load` shows them."""
    return {
        "blocks": capacity.num_blocks - 1,
        "block_size": capacity.block_size,
        "rows": capacity.max_rows,
        "step_tokens": capacity.max_step_tokens,
        "model_len": capacity.max_model_len,
    }


def _adapters(pool: AdapterCounts, beside: AdapterStats) -> dict[str, int]:
    return {
        "running": pool.num_running,
        "kv_cache": pool.num_resident,
        "kv_blocks": pool.num_blocks,
        "memory": beside.num_in_memory,
        "memory_bytes": beside.num_bytes,
        "names": beside.num_registered,
    }


def _line(served: ServedModel, now_ns: int) -> ModelLoad:
    """Return the load of one model. `memory_bytes` is the memory that the model may use."""
    load, running = served.metrics.read_load(), served.running
    return {
        "name": served.name,
        "state": served.state.value,
        "requests_running": load.num_running,
        "requests_waiting": load.num_waiting,
        "requests_waiting_for_load": served.num_waiting,
        "memory_bytes": served.held_bytes,
        "machine_s": round(served.read_machine_ns() / 1e9, 3),
        "last_used_s": None if running is None else round(max(0, now_ns - running.uses.used_ns) / 1e9, 3),
    }


def _replica(one: ReplicaLoad) -> Replica:
    return {
        "name": one.name,
        "address": one.address,
        "ready": one.is_ready,
        "requests_in_flight": one.num_in_flight,
        "requests_running": one.load.num_running,
        "requests_waiting": one.load.num_waiting,
        "tokens_left": one.num_tokens_left,
        "kv_blocks_free": one.load.num_blocks_free + one.load.num_blocks_cached,
        "kv_blocks": one.load.num_blocks_total,
        "silent_s": round(one.silent_ns / 1e9, 3),
    }
