"""The clients that people have for encoders, by a server's URL: each embeds or sorts real texts and must find what fits.

    python tests/clients/encoders.py http://127.0.0.1:8000      # an embedding model; run.sh starts one

Runs in an environment with the clients, without Penstock. Prints a line for each, and exits with 1 if one fails.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence

from support.clients.checks import run

QUESTION = "How do I cancel my order?"
DOCUMENTS = [
    "We ship to all of Europe.",
    "An order can be cancelled within a day of its placement.",
    "The office has a garden.",
]
FITTING = 1
KEY = "none"


def nearest(question: Sequence[float], documents: Sequence[Sequence[float]]) -> int:
    scores = [sum(a * b for a, b in zip(question, document, strict=True)) for document in documents]
    return scores.index(max(scores))


def check_vectors(vectors: Sequence[Sequence[float]]) -> None:
    """The question's vector first."""
    assert len(vectors) == 1 + len(DOCUMENTS)
    assert all(math.isclose(math.hypot(*vector), 1.0, rel_tol=1e-3) for vector in vectors)
    assert nearest(vectors[0], vectors[1:]) == FITTING


def with_openai(url: str) -> None:
    import openai

    answer = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY).embeddings.create(model="minilm", input=[QUESTION, *DOCUMENTS])
    check_vectors([one.embedding for one in answer.data])


def with_langchain(url: str) -> None:
    from langchain_openai import OpenAIEmbeddings

    model = OpenAIEmbeddings(base_url=f"{url}/v1", api_key=KEY, model="minilm", check_embedding_ctx_length=False)
    check_vectors([model.embed_query(QUESTION), *model.embed_documents(DOCUMENTS)])


def with_llama_index(url: str) -> None:
    from llama_index.embeddings.openai import OpenAIEmbedding

    model = OpenAIEmbedding(api_base=f"{url}/v1", api_key=KEY, model_name="minilm")
    check_vectors([model.get_query_embedding(QUESTION), *model.get_text_embedding_batch(DOCUMENTS)])


def with_cohere(url: str) -> None:
    import cohere

    client = cohere.ClientV2(api_key=KEY, base_url=url)
    embedded = client.embed(
        model="minilm", texts=[QUESTION, *DOCUMENTS], input_type="search_document", embedding_types=["float"]
    )
    check_vectors(embedded.embeddings.float_)
    ranked = client.rerank(model="minilm", query=QUESTION, documents=DOCUMENTS, top_n=2)
    assert ranked.results[0].index == FITTING
    assert len(ranked.results) == 2


def with_huggingface_hub(url: str) -> None:
    """The client of text-embeddings-inference."""
    from huggingface_hub import InferenceClient

    client = InferenceClient(model=url)
    check_vectors([client.feature_extraction(text).reshape(-1).tolist() for text in (QUESTION, *DOCUMENTS)])


CLIENTS: Sequence[Callable[[str], None]] = (
    with_openai,
    with_langchain,
    with_llama_index,
    with_cohere,
    with_huggingface_hub,
)


if __name__ == "__main__":
    sys.exit(run("encoders", CLIENTS, lambda _: sys.argv[1]))
