"""`POST /tokenize` and `/detokenize`, in vLLM's shapes: what the model's tokenizer and chat template make of an input."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from penstock.serve.openai.errors import invalid
from penstock.serve.openai.messages import num_chars, render_prompt, template_messages
from penstock.serve.openai.prompts import encode_text, off_loop_if_long
from penstock.serve.openai.schemas import Body, ChatMessage, ChatTemplateFields, TokenId
from penstock.serve.openai.unsupported import refuse_unsupported
from penstock.serve.openai.validation import check_model, check_token_ids
from penstock.serve.runtime import Runtime


class TokenizeBody(ChatTemplateFields):
    """Either `prompt`, or `messages` with the fields that a chat has."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    """Default: true for a prompt, false for messages, whose template writes them."""
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId]


class TokenizeEndpoint:
    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def tokenize(self, body: TokenizeBody) -> dict[str, Any]:
        """Token ids of a text or of a conversation."""
        refuse_unsupported(body)
        check_model(body.model, self._runtime.model)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either 'prompt' or 'messages'.", "prompt")
        tokenizer = self._runtime.tokenizer
        text = body.prompt if body.prompt is not None else await self._render(body)
        adds_special_tokens = (body.prompt is not None) if body.add_special_tokens is None else body.add_special_tokens
        token_ids = await encode_text(tokenizer, text, add_special_tokens=adds_special_tokens)
        return {
            "count": len(token_ids),
            "max_model_len": self._runtime.model.max_model_len,
            "tokens": token_ids,
            "token_strs": [tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None,
        }

    async def detokenize(self, body: DetokenizeBody) -> dict[str, Any]:
        """The text of token ids, special tokens included."""
        check_model(body.model, self._runtime.model)
        check_token_ids(body.tokens, self._runtime.model.vocab_size, "tokens")
        return {"prompt": self._runtime.tokenizer.decode(body.tokens, skip_special_tokens=False)}

    async def _render(self, body: TokenizeBody) -> str:
        messages = template_messages(body.messages or ())
        return await off_loop_if_long(num_chars(messages), lambda: render_prompt(self._runtime.chat_template, body, messages))
