"""`POST /api/embed` and `/api/embeddings`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict

from penstock.serve.asking import Asked
from penstock.serve.ollama.read import OllamaBody, keep, name_of
from penstock.serve.shapes import Count, Vector
from penstock.serve.texts import read
from penstock.serve.texts.call import TextResults
from penstock.serve.texts.endpoint import Answer
from penstock.serve.texts.numbers import embedding


class OllamaEmbedBody(OllamaBody):
    input: read.TextsOrIds
    truncate: bool | None = None
    """False refuses a text that is too long. Otherwise its end is cut off."""
    dimensions: Annotated[int, Field(ge=1)] | None = None


class OllamaEmbeddingsBody(OllamaBody):
    prompt: Annotated[str, Field(min_length=1)]


class OllamaEmbed(TypedDict):
    model: str
    embeddings: list[Vector]
    total_duration: Count
    load_duration: Count
    prompt_eval_count: Count


OllamaEmbedding = TypedDict("OllamaEmbedding", {"embedding": Vector})


def embed(body: OllamaEmbedBody, asked: Asked) -> Answer:
    """Turn one or more texts into vectors of length 1."""
    opened = _open(body, asked)
    encoder, running = opened.encoder, opened.running
    read.check_dimensions(body.dimensions, encoder)
    truncation = None if body.truncate is False else read.read_truncation(-1, None, running)

    def write(results: TextResults) -> OllamaEmbed:
        return {
            "model": body.model,
            "embeddings": [embedding(result, encoder, body.dimensions) for result in results.results],
            "total_duration": running.clock.now_ns() - opened.terms.arrival_ns,
            "load_duration": opened.terms.waits.model,
            "prompt_eval_count": results.num_tokens,
        }

    return Answer(opened.prompted(body.input, "input", truncation), write)


def embeddings(body: OllamaEmbeddingsBody, asked: Asked) -> Answer:
    """Turn one text into a vector, in the older shape."""
    opened = _open(body, asked)

    def write(results: TextResults) -> OllamaEmbedding:
        [result] = results.results
        return {"embedding": embedding(result, opened.encoder, None)}

    return Answer(opened.prompted(body.prompt, "prompt", read.read_truncation(-1, None, opened.running)), write)


def _open(body: OllamaBody, asked: Asked) -> read.Opened:
    opened = read.open_model(asked, model=name_of(body.model, asked.reader.deployment))
    read.require_embeddings(opened)
    if (served := asked.reader.deployment.find(opened.running.name)) is not None:
        keep(body, served, asked.reader.deployment, asked.scope)
    return opened
