"""The API of llama.cpp's server (https://github.com/ggml-org/llama.cpp/tree/master/tools/server)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from penstock.serve.api import Api, Parts, Refused, Route
from penstock.serve.bodies import Body
from penstock.serve.http.checks import Wording
from penstock.serve.llama_cpp.endpoints import (
    InputTokens,
    LlamaEndpoint,
    LlamaPrompt,
    LlamaTokenizeBody,
    LlamaTokens,
    ReadChat,
)
from penstock.serve.llama_cpp.read import LlamaCompletionBody, LlamaInfillBody, completion, infill
from penstock.serve.llama_cpp.status import LlamaProps, LlamaSlot, LlamaStatus
from penstock.serve.llama_cpp.texts import LlamaEmbedding, LlamaEmbeddingBody, embedding
from penstock.serve.llama_cpp.write import LlamaCompletion, llama_words


def _routes(parts: Parts, read_chat: ReadChat, chat_body: type[Body]) -> Sequence[Route]:
    llama, status = LlamaEndpoint(parts, read_chat), LlamaStatus(parts)
    call, texts, with_content = parts.call_route, parts.texts_route, parts.has_field("content")
    completed, embeddings = LlamaCompletion | list[LlamaCompletion], list[LlamaEmbedding]
    return [
        call("POST /completion", "Complete", LlamaCompletionBody, completion, completed, LlamaCompletion),
        call("POST /infill", "Fill in the middle", LlamaInfillBody, infill, completed, LlamaCompletion),
        Route(
            "POST /v1/chat/completions/input_tokens /chat/completions/input_tokens",
            "Count a chat's tokens",
            llama.input_tokens,
            chat_body,
            InputTokens,
        ),
        Route("POST /apply-template", "Make a prompt of a chat", llama.apply_template, chat_body, LlamaPrompt),
        Route("POST /tokenize", "Tokenize", llama.tokenize, LlamaTokenizeBody, LlamaTokens, when=with_content),
        texts("POST /embedding", "Embed", LlamaEmbeddingBody, embedding, embeddings),
        texts("POST /embeddings", "Embed", LlamaEmbeddingBody, embedding, embeddings, when=with_content),
        Route("GET /props", "What a model is", status.props, returns=LlamaProps, query=["model"]),
        Route("GET /slots", "What runs", status.slots, returns=list[LlamaSlot], query=["model", "fail_on_no_slot"]),
    ]


_NO_SLOTS = "No slot is saved or erased: all requests share prefixes, which stay in the cache by themselves."
_NO_LIST = "Name an adapter in 'model': GET /v1/models lists them."


def api(read_chat: ReadChat, chat_body: type[Body]) -> Api:
    """Return the API. `read_chat` and `chat_body` are for two routes with the body of `/v1/chat/completions`."""
    return Api(
        "llama.cpp",
        partial(_routes, read_chat=read_chat, chat_body=chat_body),
        Wording(
            llama_words,
            paths="/completion /infill /apply-template /embedding /props /slots /lora-adapters /slots/",
        ),
        takes_any_type=True,
        refused=[
            Refused(f"{method} {path}", reason, status=404, code="not_found")
            for path, reason in (("/lora-adapters", _NO_LIST), ("/slots/{slot_id}", _NO_SLOTS))
            for method in ("GET", "POST")
        ],
    )
