"""`POST /embedding`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.bodies import Body
from penstock.serve.shapes import Count, Vector
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import embedding as vector_of
from penstock.serve.texts.numbers import scaled
from penstock.serve.texts.read import TextsOrIds, open_model, require_embeddings

EUCLIDEAN, AS_IT_IS = 2, -1


class LlamaEmbeddingBody(Body):
    model: str | None = None
    content: TextsOrIds
    embd_normalize: Annotated[int, Field(ge=-1, le=64)] | None = None
    """Norm to scale vectors by: -1 keeps them, 0 scales the largest number to 32760, p the p-norm to 1. Default: 2."""
    encoding_format: Literal["float"] | None = None


LlamaEmbedding = TypedDict("LlamaEmbedding", {"index": Count, "embedding": list[Vector]})


def embedding(body: LlamaEmbeddingBody, asked: Asked) -> Answer:
    """Turn one or more texts into vectors."""
    opened = open_model(asked, model=body.model)
    require_embeddings(opened)
    encoder, norm = opened.encoder, EUCLIDEAN if body.embd_normalize is None else body.embd_normalize

    def write(results: TextResults) -> list[LlamaEmbedding]:
        vectors = [vector_of(result, encoder, is_unit=norm == EUCLIDEAN) for result in results.results]
        if norm not in (EUCLIDEAN, AS_IT_IS):
            vectors = [scaled(vector, norm) for vector in vectors]
        return [{"index": index, "embedding": [vector]} for index, vector in enumerate(vectors)]

    return Answer(opened.prompted(body.content, "content"), write)
