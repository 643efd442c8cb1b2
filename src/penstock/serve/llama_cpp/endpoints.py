"""`POST /apply-template`, `/chat/completions/input_tokens`, and `/tokenize` with `content`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import WithJsonSchema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from typing_extensions import TypedDict

from penstock.calls.call import Call, Conversation, TextPrompt
from penstock.calls.check import check_prompt
from penstock.calls.prompts import check_text_size, mixed_ids
from penstock.deploy.running import RunningModel
from penstock.serve.answering import answer_off_loop, answer_prompt
from penstock.serve.api import Parts
from penstock.serve.asking import Asked, find_model
from penstock.serve.bodies import Body, has_not_yet
from penstock.serve.errors import invalid
from penstock.serve.llama_cpp.read import read_mixed
from penstock.serve.shapes import Count
from penstock.serve.texts.tokens import MAX_TOLD_TOKENS

ReadChat = Callable[[Asked], Call]
"""Reads a body of `/v1/chat/completions` into a call."""


@has_not_yet("parse_special=true")
class LlamaTokenizeBody(Body):
    model: str | None = None
    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array"}]})]
    """A text, or a list of token ids and texts."""
    add_special: bool | None = None
    """True adds the tokens that begin and end every text."""
    with_pieces: bool | None = None


InputTokens = TypedDict("InputTokens", {"object": Literal["response.input_tokens"], "input_tokens": Count})
LlamaPrompt = TypedDict("LlamaPrompt", {"prompt": str})
LlamaPiece = TypedDict("LlamaPiece", {"id": Count, "piece": str | list[Count]})
LlamaTokens = TypedDict("LlamaTokens", {"tokens": list[Count] | list[LlamaPiece]})


class LlamaEndpoint:
    def __init__(self, parts: Parts, read_chat: ReadChat) -> None:
        self._parts = parts
        self._read_chat = read_chat

    async def apply_template(self, data: bytes, http: HttpRequest) -> Response:
        """Return the prompt for a body of `/v1/chat/completions`, made by the model's chat template."""
        return await self._of_chat(data, http, lambda prompt, _running: LlamaPrompt(prompt=prompt.text))

    async def input_tokens(self, data: bytes, http: HttpRequest) -> Response:
        """Count the tokens of a body of `/v1/chat/completions`."""
        return await self._of_chat(data, http, _input_tokens)

    async def _of_chat(self, data: bytes, http: HttpRequest, make: Callable[[TextPrompt, RunningModel], object]) -> Response:
        asked = Asked(self._parts.reader, data, http.scope)
        call = await asked.reader.parse(data, lambda: self._read_chat(asked), http.scope)
        assert isinstance(call.prompts, Conversation)
        return await answer_prompt(call.prompts, call.running, data, http, make)

    async def tokenize(self, data: bytes, http: HttpRequest) -> Response:
        """Return the token ids of a text."""
        body = await self._parts.reader.body(data, LlamaTokenizeBody, http.scope)
        running = find_model(body.model, self._parts.deployment, http.scope)
        with running.using():
            return await answer_off_loop(running, len(data), partial(_tokens, body, running), http)


def _input_tokens(prompt: TextPrompt, running: RunningModel) -> InputTokens:
    check_text_size(prompt.text, running, prompt.param)
    return {"object": "response.input_tokens", "input_tokens": len(prompt.encode(running.tokenizer))}


def _tokens(body: LlamaTokenizeBody, running: RunningModel) -> LlamaTokens:
    parts = [body.content] if isinstance(body.content, str) else body.content
    if not isinstance(parts, list):
        raise invalid("'content' must be a string, or a list of token ids and strings.", "content")
    prompt = read_mixed(parts, "content")
    check_prompt(prompt, running.model.vocab_size)
    token_ids = mixed_ids(prompt, running, adds_special_tokens=bool(body.add_special))
    if not body.with_pieces:
        return {"tokens": list(token_ids)}
    if len(token_ids) > MAX_TOLD_TOKENS:
        raise invalid(
            f"'content' has {len(token_ids)} tokens; one answer has the pieces of at most {MAX_TOLD_TOKENS}. Send it in parts, "
            "or leave out 'with_pieces'.",
            "with_pieces",
        )
    pieces = {token_id: _piece(running.tokenizer.token_bytes(token_id)) for token_id in set(token_ids)}
    told: list[LlamaPiece] = [{"id": token_id, "piece": pieces[token_id]} for token_id in token_ids]
    return {"tokens": told}


def _piece(data: bytes) -> str | list[int]:
    """Return the text of a token, or its bytes if they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
