"""Puts the server's parts together: routes, layers, error handlers, OpenAPI document. Called once, by `server` or a test."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
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
from penstock.serve.texts.cohere import CohereEmbedBody, CohereFace
from penstock.serve.texts.endpoint import TextsEndpoint, by_field
from penstock.serve.texts.openai import EmbeddingsBody, EmbeddingsFace
from penstock.serve.texts.read import TextsReader
from penstock.serve.texts.rerank import RerankBody, RerankFace
from penstock.serve.texts.tei import EmbedBody, PredictBody, TeiFace, TeiRerankBody, TeiTokenizeBody
from penstock.serve.texts.vllm import ClassifyBody, PoolingBody, ScoreBody, VllmFace


def create_app(deployment: Deployment, config: ServerConfig) -> FastAPI:
    """The ASGI application over started models. Raises `ConfigError` if the key file is no use."""
    router = _router(deployment, config)
    app = FastAPI(
        title="Penstock",
        version=penstock.__version__,
        description="An OpenAI-compatible server for language models and encoders.",
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
    texts = TextsReader(deployment, config, ignored), TextsEndpoint(deployment, config, in_flight)
    rerank, vllm, tei = RerankFace(*texts), VllmFace(*texts), TeiFace(*texts)
    tokenize = by_field("inputs", tei.tokenize, tokens.tokenize, off_loop)
    any_rerank = by_field("texts", tei.rerank, rerank.rerank, off_loop)
    json_table: list[tuple[str, str, Sequence[type[Body]], JsonEndpoint]] = [
        ("/v1/completions", "Complete", [CompletionBody], CompletionsEndpoint(reader, in_flight, off_loop).create),
        ("/v1/chat/completions", "Chat", [ChatCompletionBody], ChatEndpoint(reader, in_flight, off_loop).create),
        ("/tokenize", "Tokenize", [TokenizeBody, TeiTokenizeBody], tokenize),
        ("/detokenize", "Detokenize", [DetokenizeBody], tokens.detokenize),
        ("/v1/embeddings", "Embed (OpenAI)", [EmbeddingsBody], EmbeddingsFace(*texts).create),
        ("/v1/rerank", "Rerank (Jina, Cohere)", [RerankBody], rerank.rerank),
        ("/v2/rerank", "Rerank (Cohere)", [RerankBody], rerank.rerank_v2),
        ("/rerank", "Rerank (Jina, Cohere, text-embeddings-inference)", [RerankBody, TeiRerankBody], any_rerank),
        ("/v2/embed", "Embed (Cohere)", [CohereEmbedBody], CohereFace(*texts).embed),
        ("/v1/score", "Score pairs", [ScoreBody], vllm.score),
        ("/score", "Score pairs", [ScoreBody], vllm.score),
        ("/classify", "Classify", [ClassifyBody], vllm.classify),
        ("/pooling", "A model's numbers", [PoolingBody], vllm.pooling),
        ("/embed", "Embed (text-embeddings-inference)", [EmbedBody], tei.embed),
        ("/predict", "Classify (text-embeddings-inference)", [PredictBody], tei.predict),
    ]
    for path, summary, body_types, endpoint in json_table:
        router.add_api_route(
            path,
            takes_json(endpoint),
            methods=["POST"],
            name=endpoint.__name__,
            summary=summary,
            description=endpoint.__doc__,
            openapi_extra=_described(body_types),
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
        ("GET", "/info", "The default model, for text-embeddings-inference's clients", tei.info),
        ("GET", "/metrics", "Metrics", status.metrics),
    ]
    for method, path, summary, answer in table:
        router.add_api_route(path, answer, methods=[method], summary=summary, response_model=None)
        if method == "GET":
            # HEAD answers as GET does (RFC 9110, 9.3.2), so the document needs no second description.
            router.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False, response_model=None)
    return router


_SCHEMAS = "#/components/schemas/"


def _described(body_types: Sequence[type[Body]]) -> dict[str, Any]:
    """The bodies that an operation takes, for the OpenAPI document."""
    refs = [{"$ref": f"{_SCHEMAS}{body_type.__name__}"} for body_type in body_types]
    schema: dict[str, Any] = refs[0] if len(refs) == 1 else {"anyOf": refs}
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
            bodies: list[type[Body]] = [
                *(CompletionBody, ChatCompletionBody, TokenizeBody, DetokenizeBody, EmbeddingsBody, RerankBody),
                *(CohereEmbedBody, ScoreBody, ClassifyBody, PoolingBody, EmbedBody, PredictBody, TeiRerankBody),
                TeiTokenizeBody,
            ]
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
