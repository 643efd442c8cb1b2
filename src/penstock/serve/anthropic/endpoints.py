"""`POST /v1/messages/count_tokens`, and `GET /v1/models` in Anthropic's shape."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from penstock import fast_json
from penstock.calls.call import TextPrompt
from penstock.calls.prompts import check_text_size
from penstock.deploy.running import RunningModel
from penstock.serve.answering import answer_prompt
from penstock.serve.anthropic.read import read_prompt
from penstock.serve.anthropic.write import AnthropicCount, AnthropicModel, AnthropicModelList
from penstock.serve.api import Parts
from penstock.serve.cards import Listed, ModelCard, ModelsEndpoint
from penstock.serve.errors import invalid, shorten
from penstock.serve.paging import count
from penstock.serve.shapes import utc

LIMIT = count("limit", 20, 1, 1000)
"""Most items of a page, as in Anthropic's API."""


class AnthropicEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._models = ModelsEndpoint(parts.deployment, parts.folder)

    async def count(self, data: bytes, http: HttpRequest) -> Response:
        """Count the tokens of a conversation and its tools, as the model reads them."""
        reader = self._parts.reader
        running, conversation = await reader.parse(data, lambda: read_prompt(data, http.scope, reader), http.scope)
        return await answer_prompt(conversation, running, data, http, _count)

    async def list(self, http: HttpRequest) -> Response:
        """List the models in Anthropic's shape, paged by `limit`, `after_id` and `before_id`."""
        return await self._models.list_as(http, lambda listed: fast_json.dumps(_page(listed, http)))

    async def get(self, http: HttpRequest) -> AnthropicModel:
        """Describe the model with this name in Anthropic's shape."""
        return _card(await self._models.get(http))


def _count(prompt: TextPrompt, running: RunningModel) -> AnthropicCount:
    check_text_size(prompt.text, running, prompt.param)
    return {"input_tokens": len(prompt.encode(running.tokenizer))}


def _card(card: ModelCard) -> AnthropicModel:
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": utc(card["created"]),
        "lifecycle": "active",
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


def _page(listed: Sequence[Listed], http: HttpRequest) -> AnthropicModelList:
    ids, query = [one.name for one in listed], http.query_params
    limit = LIMIT.read(http)
    first, last = 0, len(ids)
    if "after_id" in query:
        first = _place(query["after_id"], ids, "after_id") + 1
    if "before_id" in query:
        last = _place(query["before_id"], ids, "before_id")
    if "before_id" in query and "after_id" not in query:  # the page just before it
        shown = listed[max(first, last - limit) : last]
    else:
        shown = listed[first : min(last, first + limit)]
    return {
        "data": [_card(one.card()) for one in shown],
        "has_more": len(shown) < last - first,
        "first_id": shown[0].name if shown else None,
        "last_id": shown[-1].name if shown else None,
    }


def _place(name: str, ids: list[str], param: str) -> int:
    if name not in ids:
        raise invalid(f"'{param}' is {shorten(name)!r}, which is not the id of a model here.", param)
    return ids.index(name)
