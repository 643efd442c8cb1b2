"""`POST /v1/embeddings` in OpenAI's shape, with vLLM's further fields."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.bodies import has_not_yet
from penstock.serve.shapes import Base64, Count, TokenUsage, Vector
from penstock.serve.texts import read
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import as_base64, embedding


@has_not_yet("add_special_tokens=true normalize=true")
class EmbeddingsBody(read.TextsBody):
    input: read.TextsOrIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Number of first components of each vector to keep, scaled to length 1 again."""
    prompt_name: str | None = None
    """Name of a prompt in the model's files, which is put before each text."""


Embedding = TypedDict("Embedding", {"object": Literal["embedding"], "index": Count, "embedding": Vector | Base64})


class Embeddings(TypedDict):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: TokenUsage


def create(body: EmbeddingsBody, asked: Asked) -> Answer:
    """Turn one or more texts, or their tokens, into vectors of length 1."""
    opened = read.open_body(asked, body)
    read.require_embeddings(opened)
    read.check_dimensions(body.dimensions, opened.encoder)
    truncation = read.read_truncation(body.truncate_prompt_tokens, body.truncation_side, opened.running)
    call = opened.prompted(body.input, "input", truncation, prompt_name=body.prompt_name)

    def write(results: TextResults) -> Embeddings:
        vectors = [embedding(result, opened.encoder, body.dimensions) for result in results.results]
        is_base64 = body.encoding_format == "base64"
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": as_base64(vector) if is_base64 else vector}
                for index, vector in enumerate(vectors)
            ],
            "model": opened.model_name,
            "usage": results.usage,
        }

    return Answer(call, write)
