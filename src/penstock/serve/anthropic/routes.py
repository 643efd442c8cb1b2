"""Anthropic's API (https://platform.claude.com/docs/en/api): messages, counts of tokens, batches, and models in its shape."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.anthropic.batches import (
    MessageBatch,
    MessageBatchBody,
    MessageBatchDeleted,
    MessageBatches,
    MessageBatchList,
    Results,
)
from penstock.serve.anthropic.endpoints import AnthropicModels, CountEndpoint
from penstock.serve.anthropic.read import create
from penstock.serve.anthropic.schemas import CountTokensBody, MessagesBody
from penstock.serve.anthropic.write import (
    AnthropicCount,
    AnthropicEvent,
    AnthropicMessage,
    AnthropicModel,
    AnthropicModelList,
    anthropic_words,
)
from penstock.serve.api import Api, Parts, Route, has_header
from penstock.serve.http.checks import Wording

_VERSION = b"anthropic-version"


def _routes(parts: Parts) -> Sequence[Route]:
    messages, models = parts.calls.answers(MessagesBody, create), AnthropicModels(parts)
    batches, one = MessageBatches(parts), "/v1/messages/batches/{batch_id}"
    page = "limit before_id after_id"
    return [
        Route("POST /v1/messages", "Chat", messages, MessagesBody, AnthropicMessage, AnthropicEvent),
        Route("POST /v1/messages/count_tokens", "Count tokens", CountEndpoint(parts).count, CountTokensBody, AnthropicCount),
        Route("POST /v1/messages/batches", "Begin a batch of messages", batches.create, MessageBatchBody, MessageBatch),
        Route("GET /v1/messages/batches", "List batches of messages", batches.list, returns=MessageBatchList, query=page),
        Route(f"GET {one}", "Get a batch of messages", batches.get, returns=MessageBatch),
        Route(f"GET {one}/results", "Read the results of a batch of messages", batches.results, returns=Results),
        Route(f"POST {one}/cancel", "Cancel a batch of messages", batches.cancel, returns=MessageBatch),
        Route(f"DELETE {one}", "Delete a batch of messages", batches.delete, returns=MessageBatchDeleted),
        Route(
            "GET /v1/models /models",
            "List models",
            models.list,
            returns=AnthropicModelList,
            query="limit after_id before_id",
            when=has_header(_VERSION),
        ),
        Route("GET /v1/models/{model_id:path}", "Get a model", models.get, returns=AnthropicModel, when=has_header(_VERSION)),
    ]


API = Api(
    "Anthropic",
    _routes,
    Wording(
        anthropic_words,
        paths="/v1/messages /v1/messages/count_tokens /v1/messages/batches",
        client_header=_VERSION,
        id_header=b"request-id",
    ),
)
