"""Puts the server's parts together: routes, layers, error handlers, OpenAPI document. Called once, by `server` or a test."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.encoders import jsonable_encoder
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

import penstock
from penstock.config import ServerConfig
from penstock.config.keys import api_keys
from penstock.deploy.running import Deployment
from penstock.serve.errors import from_http_exception
from penstock.serve.http.checks import JsonEndpoint, KeyRing, RequestChecks, takes_json
from penstock.serve.openai.endpoints import ChatEndpoint, CompletionsEndpoint, ModelsEndpoint
from penstock.serve.openai.in_flight import InFlight
from penstock.serve.openai.read import Reader
from penstock.serve.openai.schemas import Body, ChatCompletionBody, CompletionBody, IgnoredParameters
from penstock.serve.openai.tokenize import DetokenizeBody, TokenizeBody, TokenizeEndpoint
from penstock.serve.ops.docs_page import docs_page
from penstock.serve.ops.pool import PoolEndpoint
from penstock.serve.ops.requests import RequestsEndpoint
from penstock.serve.ops.status import StatusEndpoint


def create_app(deployment: Deployment, config: ServerConfig) -> FastAPI:
    """The ASGI application over started models. Raises `ConfigError` if the key file is no use."""
    router = _router(deployment, config)
    app = FastAPI(
        title="Penstock",
        version=penstock.__version__,
        description="An OpenAI-compatible server for language models.",
        middleware=[
            Middleware(
                RequestChecks,
                new_request_id=deployment.default.sources.new_request_id,
                keys=KeyRing(keys) if (keys := api_keys(config)) else None,
                max_body_bytes=config.max_body_bytes,
            )
        ],
        exception_handlers={HTTPException: _http_exception_handler(router)},
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


def _router(deployment: Deployment, config: ServerConfig) -> APIRouter:
    router = APIRouter()
    in_flight = InFlight(deployment, config)
    ignored = IgnoredParameters() if config.ignore_unknown_parameters else None
    reader, tokens = Reader(deployment, config, ignored), TokenizeEndpoint(deployment, config, ignored)
    off_loop = deployment.default.off_loop
    json_table: list[tuple[str, str, type[Body], JsonEndpoint]] = [
        ("/v1/completions", "Complete", CompletionBody, CompletionsEndpoint(reader, in_flight, off_loop).create),
        ("/v1/chat/completions", "Chat", ChatCompletionBody, ChatEndpoint(reader, in_flight, off_loop).create),
        ("/tokenize", "Tokenize", TokenizeBody, tokens.tokenize),
        ("/detokenize", "Detokenize", DetokenizeBody, tokens.detokenize),
    ]
    for path, summary, body_type, endpoint in json_table:
        router.add_api_route(
            path,
            takes_json(endpoint),
            methods=["POST"],
            name=endpoint.__name__,
            summary=summary,
            description=endpoint.__doc__,
            openapi_extra=_described(body_type),
            response_model=None,
        )
    models, status, requests = ModelsEndpoint(deployment), StatusEndpoint(deployment), RequestsEndpoint(in_flight)
    table: list[tuple[str, str, str, Callable[..., Coroutine[Any, Any, Any]]]] = [
        ("GET", "/v1/models", "List models", models.list),
        ("GET", "/v1/models/{model_id:path}", "Get a model", models.get),
        ("GET", "/v1/requests", "List your requests", requests.list),
        ("GET", "/v1/requests/{request_id:path}", "Why does it take so long?", requests.explain),
        ("DELETE", "/v1/requests/{request_id:path}", "Cancel a request", requests.cancel),
        ("GET", "/health", "Is it alive?", status.health),
        ("GET", "/ready", "Can it take work?", status.ready),
        ("GET", "/load", "How busy is it?", status.load),
        ("GET", "/kv", "What is in the KV cache?", PoolEndpoint(deployment, in_flight).kv),
        ("GET", "/version", "Version", status.version),
        ("GET", "/metrics", "Metrics", status.metrics),
    ]
    for method, path, summary, answer in table:
        router.add_api_route(path, answer, methods=[method], summary=summary, response_model=None)
        if method == "GET":
            # HEAD answers as GET does (RFC 9110, 9.3.2), so the document needs no second description.
            router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False, response_model=None)
    return router


_SCHEMAS = "#/components/schemas/"


def _described(body_type: type[Body]) -> dict[str, Any]:
    """The body that an operation takes, for the OpenAPI document."""
    schema = {"$ref": f"{_SCHEMAS}{body_type.__name__}"}
    return {"requestBody": {"content": {"application/json": {"schema": schema}}, "required": True}}


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
    """FastAPI's document, with the bodies that it does not read itself, and the error object of every route."""

    def write() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            bodies: list[type[Body]] = [CompletionBody, ChatCompletionBody, TokenizeBody, DetokenizeBody]
            _, described = models_json_schema([(body, "validation") for body in bodies], ref_template=_SCHEMAS + "{model}")
            schemas |= jsonable_encoder(described["$defs"], exclude_none=True) | {"Error": _ERROR_SCHEMA}
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
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
