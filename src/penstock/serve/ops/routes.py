"""Penstock's own routes, for the programs and people that run the server."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.ops.models import LifeEndpoint, LoadModelBody, UnloadModelBody, Updated
from penstock.serve.ops.pool import Pool, PoolEndpoint
from penstock.serve.ops.requests import ENDED, Request, RequestCancelled, RequestList, RequestsEndpoint
from penstock.serve.ops.status import Load, StatusEndpoint
from penstock.serve.ops.trace import SECONDS, TraceEndpoint
from penstock.serve.shapes import Object, Status, Success, Version


def _routes(parts: Parts) -> Sequence[Route]:
    status, requests = StatusEndpoint(parts), RequestsEndpoint(parts.in_flight)
    pool, life = PoolEndpoint(parts.deployment, parts.in_flight), LifeEndpoint(parts)
    trace = TraceEndpoint(parts.deployment)
    parts.lifetime.stops.append(trace.stop)
    by_id, accepted = "/v1/requests/{request_id:path}", {202: "The model will be loaded"}
    return [
        Route("POST /models/load", "Load a model", life.load, LoadModelBody, Success, more_statuses=accepted),
        Route("POST /models/unload", "Unload a model", life.unload, UnloadModelBody, Success),
        Route("POST /cluster/update", "Apply a changed configuration", life.update, returns=Updated),
        Route("GET /v1/requests", "List your requests", requests.list, returns=RequestList, query=[ENDED]),
        Route(f"GET {by_id}", "Explain a request's timing", requests.explain, returns=Request),
        Route(f"DELETE {by_id}", "Cancel a request", requests.cancel, returns=RequestCancelled),
        Route("GET /health", "Check liveness", status.health, returns=Status),
        Route("GET /ready", "Check readiness", status.ready, returns=Status),
        Route("GET /load", "Report the load", status.load, returns=Load, query=["model"]),
        Route("GET /kv", "Map the KV cache", pool.kv, returns=Pool, query=["model"]),
        Route(
            "GET /debug/trace",
            "Trace the engine's steps",
            trace.trace,
            returns=Object,
            query=["model", SECONDS],
            more_statuses={403: "The key is not an admin's", 409: "Another trace is being taken"},
        ),
        Route("GET /version", "Version", status.version, returns=Version),
        Route("GET /metrics", "Metrics", status.metrics, returns=str, media_type="text/plain"),
    ]


API = Api("", _routes)
