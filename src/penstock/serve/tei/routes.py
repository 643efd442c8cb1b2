"""The API of text-embeddings-inference. `/rerank`, `/tokenize` and `/` belong to other APIs, too."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.http.checks import Wording
from penstock.serve.shapes import Vector
from penstock.serve.tei.texts import (
    EmbedBody,
    PredictBody,
    TeiEndpoint,
    TeiInfo,
    TeiLabel,
    TeiRanked,
    TeiRerankBody,
    TeiToken,
    TeiTokenizeBody,
    tei_words,
)

_Labels = list[TeiLabel] | list[list[TeiLabel]]


def _routes(parts: Parts) -> Sequence[Route]:
    tei = TeiEndpoint(parts)
    with_texts, with_inputs = parts.has_field("texts"), parts.has_field("inputs")
    return [
        Route("POST", "/embed", "Embed", tei.embed, EmbedBody, list[Vector]),
        Route("POST", "/predict", "Classify", tei.predict, PredictBody, _Labels),
        Route("POST", "/rerank", "Rerank", tei.rerank, TeiRerankBody, list[TeiRanked], when=with_texts),
        Route("POST", "/tokenize", "Tokenize", tei.tokenize, TeiTokenizeBody, list[list[TeiToken]], when=with_inputs),
        Route(
            "POST",
            "/",
            "What the default model is for",
            tei.root,
            EmbedBody | TeiRerankBody | PredictBody,
            list[Vector] | list[TeiRanked] | _Labels,
            when=tei.reads_texts,
        ),
        Route("GET", "/info", "The default model", tei.info, returns=TeiInfo),
    ]


API = Api("text-embeddings-inference", _routes, Wording(tei_words, paths=("/embed", "/predict", "/info")))
