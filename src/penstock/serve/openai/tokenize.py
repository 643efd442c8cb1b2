"""`POST /tokenize` and `/detokenize`, in vLLM's shapes: what the model's tokenizer and chat template make of an input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field

from penstock.config import ServerConfig
from penstock.deploy.running import RunningModel
from penstock.serve.call import read_owner
from penstock.serve.http.connection import unless_gone
from penstock.serve.openai.errors import invalid
from penstock.serve.openai.messages import render_prompt, template_messages
from penstock.serve.openai.schemas import MAX_TOKEN_IDS, Body, ChatTemplateFields, Messages, TokenId
from penstock.serve.openai.validation import check_model, check_text_size, check_token_ids
from penstock.text.tokenizer import Tokenizer

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields that say how messages become a prompt."""


class TokenizeBody(ChatTemplateFields):
    """Either `prompt`, or `messages` with the fields that a chat has."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]


class TokenizeEndpoint:
    def __init__(self, runtime: RunningModel, config: ServerConfig) -> None:
        self._runtime = runtime
        self._config = config

    async def tokenize(self, body: TokenizeBody, http: HttpRequest) -> Response:
        """Token ids of a text or of a conversation."""
        check_model(body.model, self._runtime.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        for name in _OF_MESSAGES if body.messages is None else ():
            if getattr(body, name) is not None:
                raise invalid(f"'{name}' needs 'messages': a 'prompt' is tokenised as it stands.", name)
        num_bytes, text = len(await http.body()), body.prompt
        if text is None:
            tenant = read_owner(http.scope, self._config).tenant
            rendering = self._runtime.off_loop.render(tenant, num_bytes, lambda: self._render(body))
            text = await unless_gone(http, rendering)
        return await self._answer(max(num_bytes, len(text)), lambda: self._tokens(body, text))

    async def detokenize(self, body: DetokenizeBody, http: HttpRequest) -> Response:
        """The text of token ids, special tokens included."""
        check_model(body.model, self._runtime.model)
        return await self._answer(len(await http.body()), lambda: self._text(body))

    def _render(self, body: TokenizeBody) -> str:
        return render_prompt(self._runtime.chat_template, body, template_messages(body.messages or ()))

    def _tokens(self, body: TokenizeBody, text: str) -> dict[str, Any]:
        runtime = self._runtime
        check_text_size(text, runtime.tokenizer, runtime.model, "messages" if body.prompt is None else "prompt")
        adds_special_tokens = (body.prompt is not None) if body.add_special_tokens is None else body.add_special_tokens
        token_ids = runtime.tokenizer.encode(text, add_special_tokens=adds_special_tokens)
        return {
            "count": len(token_ids),
            "max_model_len": runtime.model.max_model_len,
            "tokens": token_ids,
            "token_strs": _token_texts(runtime.tokenizer, token_ids) if body.return_token_strs else None,
        }

    def _text(self, body: DetokenizeBody) -> dict[str, Any]:
        check_token_ids(body.tokens, self._runtime.model.vocab_size, "tokens")
        return {"prompt": self._runtime.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    async def _answer(self, size: int, make: Callable[[], dict[str, Any]]) -> Response:
        """What `make` says, as JSON; off the event loop if its input is large."""
        data = await self._runtime.off_loop.run(size, lambda: orjson.dumps(make()))
        return Response(data, media_type="application/json")


def _token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    # A long text has few different tokens.
    texts = {token_id: tokenizer.token_text(token_id) for token_id in set(token_ids)}
    return [texts[token_id] for token_id in token_ids]
