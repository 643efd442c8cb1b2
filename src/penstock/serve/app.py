"""Puts the server's parts together: operations, layers, error handlers. Called once, by `server` or a test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence, Set
from functools import cache, partial
from types import MappingProxyType
from typing import Any

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.calls.in_flight import InFlight
from penstock.config import ServerConfig
from penstock.config.keys import api_keys
from penstock.deploy.deployment import Deployment
from penstock.serve.anthropic.endpoints import AnthropicModels, MessagesEndpoint
from penstock.serve.anthropic.read import MessagesReader
from penstock.serve.anthropic.schemas import CountTokensBody, MessagesBody
from penstock.serve.anthropic.write import anthropic_words
from penstock.serve.bodies import Body, IgnoredParameters
from penstock.serve.cards import ModelCards, ModelsEndpoint
from penstock.serve.cohere.chat import CohereChat, CohereChatBody
from penstock.serve.cohere.write import cohere_words
from penstock.serve.errors import ApiError, ErrorWords, from_http_exception, unavailable
from penstock.serve.http.access_log import AccessLog, LoggedRequests
from penstock.serve.http.checks import OPEN_PATHS, JsonEndpoint, KeyRing, RequestChecks, headers_of, takes_json, words_of
from penstock.serve.http.cors import Cors
from penstock.serve.llama_cpp.endpoints import LLAMA_PATHS, LlamaFace, LlamaTokenizeBody
from penstock.serve.llama_cpp.read import LlamaCompletionBody, LlamaInfillBody
from penstock.serve.llama_cpp.status import ABSENT, LlamaStatus, tell_absent
from penstock.serve.llama_cpp.texts import LlamaEmbeddingBody, LlamaTexts
from penstock.serve.llama_cpp.write import llama_words
from penstock.serve.loading import AdapterLooks, FolderWatch, when_loaded
from penstock.serve.ollama.answers import OllamaFace
from penstock.serve.ollama.models import REFUSED, OllamaModels, OllamaPullBody, OllamaShowBody, refuse
from penstock.serve.ollama.read import OllamaChatBody, OllamaGenerateBody
from penstock.serve.ollama.read import error_words as ollama_words
from penstock.serve.ollama.texts import OllamaEmbedBody, OllamaEmbeddingsBody, OllamaTexts
from penstock.serve.openai.adapters import AdaptersEndpoint, LoadAdapterBody, UnloadAdapterBody
from penstock.serve.openai.endpoints import CallEndpoint, ChatEndpoint, CompletionsEndpoint
from penstock.serve.openai.read import Reader
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody
from penstock.serve.openai.tokenize import DetokenizeBody, TokenizeBody, TokenizeEndpoint
from penstock.serve.openapi import Endpoint, Operation, write_document
from penstock.serve.ops.docs_page import docs_page
from penstock.serve.ops.models import LifeEndpoint, LoadModelBody, UnloadModelBody
from penstock.serve.ops.page import PAGE_PATHS, page_routes
from penstock.serve.ops.pool import PoolEndpoint
from penstock.serve.ops.requests import RequestsEndpoint
from penstock.serve.ops.status import StatusEndpoint
from penstock.serve.responses.endpoint import ResponsesEndpoint, refuse_compaction
from penstock.serve.responses.schemas import ResponsesBody
from penstock.serve.texts.cohere import CohereEmbedBody, CohereFace
from penstock.serve.texts.endpoint import TextsEndpoint, by_field
from penstock.serve.texts.openai import EmbeddingsBody, EmbeddingsFace
from penstock.serve.texts.read import TextsReader
from penstock.serve.texts.rerank import RerankBody, RerankFace
from penstock.serve.texts.tei import TEI_PATHS, EmbedBody, PredictBody, TeiFace, TeiRerankBody, TeiTokenizeBody, tei_words
from penstock.serve.texts.vllm import ClassifyBody, PoolingBody, ScoreBody, VllmFace
from penstock.serve.tgi.generate import TgiBody, TgiFace, tgi_words
from penstock.types.errors import ModelAway

_ERROR_WORDS: Mapping[str, ErrorWords] = MappingProxyType(
    {
        "/v1/messages": anthropic_words,
        "/v1/messages/count_tokens": anthropic_words,
        **dict.fromkeys(LLAMA_PATHS, llama_words),
        "/api/": ollama_words,
        "/v2/chat": cohere_words,
        **dict.fromkeys(("/", "/generate", "/generate_stream"), tgi_words),
        **dict.fromkeys(TEI_PATHS, tei_words),
    }
)
"""Paths, and beginnings of paths, whose errors are told in the words of another API than OpenAI's."""


_Answer = Callable[[HttpRequest], Awaitable[Any]]
"""Answers a route that takes no body."""


def create_app(
    deployment: Deployment, config: ServerConfig, access_log: AccessLog | None = None, keys: KeyRing | None = None
) -> Starlette:
    """The ASGI application over started models. Raises `ConfigError` for key files and origins that are no use."""
    operations = _operations(deployment, config)
    keys = keys or key_ring(config)
    routes = [
        *(Route(operation.path, operation.endpoint, methods=[operation.method]) for operation in operations),
        *(Route(path, answers(refuse), methods=[method]) for method, path in REFUSED),
        *(Route(path, answers(tell_absent), methods=[method]) for method, path in ABSENT),
        Route("/v1/responses/compact", answers(refuse_compaction), methods=["POST"]),
        *_described(operations, None if keys is None else OPEN_PATHS),
        *(page_routes() if config.page else (Route("/", _no_page),)),
    ]
    app = Starlette(
        routes=routes,
        middleware=[
            *([Middleware(LoggedRequests, log=access_log)] if access_log else []),
            Middleware(
                RequestChecks,
                new_request_id=deployment.sources.new_request_id,
                keys=keys,
                admin_keys=KeyRing(config.admin_api_keys) if config.admin_api_keys else None,
                cors=Cors(config.allowed_origins) if config.allowed_origins else None,
                more_open_paths=PAGE_PATHS if config.page else frozenset(),
                error_words=_ERROR_WORDS,
                anthropic_words=anthropic_words,
                max_body_bytes=config.max_body_bytes,
            ),
        ],
        exception_handlers={HTTPException: _http_exception_handler(routes), ModelAway: _on_model_away},
    )
    app.router.redirect_slashes = False
    return app


def key_ring(config: ServerConfig) -> KeyRing | None:
    """The keys that open the server; None if it asks for none. Raises `ConfigError`."""
    keys = api_keys(config)
    return KeyRing(keys) if keys else None


def _operations(deployment: Deployment, config: ServerConfig) -> list[Operation]:
    in_flight = InFlight(config)
    ignored = IgnoredParameters() if config.ignore_unknown_parameters else None
    reader, tokens = Reader(deployment, config, ignored), TokenizeEndpoint(deployment, config, ignored)
    folder, looked_up = FolderWatch(deployment), AdapterLooks(deployment).when_looked_up
    off_loop, lora = deployment.off_loop, AdaptersEndpoint(deployment, ignored)
    messages = MessagesEndpoint(
        CallEndpoint(reader, in_flight, off_loop), MessagesReader(reader, deployment, ignored), config, off_loop
    )
    cards = ModelCards()
    ollama, ollama_models = (
        OllamaFace(reader, in_flight, off_loop, deployment),
        OllamaModels(deployment, folder, cards, ignored),
    )
    texts = TextsReader(deployment, config, ignored), TextsEndpoint(deployment, config, in_flight)
    ollama_texts = OllamaTexts(*texts, deployment)
    rerank, vllm, tei = RerankFace(*texts), VllmFace(*texts), TeiFace(*texts)
    llama, llama_status = LlamaFace(reader, in_flight, off_loop, deployment, config), LlamaStatus(deployment, in_flight, cards)
    llama_texts, openai_texts = LlamaTexts(*texts), EmbeddingsFace(*texts)
    tgi, cohere_chat = TgiFace(reader, in_flight, off_loop), CohereChat(reader, in_flight, off_loop)
    tokenize = by_field("inputs", tei.tokenize, tokens.tokenize, off_loop)
    tokenize = by_field("content", llama.tokenize, tokenize, off_loop)
    any_embeddings = by_field("content", llama_texts.embedding, openai_texts.create, off_loop)
    any_rerank = by_field("texts", tei.rerank, rerank.rerank, off_loop)
    root = tei.root(tgi.root)
    responses = ResponsesEndpoint(reader, in_flight, off_loop, config, deployment.clock)
    with_body: list[tuple[str, str, Sequence[type[Body]], JsonEndpoint]] = [
        ("/v1/completions", "Complete", [CompletionBody], CompletionsEndpoint(reader, in_flight, off_loop).create),
        ("/v1/chat/completions", "Chat", [ChatCompletionBody], ChatEndpoint(reader, in_flight, off_loop).create),
        ("/completions", "Complete", [CompletionBody], CompletionsEndpoint(reader, in_flight, off_loop).create),
        ("/chat/completions", "Chat", [ChatCompletionBody], ChatEndpoint(reader, in_flight, off_loop).create),
        ("/embeddings", "Embed (OpenAI, llama.cpp)", [EmbeddingsBody, LlamaEmbeddingBody], any_embeddings),
        ("/v1/messages", "Chat (Anthropic)", [MessagesBody], messages.create),
        ("/v1/messages/count_tokens", "Count tokens (Anthropic)", [CountTokensBody], messages.count),
        ("/v1/responses", "Respond", [ResponsesBody], responses.create),
        ("/responses", "Respond", [ResponsesBody], responses.create),
        ("/v1/load_lora_adapter", "Load an adapter", [LoadAdapterBody], lora.load),
        ("/v1/unload_lora_adapter", "Forget an adapter", [UnloadAdapterBody], lora.unload),
        ("/tokenize", "Tokenize", [TokenizeBody, TeiTokenizeBody, LlamaTokenizeBody], tokenize),
        ("/detokenize", "Detokenize", [DetokenizeBody], tokens.detokenize),
        ("/v1/embeddings", "Embed (OpenAI)", [EmbeddingsBody], openai_texts.create),
        ("/v1/rerank", "Rerank (Jina, Cohere)", [RerankBody], rerank.rerank),
        ("/v2/rerank", "Rerank (Cohere)", [RerankBody], rerank.rerank_v2),
        ("/rerank", "Rerank (Jina, Cohere, text-embeddings-inference)", [RerankBody, TeiRerankBody], any_rerank),
        ("/v2/chat", "Chat (Cohere)", [CohereChatBody], cohere_chat.chat),
        ("/v2/embed", "Embed (Cohere)", [CohereEmbedBody], CohereFace(*texts).embed),
        ("/v1/score", "Score pairs", [ScoreBody], vllm.score),
        ("/score", "Score pairs", [ScoreBody], vllm.score),
        ("/classify", "Classify", [ClassifyBody], vllm.classify),
        ("/pooling", "A model's numbers", [PoolingBody], vllm.pooling),
        ("/embed", "Embed (text-embeddings-inference)", [EmbedBody], tei.embed),
        ("/api/chat", "Chat (Ollama)", [OllamaChatBody], ollama.chat),
        ("/api/generate", "Complete (Ollama)", [OllamaGenerateBody], ollama.generate),
        ("/api/embed", "Embed (Ollama)", [OllamaEmbedBody], ollama_texts.embed),
        ("/api/embeddings", "Embed one text (Ollama)", [OllamaEmbeddingsBody], ollama_texts.embeddings),
        ("/api/show", "What a model is (Ollama)", [OllamaShowBody], ollama_models.show),
        ("/api/pull", "Is a model here? (Ollama)", [OllamaPullBody], ollama_models.pull),
        ("/completion", "Complete (llama.cpp)", [LlamaCompletionBody], llama.completion),
        ("/infill", "Fill in the middle (llama.cpp)", [LlamaInfillBody], llama.infill),
        ("/v1/chat/completions/input_tokens", "Count a chat's tokens (llama.cpp)", [ChatCompletionBody], llama.input_tokens),
        ("/chat/completions/input_tokens", "Count a chat's tokens (llama.cpp)", [ChatCompletionBody], llama.input_tokens),
        ("/apply-template", "Make a prompt of a chat (llama.cpp)", [ChatCompletionBody], llama.apply_template),
        ("/embedding", "Embed (llama.cpp)", [LlamaEmbeddingBody], llama_texts.embedding),
        ("/predict", "Classify (text-embeddings-inference)", [PredictBody], tei.predict),
        ("/generate", "Complete (text-generation-inference)", [TgiBody], tgi.generate),
        ("/generate_stream", "Complete as a stream (text-generation-inference)", [TgiBody], tgi.generate_stream),
        ("/", "What the default model is for (Hugging Face)", [TgiBody, EmbedBody, TeiRerankBody, PredictBody], root),
    ]
    life = LifeEndpoint(deployment, ignored)
    of_models: list[tuple[str, str, Sequence[type[Body]], JsonEndpoint]] = [
        ("/models/load", "Load a model", [LoadModelBody], life.load),
        ("/models/unload", "Unload a model", [UnloadModelBody], life.unload),
    ]
    openai_models, status, requests = (
        ModelsEndpoint(deployment, folder),
        StatusEndpoint(deployment),
        RequestsEndpoint(in_flight),
    )

    def by_name(answer: _Answer) -> _Answer:
        """The endpoint, which also knows models and adapters that only the disk can tell of."""
        return partial(looked_up(folder.when_found(lambda _no_body, http: answer(http))), b"")

    models = AnthropicModels(openai_models, by_name(openai_models.get))
    of_model, listed = ("model",), ("after", "limit", "order")
    without: list[tuple[str, str, str, _Answer, Sequence[str]]] = [
        ("GET", "/v1/models", "List models", models.list, ("limit", "after_id", "before_id")),
        ("GET", "/models", "List models", models.list, ()),
        ("GET", "/v1/models/{model_id:path}", "Get a model", models.get, ()),
        ("GET", "/v1/responses/{response_id}", "Get a response", responses.get, ()),
        ("DELETE", "/v1/responses/{response_id}", "Forget a response", responses.delete, ()),
        ("POST", "/v1/responses/{response_id}/cancel", "Cancel a response", responses.cancel, ()),
        ("GET", "/v1/responses/{response_id}/input_items", "List a question", responses.input_items, listed),
        ("GET", "/v1/requests", "List your requests", requests.list, ("ended",)),
        ("GET", "/v1/requests/{request_id:path}", "Why does it take so long?", requests.explain, ()),
        ("DELETE", "/v1/requests/{request_id:path}", "Cancel a request", requests.cancel, ()),
        ("GET", "/health", "Is it alive?", status.health, ()),
        ("GET", "/ready", "Can it take work?", status.ready, ()),
        ("GET", "/load", "How busy is it?", status.load, of_model),
        ("GET", "/kv", "What is in the KV cache?", PoolEndpoint(deployment, in_flight).kv, of_model),
        ("GET", "/version", "Version", status.version, ()),
        ("GET", "/info", "The default model, for text-embeddings-inference's clients", tei.info, ()),
        ("GET", "/metrics", "Metrics", status.metrics, ()),
        ("GET", "/props", "What a model is (llama.cpp)", llama_status.props, of_model),
        ("GET", "/slots", "What runs (llama.cpp)", llama_status.slots, ("model", "fail_on_no_slot")),
        ("GET", "/api/tags", "List models (Ollama)", ollama_models.tags, ()),
        ("GET", "/api/ps", "List models in memory (Ollama)", ollama_models.ps, ()),
        ("GET", "/api/version", "Version (Ollama)", ollama_models.version, ()),
    ]
    waits, found = partial(when_loaded, deployment, folder, in_flight), folder.when_found

    def reads(path: str, answer: JsonEndpoint) -> Endpoint:
        return takes_json(waits(looked_up(found(answer))), of_any_type=path.startswith("/api/") or path in LLAMA_PATHS)

    return [
        *(Operation("POST", path, told, reads(path, answer), answer, bodies) for path, told, bodies, answer in with_body),
        *(Operation("POST", path, told, takes_json(found(answer)), answer, bodies) for path, told, bodies, answer in of_models),
        *(
            Operation(verb, path, told, answers(by_name(answer) if "model" in query else answer), answer, query=query)
            for verb, path, told, answer, query in without
        ),
    ]


def answers(answer: _Answer) -> Endpoint:
    """An endpoint that makes JSON of what `answer` returns, unless that is a response already."""

    async def endpoint(http: HttpRequest) -> Response:
        value = await answer(http)
        return value if isinstance(value, Response) else Response(orjson.dumps(value), media_type="application/json")

    return endpoint


def _described(operations: Sequence[Operation], open_paths: Set[str] | None) -> list[Route]:
    """The routes that tell a program, and a reader, of the others. `open_paths`: as for `write_document`."""

    @cache
    def document() -> dict[str, Any]:
        return write_document(operations, open_paths)

    async def openapi(_request: HttpRequest) -> Response:
        return Response(orjson.dumps(document()), media_type="application/json")

    async def docs(_request: HttpRequest) -> Response:
        return docs_page(document())

    return [Route("/openapi.json", openapi), Route("/docs", docs)]


async def _no_page(request: HttpRequest) -> Response:
    """Nothing is at `/` where the page is off, but clients of Ollama's API send HEAD there to see whether a server runs."""
    if request.method != "HEAD":
        raise HTTPException(404)
    return Response()


async def _on_model_away(request: HttpRequest, error: Exception) -> Response:
    """The answer to a question about a model that is not loaded. Only requests that it answers have it loaded."""
    assert isinstance(error, ModelAway)
    return unavailable(f"The model {error.name} is not loaded.").response(words_of(request.scope))


def _http_exception_handler(routes: Sequence[Route]) -> Callable[[HttpRequest, Exception], Coroutine[Any, Any, Response]]:
    async def on_http_exception(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        # Each of our routes has one method, and Starlette names that of the first which has the path (RFC 9110, 15.5.6: all).
        methods = {method for route in routes if route.path_regex.match(request.url.path) for method in route.methods or ()}
        if error.status_code == 405 and methods:
            error.headers = {"Allow": ", ".join(sorted(methods))}
            if b"sec-websocket-key" in headers_of(request.scope):
                message = "This server speaks no WebSocket: send the request over HTTP."
                error = ApiError(426, message, code="websocket_not_supported", headers=error.headers | {"Upgrade": "HTTP/1.1"})
        return from_http_exception(error, request.method, request.url.path).response(words_of(request.scope))

    return on_http_exception
