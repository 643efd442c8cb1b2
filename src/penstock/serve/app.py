"""Puts the server's parts together: the APIs' routes, layers, error handlers. Called once, by `server` or a test."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Set
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route as StarletteRoute

from penstock import fast_json
from penstock.calls.in_flight import InFlight
from penstock.config import ServerConfig
from penstock.config.keys import api_keys, check_never_keys
from penstock.deploy.deployment import Deployment
from penstock.serve.answering import finish_entry
from penstock.serve.anthropic.routes import API as ANTHROPIC
from penstock.serve.api import Api, Lifetime, Parts, Refused, Route
from penstock.serve.asking import Reader
from penstock.serve.bodies import IgnoredParameters
from penstock.serve.cards import FactsCache
from penstock.serve.cohere.routes import API as COHERE
from penstock.serve.errors import NO_RETRY, ApiError, from_http_exception, shorten, unavailable
from penstock.serve.http.checks import (
    OPEN_PATHS,
    JsonEndpoint,
    KeyRing,
    RequestChecks,
    Sender,
    headers_of,
    takes_json,
    use_words,
    words_of,
)
from penstock.serve.http.cors import Cors
from penstock.serve.http.entries import NotedRequests
from penstock.serve.http.request_log import RequestLog
from penstock.serve.jobs.routes import API as JOBS
from penstock.serve.llama_cpp.routes import api as llama_cpp
from penstock.serve.ollama.routes import API as OLLAMA
from penstock.serve.openai.read import read_chat
from penstock.serve.openai.routes import API as OPENAI
from penstock.serve.openai.schemas import ChatCompletionBody
from penstock.serve.openapi import Operation, write_document
from penstock.serve.ops.docs_page import docs_page
from penstock.serve.ops.page import PAGE_PATHS, page_routes
from penstock.serve.ops.routes import API as OPS
from penstock.serve.own_requests import OwnRequests
from penstock.serve.pipelines import PipelineFiller
from penstock.serve.questions import QuestionReader
from penstock.serve.responses.routes import API as RESPONSES
from penstock.serve.route_choice import RouteChooser
from penstock.serve.tei.routes import API as TEI
from penstock.serve.texts.endpoint import TextsEndpoint
from penstock.serve.tgi.routes import API as TGI
from penstock.serve.tracing import Tracer
from penstock.serve.verdicts import Verdicts
from penstock.serve.vllm.routes import API as VLLM
from penstock.serve.waiting import FolderWatch, Waits
from penstock.types.errors import ModelAway

if TYPE_CHECKING:  # with an HTTP client or a database, which few servers need
    from penstock.serve.jobs.runner import BatchRunner
    from penstock.serve.upstream import Upstream

_LLAMA_CPP = llama_cpp(read_chat, ChatCompletionBody)
APIS: Sequence[Api] = (OPENAI, RESPONSES, JOBS, ANTHROPIC, _LLAMA_CPP, TEI, COHERE, VLLM, OLLAMA, TGI, OPS)
"""All APIs. On a shared path, the first one with a true condition answers."""


def create_app(
    deployment: Deployment,
    config: ServerConfig,
    request_log: RequestLog | None = None,
    keys: KeyRing | None = None,
    apis: Sequence[Api] = APIS,
    tracer: Tracer | None = None,
) -> Starlette:
    """Return the ASGI application that serves started models. Raises `ConfigError` for unusable key files and origins."""
    in_flight = InFlight(config)
    reader = Reader(deployment, config, IgnoredParameters() if config.ignore_unknown_parameters else None)
    keys = keys or key_ring(config)
    admin_keys = KeyRing(config.admin_api_keys) if config.admin_api_keys else None
    own, lifetime = OwnRequests(partial(_sender, keys, admin_keys)), Lifetime()
    parts = Parts(
        deployment=deployment,
        config=config,
        in_flight=in_flight,
        reader=reader,
        texts=TextsEndpoint(reader, in_flight),
        folder=FolderWatch(deployment),
        facts=FactsCache(),
        upstreams=_upstreams(deployment, config),
        lifetime=lifetime,
        own=own,
        batches=_batches(deployment, config, own, lifetime),
        count_traces=None if tracer is None else tracer.counts,
    )
    operations = _operations(apis, parts)
    routes = [
        *_mount_routes(operations, parts),
        *(_refusal_route(refused) for api in apis for refused in api.refused),
        *_document_routes(operations, None if keys is None else OPEN_PATHS),
        *(page_routes() if config.page else (StarletteRoute("/", _no_page),)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            *_recording_middleware(deployment, request_log, tracer),
            Middleware(
                RequestChecks,
                new_request_id=deployment.sources.new_request_id,
                keys=keys,
                admin_keys=admin_keys,
                cors=Cors(config.allowed_origins) if config.allowed_origins else None,
                trusts_tenant=config.trust_tenant_header,
                more_open_paths=PAGE_PATHS if config.page else frozenset(),
                wordings=[api.wording for api in apis],
                max_body_bytes=config.max_body_bytes,
                max_upload_bytes=config.jobs_bytes,
            ),
        ],
        exception_handlers={HTTPException: _http_exception_handler(routes), ModelAway: _on_model_away},
    )
    app.router.redirect_slashes = False
    app.state.parts = parts
    if parts.batches is not None:
        # Last: the webhooks and the kept responses write to the store until they are closed.
        parts.lifetime.closes.append(parts.batches.close_store)
    own.app = app
    return app


def _recording_middleware(
    deployment: Deployment, request_log: RequestLog | None, tracer: Tracer | None
) -> Sequence[Middleware]:
    takers = [part.add for part in (request_log, tracer) if part is not None]
    if not takers:
        return []
    begin_trace, read_clock = None if tracer is None else tracer.begin, deployment.clock.now_ns
    return [Middleware(NotedRequests, read_clock=read_clock, takers=takers, finish=finish_entry, begin_trace=begin_trace)]


def _batches(deployment: Deployment, config: ServerConfig, own: OwnRequests, lifetime: Lifetime) -> BatchRunner | None:
    config.check_jobs()
    if config.jobs_dir is None:
        return None
    from penstock.jobs.store import Store
    from penstock.serve.jobs.runner import BatchRunner, read_hours

    hours = None if config.batch_hours is None else read_hours(config.batch_hours)
    if config.webhook_url is not None:
        from penstock.serve.jobs.webhooks import Webhooks, key_of

        key = key_of(config.webhook_url, config.webhook_secret or "")
    folder = Path(config.jobs_dir).expanduser()
    store = Store(folder, max_bytes=config.jobs_bytes, notes_events=config.webhook_url is not None)
    if config.webhook_url is not None:
        webhooks = Webhooks(store, config.webhook_url, key)
        lifetime.starts.append(webhooks.start)
        lifetime.closes.append(webhooks.close)
    batches = BatchRunner(store, deployment, own, max_line_bytes=config.max_body_bytes, hours=hours)
    lifetime.starts.append(batches.start)
    lifetime.stops.append(batches.close)
    return batches


def _sender(keys: KeyRing | None, admin_keys: KeyRing | None, name: str) -> Sender | None:
    """Return the rights of a key by its name, or None if there is no such key any more."""
    if admin_keys is not None and admin_keys.named(name) is not None:
        return Sender(is_admin=True, key_name=name)
    if keys is None:  # everybody may ask
        return Sender(is_admin=admin_keys is None)
    key = keys.named(name)
    return None if key is None else Sender(key=key, key_name=name)


def _upstreams(deployment: Deployment, config: ServerConfig) -> dict[str, Upstream]:
    if not deployment.upstreams:
        return {}
    check_never_keys(deployment.upstreams.values(), api_keys(config))
    import httpx2

    from penstock.serve.upstream import Upstream

    clock, off_loop = deployment.clock, deployment.off_loop
    tls = httpx2.create_ssl_context()  # it reads all certificates, which takes too long on the event loop
    return {name: Upstream(config, clock, off_loop, tls) for name, config in deployment.upstreams.items()}


def key_ring(config: ServerConfig) -> KeyRing | None:
    """Return the API keys that clients can use, or None if no key is needed. Raises `ConfigError`."""
    keys = api_keys(config)
    return KeyRing(keys) if keys else None


def _operations(apis: Sequence[Api], parts: Parts) -> list[Operation]:
    """Group the routes by method and path. The route without a condition comes last."""
    found: dict[tuple[str, str], list[tuple[Api, Route]]] = {}
    for api in apis:
        for route in api.routes(parts):
            for body_type in route.body_types:
                body_type.model_rebuild()  # now, and not in a request
            method, *paths = route.at.split()
            for path in paths:
                found.setdefault((method, path), []).append((api, route))
    for routes in found.values():
        routes.sort(key=lambda pair: pair[1].when is None)
    return [Operation(method, path, routes) for (method, path), routes in found.items()]


def _mount_routes(operations: Sequence[Operation], parts: Parts) -> list[StarletteRoute]:
    questions = QuestionReader(parts.reader, parts.texts.desk)
    verdicts = Verdicts(parts.reader, parts.in_flight)
    chooser = RouteChooser(parts.deployment, questions, verdicts, parts.upstreams)
    filler = PipelineFiller(questions, verdicts)
    waits = Waits(parts.deployment, parts.folder, parts.in_flight, chooser, filler, parts.upstreams)

    def mount(operation: Operation) -> StarletteRoute:
        api, base = operation.routes[-1]
        answer = waits.around(_conditional_endpoint(operation), loads=base.body is not None)
        if base.body is None:
            endpoint = _without_body(answer)
        else:
            of_any_type = api.takes_any_type and api.wording.owns(operation.path)
            endpoint = takes_json(answer, of_any_type=of_any_type)
        return StarletteRoute(operation.path, endpoint, methods=[operation.method])

    # Starlette takes the first path that matches, so `/v1/models/{model_id:path}` comes after `/v1/models/{name}/stats`.
    return [mount(operation) for operation in sorted(operations, key=lambda operation: _openness(operation.path))]


def _openness(path: str) -> tuple[bool, int, bool]:
    """Return a sort key: fixed paths first, then those with more fixed text; `:path` parameters last."""
    fixed = re.sub(r"{.*?}", "", path)
    return fixed != path, -len(fixed), ":path}" in path


def _conditional_endpoint(operation: Operation) -> JsonEndpoint:
    """Return an endpoint that runs the operation's first route with a true condition `when`, or else the last route."""
    _, base = operation.routes[-1]
    answer_base, others = _json_endpoint(base), [(api, route, _json_endpoint(route)) for api, route in operation.routes[:-1]]
    if not others:
        return answer_base

    async def answer(data: bytes, http: HttpRequest) -> Response:
        for api, route, answer_other in others:
            if route.when is not None and await route.when(data, http):
                use_words(http.scope, api.wording.words)
                return await answer_other(data, http)
        return await answer_base(data, http)

    return answer


def _json_endpoint(route: Route) -> JsonEndpoint:
    async def answer(data: bytes, http: HttpRequest) -> Response:
        value = await (route.answer(http) if route.body is None else route.answer(data, http))
        return value if isinstance(value, Response) else Response(fast_json.dumps(value), media_type="application/json")

    return answer


def _without_body(answer: JsonEndpoint) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(http: HttpRequest) -> Response:
        return await answer(b"", http)

    return endpoint


def _refusal_route(refused: Refused) -> StarletteRoute:
    async def refuse(http: HttpRequest) -> Response:
        message = f"{http.method} {shorten(http.url.path)} is not supported here. {refused.reason}"
        raise ApiError(refused.status, message, code=refused.code, headers=NO_RETRY)

    method, path = refused.at.split()
    return StarletteRoute(path, refuse, methods=[method])


def _document_routes(operations: Sequence[Operation], open_paths: Set[str] | None) -> list[StarletteRoute]:
    """Return the routes for /openapi.json and /docs. `open_paths`: see `write_document`."""

    @cache
    def document() -> dict[str, Any]:
        return write_document(operations, open_paths)

    async def openapi(_request: HttpRequest) -> Response:
        return Response(fast_json.dumps(document()), media_type="application/json")

    async def docs(_request: HttpRequest) -> Response:
        return docs_page(document())

    return [StarletteRoute("/openapi.json", openapi), StarletteRoute("/docs", docs)]


async def _no_page(request: HttpRequest) -> Response:
    """Answer 404 at `/` if the page is switched off, but 200 to HEAD: Ollama's clients probe the server in this way."""
    if request.method != "HEAD":
        raise HTTPException(404)
    return Response()


async def _on_model_away(request: HttpRequest, error: Exception) -> Response:
    """Answer 503 to a question about a model that is not loaded. Such questions do not load the model."""
    assert isinstance(error, ModelAway)
    return unavailable(f"The model {error.name} is not loaded.").response(words_of(request.scope))


def _http_exception_handler(
    routes: Sequence[StarletteRoute],
) -> Callable[[HttpRequest, Exception], Coroutine[Any, Any, Response]]:
    async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Each route has one method, and Starlette names that of the first with this path (RFC 9110, 15.5.6: all).
        methods = {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}
        if error.status_code == 405 and methods:
            error.headers = {"Allow": ", ".join(sorted(methods))}
            if b"sec-websocket-key" in headers_of(request.scope):
                message = "This server does not support WebSocket. Send a plain HTTP request."
                error = ApiError(426, message, code="websocket_not_supported", headers=error.headers | {"Upgrade": "HTTP/1.1"})
        return from_http_exception(error, request.method, request.url.path).response(words_of(request.scope))

    return on_http_exception
