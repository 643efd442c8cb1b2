"""`POST /api/embed` and `/api/embeddings`, Ollama's: a face of the same call as OpenAI's embeddings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.deploy.deployment import Deployment
from penstock.serve.ollama.read import OllamaBody, keep, name_of, read_body
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer, TextsEndpoint
from penstock.serve.texts.numbers import embedding
from penstock.serve.texts.read import (
    Asked,
    TextsOrIds,
    TextsReader,
    check_dimensions,
    name_in,
    read_prompted,
    read_truncation,
    require_embeddings,
)


class OllamaEmbedBody(OllamaBody):
    input: TextsOrIds
    truncate: bool | None = None
    """True by default: a text that is too long loses its end."""
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(OllamaBody):
    prompt: Annotated[str, Field(min_length=1)]


class OllamaTexts:
    def __init__(self, reader: TextsReader, endpoint: TextsEndpoint, deployment: Deployment) -> None:
        self._reader = reader
        self._endpoint = endpoint
        self._deployment = deployment

    async def embed(self, data: bytes, http: HttpRequest) -> Response:
        """Turn one or more texts into vectors of length 1, in Ollama's words."""
        return await self._endpoint.answer(data, http, self._read_embed)

    async def embeddings(self, data: bytes, http: HttpRequest) -> Response:
        """The vector of one text, in Ollama's older words."""
        return await self._endpoint.answer(data, http, self._read_embeddings)

    def _read_embed(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = read_body(value, OllamaEmbedBody, self._reader.ignored)
        asked = self._open(body, data, scope)
        encoder, running = asked.encoder, asked.running
        check_dimensions(body.dimensions, encoder)
        texts = read_prompted(body.input, "input", asked, None)
        truncation = None if body.truncate is False else read_truncation(-1, None, running)

        def write(results: TextResults) -> dict[str, Any]:
            return {
                "model": body.model,
                "embeddings": [embedding(result, encoder, body.dimensions) for result in results.results],
                "total_duration": running.clock.now_ns() - asked.terms.arrival_ns,
                "load_duration": asked.terms.model_wait_ns,
                "prompt_eval_count": results.num_tokens,
            }

        return Answer(asked.call(texts, name_in("input", body.input), truncation), write)

    def _read_embeddings(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = read_body(value, OllamaEmbeddingsBody, self._reader.ignored)
        asked = self._open(body, data, scope)
        texts = read_prompted(body.prompt, "prompt", asked, None)

        def write(results: TextResults) -> dict[str, Any]:
            [result] = results.results
            return {"embedding": embedding(result, asked.encoder, None)}

        return Answer(asked.call(texts, name_in("prompt", body.prompt), read_truncation(-1, None, asked.running)), write)

    def _open(self, body: OllamaBody, data: bytes, scope: Scope) -> Asked:
        name = name_of(body.model, self._deployment)
        asked = self._reader.open(data, scope, model=name)
        require_embeddings(asked)
        if (served := self._deployment.find(asked.running.name)) is not None:
            keep(body, served, self._deployment, scope)
        return asked
