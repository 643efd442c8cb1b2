"""Ollama's API (https://github.com/ollama/ollama/blob/main/docs/api.md)."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Refused, Route
from penstock.serve.http.checks import Wording
from penstock.serve.ollama import models
from penstock.serve.ollama.answers import OllamaEndpoint
from penstock.serve.ollama.read import OllamaChatBody, OllamaGenerateBody
from penstock.serve.ollama.texts import OllamaEmbed, OllamaEmbedBody, OllamaEmbedding, OllamaEmbeddingsBody, embed, embeddings
from penstock.serve.ollama.write import OllamaChat, OllamaGenerate, error_words
from penstock.serve.shapes import Status, Version


def _routes(parts: Parts) -> Sequence[Route]:
    calls, about = OllamaEndpoint(parts), models.OllamaModels(parts)
    generated = OllamaGenerate
    not_fetched = {501: "The server does not have this model, and does not fetch it"}
    return [
        Route("POST /api/chat", "Chat", calls.chat, OllamaChatBody, OllamaChat, OllamaChat),
        Route("POST /api/generate", "Complete", calls.generate, OllamaGenerateBody, generated, generated),
        parts.texts_route("POST /api/embed", "Embed", OllamaEmbedBody, embed, OllamaEmbed),
        parts.texts_route("POST /api/embeddings", "Embed one text", OllamaEmbeddingsBody, embeddings, OllamaEmbedding),
        Route("POST /api/show", "What a model is", about.show, models.OllamaShowBody, models.OllamaShow),
        Route(
            "POST /api/pull", "Is a model here?", about.pull, models.OllamaPullBody, Status, Status, more_statuses=not_fetched
        ),
        Route("GET /api/tags", "List models", about.tags, returns=models.OllamaModelList),
        Route("GET /api/ps", "List models in memory", about.ps, returns=models.OllamaRunning),
        Route("GET /api/version", "Version", about.version, returns=Version),
    ]


API = Api(
    "Ollama",
    _routes,
    Wording(error_words, paths="/api/"),
    stream_type="application/x-ndjson",
    takes_any_type=True,
    refused=[
        Refused("POST /api/push", "Models are not sent to a library from here."),
        Refused(
            "POST /api/create", "Give `penstock serve` the files of a model; a system message is the first message of a chat."
        ),
        Refused("POST /api/copy", "Give `penstock serve` another name with --served-model-name."),
        Refused("DELETE /api/delete", "Delete the files where the server runs: `penstock models` names them."),
    ],
)
