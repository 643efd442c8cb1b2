"""Anthropic's API (https://platform.claude.com/docs/en/api): messages, counts of tokens, batches, and models in its shape."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.anthropic.endpoints import AnthropicEndpoint
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
from penstock.serve.api import Api, Parts, Route, has_header, without_folder
from penstock.serve.http.checks import Wording

_VERSION = b"anthropic-version"


def _routes(parts: Parts) -> Sequence[Route]:
    endpoint = AnthropicEndpoint(parts)
    return [
        *_batch_routes(parts),
        parts.call_route("POST /v1/messages", "Chat", MessagesBody, create, AnthropicMessage, AnthropicEvent),
        Route("POST /v1/messages/count_tokens", "Count tokens", endpoint.count, CountTokensBody, AnthropicCount),
        Route(
            "GET /v1/models /models",
            "List models",
            endpoint.list,
            returns=AnthropicModelList,
            query=["limit", "after_id", "before_id"],  # of any form: OpenAI's list ignores them
            when=has_header(_VERSION),
        ),
        Route("GET /v1/models/{model_id:path}", "Get a model", endpoint.get, returns=AnthropicModel, when=has_header(_VERSION)),
    ]


def _batch_routes(parts: Parts) -> Sequence[Route]:
    if parts.batches is None:
        return []
    from penstock.serve.anthropic.batches import batch_routes  # with a database, which few servers need

    return batch_routes(parts, parts.batches)


_BATCHES = "/v1/messages/batches"
_BATCH = f"{_BATCHES}/{{batch_id}}"
API = Api(
    "Anthropic",
    _routes,
    Wording(
        anthropic_words,
        paths="/v1/messages /v1/messages/count_tokens /v1/messages/batches",
        client_header=_VERSION,
        id_header=b"request-id",
    ),
    refused=without_folder(
        *(f"POST {_BATCHES}", f"GET {_BATCHES}", f"GET {_BATCH}", f"DELETE {_BATCH}"),
        *(f"GET {_BATCH}/results", f"POST {_BATCH}/cancel"),
    ),
)
