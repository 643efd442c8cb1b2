"""OpenAI's API: completions, chats, embeddings and the list of models. Paths outside all APIs have OpenAI's errors, too."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.cards import ModelCard, ModelList, ModelsEndpoint
from penstock.serve.openai.embeddings import Embeddings, EmbeddingsBody, create
from penstock.serve.openai.read import chat, completion
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody
from penstock.serve.openai.write import ChatChunk, ChatCompletion, Completion, CompletionChunk


def _routes(parts: Parts) -> Sequence[Route]:
    call, models = parts.call_route, ModelsEndpoint(parts.deployment, parts.folder)
    at_chat = "POST /v1/chat/completions /chat/completions"
    return [
        call("POST /v1/completions /completions", "Complete", CompletionBody, completion, Completion, CompletionChunk),
        call(at_chat, "Chat", ChatCompletionBody, chat, ChatCompletion, ChatChunk),
        parts.texts_route("POST /v1/embeddings /embeddings", "Embed", EmbeddingsBody, create, Embeddings),
        Route("GET /v1/models /models", "List models", models.list, returns=ModelList),
        Route("GET /v1/models/{model_id:path}", "Get a model", models.get, returns=ModelCard),
    ]


API = Api("OpenAI", _routes, stream_end="[DONE]")
