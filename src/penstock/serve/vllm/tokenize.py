"""`POST /tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope
from typing_extensions import TypedDict

from penstock.calls.call import Conversation, TextPrompt
from penstock.calls.check import check_token_ids
from penstock.calls.prompts import check_text_size
from penstock.deploy.running import RunningModel
from penstock.serve.answering import answer_off_loop, answer_prompt
from penstock.serve.api import Parts
from penstock.serve.asking import find_model
from penstock.serve.bodies import MAX_TOKEN_IDS, Body, TokenId, parse_body
from penstock.serve.errors import invalid
from penstock.serve.messages import ChatTemplateFields, Messages, read_conversation_with_tools
from penstock.serve.shapes import Count
from penstock.text.tokenizer import Tokenizer

_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")
"""Fields that apply only to `messages`."""


class TokenizeBody(ChatTemplateFields):
    """The body of `/tokenize`: either `prompt`, or `messages` with the fields of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """The default is true for a prompt. It is false for messages, since the chat template writes special tokens."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]


class Tokens(TypedDict):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


Detokenized = TypedDict("Detokenized", {"prompt": str, "content": str})


class TokenizeEndpoint:
    def __init__(self, parts: Parts) -> None:
        self._reader = parts.reader

    async def tokenize(self, data: bytes, http: HttpRequest) -> Response:
        """Return the token ids of a text or of a conversation."""
        running, prompt, body = await self._reader.parse(data, lambda: self._read(data, http.scope), http.scope)
        return await answer_prompt(prompt, running, data, http, partial(_tokens, body))

    async def detokenize(self, data: bytes, http: HttpRequest) -> Response:
        """Return the text of token ids, with special tokens: as `prompt` for vLLM's clients, as `content` for llama.cpp's."""
        body = await self._reader.body(data, DetokenizeBody, http.scope)
        running = find_model(body.model, self._reader.deployment, http.scope)
        with running.using():
            return await answer_off_loop(running, len(data), partial(_text, body, running), http)

    def _read(self, data: bytes, scope: Scope) -> tuple[RunningModel, TextPrompt | Conversation, TokenizeBody]:
        body = parse_body(data, TokenizeBody, self._reader.ignored)
        running = find_model(body.model, self._reader.deployment, scope)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        if body.prompt is None:
            return running, read_conversation_with_tools(body), body
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise invalid(f"'{name}' needs 'messages': a 'prompt' is tokenised as it stands.", name)
        return running, TextPrompt(body.prompt, "prompt"), body


def _tokens(body: TokenizeBody, prompt: TextPrompt, running: RunningModel) -> Tokens:
    check_text_size(prompt.text, running, prompt.param)
    adds_special_tokens = (body.prompt is not None) if body.add_special_tokens is None else body.add_special_tokens
    token_ids = prompt.encode(running.tokenizer, add_special_tokens=adds_special_tokens)
    return {
        "count": len(token_ids),
        "max_model_len": running.model.capacity.max_model_len,
        "tokens": token_ids,
        "token_strs": _token_texts(running.tokenizer, token_ids) if body.return_token_strs else None,
    }


def _text(body: DetokenizeBody, running: RunningModel) -> Detokenized:
    check_token_ids(body.tokens, running.model.vocab_size, "tokens")
    text = running.tokenizer.decode(body.tokens, skip_special_tokens=False)
    return {"prompt": text, "content": text}


def _token_texts(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    # Each different token is decoded once.
    texts = {token_id: tokenizer.token_text(token_id) for token_id in set(token_ids)}
    return [texts[token_id] for token_id in token_ids]
