"""`POST /embedding`, llama.cpp's: a face of the same call as OpenAI's embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.serve.bodies import Body
from penstock.serve.errors import in_words, invalid
from penstock.serve.llama_cpp.write import llama_words
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer, TextsEndpoint
from penstock.serve.texts.numbers import embedding, scaled
from penstock.serve.texts.read import TextsOrIds, TextsReader, name_in, read_prompted, require_embeddings

EUCLIDEAN, AS_IT_IS = 2, -1


class LlamaEmbeddingBody(Body):
    model: str | None = None
    content: TextsOrIds
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = None
    """-1: the vector as it is; 0: its largest number becomes 32760; p: its p-norm becomes 1. The default is 2."""
    encoding_format: Literal["float"] | None = None


class LlamaTexts:
    def __init__(self, reader: TextsReader, endpoint: TextsEndpoint) -> None:
        self._reader = reader
        self._endpoint = endpoint

    async def embedding(self, data: bytes, http: HttpRequest) -> Response:
        """Turn one or more texts into vectors, in the words of llama.cpp's server."""
        return await in_words(llama_words, self._endpoint.answer(data, http, self._read))

    def _read(self, value: Any, data: bytes, scope: Scope) -> Answer:
        body = self._reader.body(value, LlamaEmbeddingBody)
        asked = self._reader.open(data, scope, model=body.model)
        require_embeddings(asked)
        encoder, norm = asked.encoder, EUCLIDEAN if body.embd_normalize is None else body.embd_normalize
        if norm != EUCLIDEAN and encoder.is_normalised:
            raise invalid(
                "The model's own files have its vectors normalised: 'embd_normalize' must be 2, which is the default.",
                "embd_normalize",
            )
        texts = read_prompted(body.content, "content", asked, None)

        def write(results: TextResults) -> list[Any]:
            vectors = [embedding(result, encoder, is_unit=norm == EUCLIDEAN) for result in results.results]
            if norm not in (EUCLIDEAN, AS_IT_IS):
                vectors = [scaled(vector, norm) for vector in vectors]
            return [{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)]

        return Answer(asked.call(texts, name_in("content", body.content)), write)
