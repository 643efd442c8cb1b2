"""Puts the server's parts together: routes, layers, error handlers, OpenAPI document. Called once, by `server` or a test."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.config import ServerConfig
from penstock.serve.auth import AuthLayer, KeyRing
from penstock.serve.cross_site import CrossSiteLayer
from penstock.serve.keys import api_keys
from penstock.serve.limits import BodyLimitLayer
from penstock.serve.off_loop import OffLoop
from penstock.serve.openai.bodies import read_body, refuse_encoding
from penstock.serve.openai.chat import ChatEndpoint
from penstock.serve.openai.completions import CompletionsEndpoint
from penstock.serve.openai.errors import from_http_exception, from_rejected, not_an_object
from penstock.serve.openai.models import ModelsEndpoint
from penstock.serve.openai.schemas import Body
from penstock.serve.openai.tokenize import TokenizeEndpoint
from penstock.serve.ops.docs_page import docs_page
from penstock.serve.ops.pool import PoolEndpoint
from penstock.serve.ops.requests import RequestsEndpoint
from penstock.serve.ops.status import StatusEndpoint
from penstock.serve.request_id import RequestIdLayer
from penstock.serve.runtime import Runtime
from penstock.serve.service import Service
from penstock.types.errors import Rejected


def create_app(runtime: Runtime, config: ServerConfig) -> FastAPI:
    """The ASGI application over a started runtime. Raises `ConfigError` if the key file is no use."""
    router = _router(runtime, Service(runtime, config))
    app = FastAPI(
        title="Penstock",
        version=penstock.__version__,
        description="An OpenAI-compatible server for language models.",
        middleware=_layers(runtime, config),
        exception_handlers={
            RequestValidationError: _on_no_json,
            Rejected: _on_rejected,
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


def _layers(runtime: Runtime, config: ServerConfig) -> list[Middleware]:
    """Outermost first. Plain ASGI, as every token passes through them."""
    keys = api_keys(config)
    return [
        Middleware(RequestIdLayer, new_request_id=runtime.sources.new_request_id),
        Middleware(AuthLayer, keys=KeyRing(keys)) if keys else Middleware(CrossSiteLayer),
        Middleware(BodyLimitLayer, max_body_bytes=config.max_body_bytes),
    ]


def _router(runtime: Runtime, service: Service) -> APIRouter:
    # A body without a content type is read as JSON; one with another type is refused.
    router = APIRouter(route_class=_json_route(runtime.off_loop), strict_content_type=False)
    models, tokens, status = ModelsEndpoint(runtime.model), TokenizeEndpoint(runtime), StatusEndpoint(runtime)
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


class _JsonRequest(HttpRequest):
    """Its JSON is the checked body already: FastAPI, which would check it on the event loop, has nothing left to do."""

    def __init__(self, request: HttpRequest, body_type: type[Body], off_loop: OffLoop) -> None:
        super().__init__(request.scope, request.receive)
        self._body_type = body_type
        self._off_loop = off_loop

    async def json(self) -> Any:
        return await read_body(await self.body(), self._body_type, self._off_loop)


def _json_route(off_loop: OffLoop) -> type[APIRoute]:
    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if self.body_field is None:
                return handle
            body_type = self.body_field.field_info.annotation
            assert isinstance(body_type, type)
            assert issubclass(body_type, Body)

            async def handle_json(request: HttpRequest) -> Response:
                refuse_encoding(request.scope)
                return await handle(_JsonRequest(request, body_type, off_loop))

            return handle_json

    return JsonRoute


async def _on_no_json(_request: HttpRequest, _error: Exception) -> Response:
    """A body that FastAPI has not asked `_JsonRequest` for: none, or one of another type."""
    return not_an_object().response()


async def _on_rejected(_request: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, Rejected)
    return from_rejected(error).response()


def _http_exception_handler(router: APIRouter) -> Callable[[HttpRequest, Exception], Coroutine[Any, Any, Response]]:
    async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Each of our routes has one method, and Starlette names that of the first which has the path (RFC 9110, 15.5.6: all).
        routes = [route for route in router.routes if isinstance(route, APIRoute)]
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
