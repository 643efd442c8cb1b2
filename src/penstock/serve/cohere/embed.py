"""`POST /v2/embed` in Cohere's shape."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.bodies import Body, Priority, has_not_yet
from penstock.serve.errors import invalid, shorten
from penstock.serve.shapes import ApiVersion, Count, Vector
from penstock.serve.texts import read
from penstock.serve.texts.call import TextResults, Truncation
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import as_base64, embedding

_PROMPTS = {
    "search_query": read.QUERY_PROMPTS,
    "search_document": read.DOCUMENT_PROMPTS,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's `input_type` -> names of such a prompt in models' files."""
_KINDS = ("float", "base64")


@has_not_yet("images=[] inputs=[]")
class CohereEmbedBody(Body):
    texts: read.Texts
    model: str | None = None
    input_type: Literal["search_document", "search_query", "classification", "clustering"] | None = None
    """The purpose of the texts. The model's prompt for this purpose, if any, is put before each text."""
    embedding_types: Annotated[list[str], Field(min_length=1, max_length=8, fail_fast=True)] | None = None
    output_dimension: Annotated[int, Field(ge=1)] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    """The side to cut off a text that is too long. NONE refuses the text. The default is END."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Longer texts are cut."""
    priority: Priority | None = None


class EmbeddingsByType(TypedDict):
    float: NotRequired[list[Vector]]
    base64: NotRequired[list[str]]


BilledTokens = TypedDict("BilledTokens", {"input_tokens": Count})
EmbedMeta = TypedDict("EmbedMeta", {"api_version": ApiVersion, "billed_units": BilledTokens})


class CohereEmbeddings(TypedDict):
    id: str
    embeddings: EmbeddingsByType
    texts: list[str]
    meta: EmbedMeta
    response_type: str


def embed(body: CohereEmbedBody, asked: Asked) -> Answer:
    """Turn texts into vectors, in each of the requested encodings."""
    opened = read.open_model(asked, model=body.model, priority=body.priority)
    read.require_embeddings(opened)
    encoder = opened.encoder
    read.check_dimensions(body.output_dimension, encoder, "output_dimension")
    kinds = body.embedding_types or ["float"]
    for index, kind in enumerate(kinds):
        if kind not in _KINDS:
            param = f"embedding_types[{index}]"
            raise invalid(f"'{param}' is {shorten(kind)!r}; only 'float' and 'base64' are supported yet.", param)
    if not isinstance(body.texts, list):
        raise invalid("'texts' must be a list of strings.", "texts")
    prompt = read.prompt_for(encoder, *_PROMPTS.get(body.input_type or "", ()))
    texts = [prompt + text for text in read.read_texts(body.texts, "texts")]
    limit = opened.running.model.capacity.max_model_len
    if body.truncate == "NONE":
        if body.max_tokens is not None and body.max_tokens < limit:
            raise invalid("'max_tokens' cuts texts, and 'truncate' is NONE: leave one of them out.", "max_tokens")
        truncation = None
    else:
        truncation = Truncation(min(body.max_tokens or limit, limit), "left" if body.truncate == "START" else "right")

    def write(results: TextResults) -> CohereEmbeddings:
        vectors = [embedding(result, encoder, body.output_dimension) for result in results.results]
        embeddings: EmbeddingsByType = {}
        if "float" in kinds:
            embeddings["float"] = vectors
        if "base64" in kinds:
            embeddings["base64"] = [as_base64(vector) for vector in vectors]
        return {
            "id": f"embd-{opened.terms.request_id}",
            "embeddings": embeddings,
            "texts": body.texts,
            "meta": {"api_version": {"version": "2"}, "billed_units": {"input_tokens": results.num_tokens}},
            "response_type": "embeddings_by_type",
        }

    return Answer(opened.call(texts, read.name_in("texts", body.texts), truncation), write)
