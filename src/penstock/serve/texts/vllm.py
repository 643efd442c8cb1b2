"""vLLM's faces: `POST /v1/score` and `/score` for pairs of texts, `/classify` for labels, `/pooling` for a model's numbers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.serve.bodies import Body, NoEffect, NotYet
from penstock.serve.errors import invalid
from penstock.serve.texts.call import TextResults, Truncation
from penstock.serve.texts.endpoint import Answer, TextsEndpoint
from penstock.serve.texts.numbers import as_base64, rows, scores
from penstock.serve.texts.pairs import Pairs
from penstock.serve.texts.read import (
    Asked,
    KeptTokens,
    Priority,
    RequestId,
    Texts,
    TextsOrIds,
    TextsReader,
    name_in,
    read_prompted,
    read_texts,
    read_truncation,
    require_labels,
)
from penstock.types.encoder import ScoreFunction, TruncationSide


class TextsBody(Body):
    """Fields that all of vLLM's faces have. Null is the same as absent."""

    model: str | None = None
    user: Annotated[str | None, NoEffect()] = None
    """The name of who asks (docs/ab.md)."""
    truncate_prompt_tokens: KeptTokens | None = None
    """Keep so many tokens of a text; -1: as many as the model takes."""
    truncation_side: TruncationSide | None = None
    """The side of a text that is cut off; right by default."""
    priority: Priority | None = None
    request_id: RequestId | None = None
    add_special_tokens: Annotated[Any, NotYet(True)] = None


class ScoreBody(TextsBody):
    text_1: Texts
    """One text, which is paired with each of `text_2`, or as many."""
    text_2: Texts
    use_activation: bool | None = None
    """False: the head's number, and not what the model's own function makes of it."""


class ClassifyBody(TextsBody):
    input: TextsOrIds
    use_activation: bool | None = None
    """False: the head's numbers, and no probabilities."""


class PoolingBody(TextsBody):
    input: TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    prompt_name: str | None = None
    dimensions: Annotated[Any, NotYet()] = None


class VllmFace:
    def __init__(self, reader: TextsReader, endpoint: TextsEndpoint) -> None:
        self._reader = reader
        self._endpoint = endpoint

    async def score(self, data: bytes, http: HttpRequest) -> Response:
        """Score pairs of texts: by a reranker's head, or by the cosine of an embedding model's vectors."""
        return await self._endpoint.answer(data, http, self._read_score)

    async def classify(self, data: bytes, http: HttpRequest) -> Response:
        """The probabilities of a classifier's labels, and the likeliest label of each text."""
        return await self._endpoint.answer(data, http, self._read_classify)

    async def pooling(self, data: bytes, http: HttpRequest) -> Response:
        """The model's numbers as they are: a vector, a row for each token, or what a head says before any function."""
        return await self._endpoint.answer(data, http, self._read_pooling)

    def _read_score(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = self._reader.body(value, ScoreBody)
        asked = self._open(body, data, scope)
        firsts = [text for text in read_texts(body.text_1, "text_1") if isinstance(text, str)]
        seconds = [text for text in read_texts(body.text_2, "text_2") if isinstance(text, str)]
        if len(firsts) not in (1, len(seconds)):
            raise invalid(
                f"'text_1' has {len(firsts)} texts and 'text_2' has {len(seconds)}: send one text in 'text_1', or as many.",
                "text_1",
            )
        pairs = Pairs(firsts, seconds, name_in("text_1", body.text_1), name_in("text_2", body.text_2))
        call = pairs.call(asked, _truncation(body, asked), is_search=False)

        def write(results: TextResults) -> dict[str, Any]:
            found = pairs.scores(asked.encoder, results.results, is_raw=body.use_activation is False)
            items = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]
            return _list("score", asked, items, results)

        return Answer(call, write)

    def _read_classify(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = self._reader.body(value, ClassifyBody)
        asked = self._open(body, data, scope)
        require_labels(asked)
        encoder = asked.encoder
        texts = read_texts(body.input, "input", vocab_size=asked.running.model.vocab_size)
        function = ScoreFunction.NONE if body.use_activation is False else encoder.scores

        def write(results: TextResults) -> dict[str, Any]:
            items = []
            for index, result in enumerate(results.results):
                found = scores(result, function)
                label = encoder.labels[found.index(max(found))]
                items.append({"index": index, "label": label, "probs": found, "num_classes": len(found)})
            return _list("classify", asked, items, results)

        return Answer(asked.call(texts, name_in("input", body.input), _truncation(body, asked)), write)

    def _read_pooling(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = self._reader.body(value, PoolingBody)
        asked = self._open(body, data, scope)
        texts = read_prompted(body.input, "input", asked, body.prompt_name)

        def write(results: TextResults) -> dict[str, Any]:
            items = []
            for index, result in enumerate(results.results):
                numbers = rows(result, asked.encoder)
                content = as_base64(numbers) if body.encoding_format == "base64" else numbers
                items.append({"index": index, "object": "pooling", "data": content})
            return _list("pool", asked, items, results)

        return Answer(asked.call(texts, name_in("input", body.input), _truncation(body, asked)), write)

    def _open(self, body: TextsBody, data: bytes, scope: Scope) -> Asked:
        return self._reader.open(
            data, scope, model=body.model, user=body.user, priority=body.priority, request_id=body.request_id
        )


def _truncation(body: TextsBody, asked: Asked) -> Truncation | None:
    return read_truncation(body.truncate_prompt_tokens, body.truncation_side, asked.running)


def _list(kind: str, asked: Asked, items: list[dict[str, Any]], results: TextResults) -> dict[str, Any]:
    return {
        "id": f"{kind}-{asked.terms.request_id}",
        "object": "list",
        "created": asked.running.sources.unix_time_s(),
        "model": asked.model_name,
        "data": items,
        "usage": {
            "prompt_tokens": results.num_tokens,
            "total_tokens": results.num_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
        },
    }
