"""Cohere's API: chats, embeddings and reranking. Jina and vLLM have the same reranking."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.cohere.chat import CohereChatBody, chat
from penstock.serve.cohere.embed import CohereEmbedBody, CohereEmbeddings, embed
from penstock.serve.cohere.rerank import Ranking, RerankBody, rerank, rerank_v2
from penstock.serve.cohere.write import CohereAnswer, CohereEvent, cohere_words
from penstock.serve.http.checks import Wording


def _routes(parts: Parts) -> Sequence[Route]:
    texts = parts.texts_route
    return [
        parts.call_route("POST /v2/chat", "Chat", CohereChatBody, chat, CohereAnswer, CohereEvent),
        texts("POST /v2/embed", "Embed", CohereEmbedBody, embed, CohereEmbeddings),
        texts("POST /v2/rerank", "Rerank", RerankBody, rerank_v2, Ranking),
        texts("POST /v1/rerank /rerank", "Rerank", RerankBody, rerank, Ranking),
    ]


API = Api("Cohere", _routes, Wording(cohere_words, paths="/v2/"))
