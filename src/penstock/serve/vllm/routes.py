"""Routes of vLLM besides OpenAI's: scores, labels, pooling, tokens and adapters."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.serve.api import Api, Parts, Route
from penstock.serve.vllm.adapters import AdaptersEndpoint, LoadAdapterBody, UnloadAdapterBody
from penstock.serve.vllm.texts import Classes, ClassifyBody, Pooling, PoolingBody, ScoreBody, Scores, classify, pooling, score
from penstock.serve.vllm.tokenize import DetokenizeBody, Detokenized, TokenizeBody, TokenizeEndpoint, Tokens


def _routes(parts: Parts) -> Sequence[Route]:
    texts, lora, tokens = parts.texts_route, AdaptersEndpoint(parts), TokenizeEndpoint(parts)
    return [
        texts("POST /v1/score /score", "Score pairs", ScoreBody, score, Scores),
        texts("POST /classify", "Classify", ClassifyBody, classify, Classes),
        texts("POST /pooling", "A model's numbers", PoolingBody, pooling, Pooling),
        Route("POST /tokenize", "Tokenize", tokens.tokenize, TokenizeBody, Tokens),
        Route("POST /detokenize", "Detokenize", tokens.detokenize, DetokenizeBody, Detokenized),
        Route("POST /v1/load_lora_adapter", "Load an adapter", lora.load, LoadAdapterBody, str, media_type="text/plain"),
        Route(
            "POST /v1/unload_lora_adapter", "Forget an adapter", lora.unload, UnloadAdapterBody, str, media_type="text/plain"
        ),
    ]


API = Api("vLLM", _routes)
