"""Puts the server's parts together: routes, layers, error handlers, OpenAPI document. Called once, by `server` or a test."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.config import ServerConfig
from penstock.config.keys import api_keys
from penstock.deploy.running import RunningModel
from penstock.serve.http.checks import KeyRing, RequestChecks
from penstock.serve.http.routes import JsonRoutesLayer
from penstock.serve.openai.bodies import IgnoredParameters
from penstock.serve.openai.chat import ChatEndpoint
from penstock.serve.openai.completions import CompletionsEndpoint
from penstock.serve.openai.errors import from_http_exception
from penstock.serve.openai.models import ModelsEndpoint
from penstock.serve.openai.tokenize import TokenizeEndpoint
from penstock.serve.ops.docs_page import docs_page
from penstock.serve.ops.pool import PoolEndpoint
from penstock.serve.ops.requests import RequestsEndpoint
from penstock.serve.ops.status import StatusEndpoint
from penstock.serve.service import Service


def create_app(runtime: RunningModel, config: ServerConfig) -> FastAPI:
    """The ASGI application over a started runtime. Raises `ConfigError` if the key file is no use."""
    router = _router(runtime, Service(runtime, config))
    app = FastAPI(
        title="Penstock",
        version=penstock.__version__,
        description="An OpenAI-compatible server for language models.",
        middleware=_layers(runtime, config, router),
        exception_handlers={
            HTTPException: _http_exception_handler(router),
        },
        # FastAPI's own pages fetch their viewers from other hosts.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.include_router(router)
    app.openapi = _openapi_writer(app)  # type: ignore[method-assign]

    async def docs(_request: HttpRequest) -> Response:
        return docs_page(app.openapi())

    app.add_route("/docs", docs, include_in_schema=False)
    return app


def _layers(runtime: RunningModel, config: ServerConfig, router: APIRouter) -> list[Middleware]:
    """Outermost first. Plain ASGI, as every request passes through them."""
    keys = api_keys(config)
    ignored = IgnoredParameters() if config.ignore_unknown_parameters else None
    return [
        Middleware(
            RequestChecks,
            new_request_id=runtime.sources.new_request_id,
            keys=KeyRing(keys) if keys else None,
            max_body_bytes=config.max_body_bytes,
        ),
        Middleware(JsonRoutesLayer, routes=_api_routes(router), off_loop=runtime.off_loop, ignored=ignored),
    ]


def _router(runtime: RunningModel, service: Service) -> APIRouter:
    router = APIRouter()
    models, tokens, status = ModelsEndpoint(runtime.model), TokenizeEndpoint(runtime, service.config), StatusEndpoint(runtime)
    requests = RequestsEndpoint(service)
    table: list[tuple[str, str, str, Callable[..., Coroutine[Any, Any, Any]]]] = [
        ("POST", "/v1/completions", "Complete", CompletionsEndpoint(service).create),
        ("POST", "/v1/chat/completions", "Chat", ChatEndpoint(service).create),
        ("GET", "/v1/models", "List models", models.list),
        ("GET", "/v1/models/{model_id:path}", "Get a model", models.get),
        ("GET", "/v1/requests", "List your requests", requests.list),
        ("GET", "/v1/requests/{request_id:path}", "Why does it take so long?", requests.explain),
        ("DELETE", "/v1/requests/{request_id:path}", "Cancel a request", requests.cancel),
        ("POST", "/tokenize", "Tokenize", tokens.tokenize),
        ("POST", "/detokenize", "Detokenize", tokens.detokenize),
        ("GET", "/health", "Is it alive?", status.health),
        ("GET", "/ready", "Can it take work?", status.ready),
        ("GET", "/load", "How busy is it?", status.load),
        ("GET", "/kv", "What is in the KV cache?", PoolEndpoint(service).kv),
        ("GET", "/version", "Version", status.version),
        ("GET", "/metrics", "Metrics", status.metrics),
    ]
    for method, path, summary, endpoint in table:
        router.add_api_route(path, endpoint, methods=[method], summary=summary, response_model=None)
        if method == "GET":
            # What HEAD answers is known from GET (RFC 9110, 9.3.2), so the document needs no second description.
            router.add_api_route(path, endpoint, methods=["HEAD"], include_in_schema=False, response_model=None)
    return router


def _api_routes(router: APIRouter) -> list[APIRoute]:
    return [route for route in router.routes if isinstance(route, APIRoute)]


def _http_exception_handler(router: APIRouter) -> Callable[[HttpRequest, Exception], Coroutine[Any, Any, Response]]:
    async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Each of our routes has one method, and Starlette names that of the first which has the path (RFC 9110, 15.5.6: all).
        routes = _api_routes(router)
        methods = {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}
        if error.status_code == 405 and methods:
            error.headers = {"Allow": ", ".join(sorted(methods))}
        return from_http_exception(error, request.method, request.url.path).response()

    return on_http_exception


def _openapi_writer(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """FastAPI's document, with our error object in place of its 422, which we never answer."""

    def write() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            schemas["Error"] = _ERROR_SCHEMA
            for operation in (operation for path in document["paths"].values() for operation in path.values()):
                operation["responses"].pop("422", None)
                operation["responses"]["default"] = _ERROR_RESPONSE
            app.openapi_schema = document
        return app.openapi_schema

    return write


_NULLABLE_TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": _NULLABLE_TEXT,
                "code": {"type": "string"},
            },
        }
    },
}
_ERROR_RESPONSE = {
    "description": "What went wrong, as an OpenAI error object",
    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
}
