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
    texts, answer_chat = parts.texts, parts.calls.answers(CohereChatBody, chat)
    return [
        Route("POST /v2/chat", "Chat", answer_chat, CohereChatBody, CohereAnswer, CohereEvent),
        Route("POST /v2/embed", "Embed", texts.answers(CohereEmbedBody, embed), CohereEmbedBody, CohereEmbeddings),
        Route("POST /v2/rerank", "Rerank", texts.answers(RerankBody, rerank_v2), RerankBody, Ranking),
        Route("POST /v1/rerank /rerank", "Rerank", texts.answers(RerankBody, rerank), RerankBody, Ranking),
    ]


API = Api("Cohere", _routes, Wording(cohere_words, paths="/v2/chat"))
