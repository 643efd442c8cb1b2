"""`POST /v2/chat`, Cohere's chat (https://docs.cohere.com/reference/chat). The body becomes a chat of OpenAI's; `write` has the
answer. Cohere's embeddings and reranking are in `serve/texts`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from penstock.calls.call import Call
from penstock.serve.api import Parts
from penstock.serve.asking import CallEndpoint
from penstock.serve.bodies import (
    INT32_MAX,
    INT32_MIN,
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_TOKENS_LIMIT,
    MAX_TOOLS,
    Body,
    NotYet,
    ReasoningBudget,
    Schema,
    StopStrings,
    ToolBody,
    ToolCallBody,
    Unread,
    check_body,
    parse_body,
)
from penstock.serve.cohere.write import CohereWriter
from penstock.serve.errors import invalid
from penstock.serve.openai.read import call_of_chat
from penstock.serve.openai.schemas import ChatCompletionBody
from penstock.serve.streams import NewWriter

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "response_format.json_schema.schema": "response_format.json_schema",
        "thinking_token_budget": "thinking.token_budget",
        "reasoning_effort": "thinking",
        "stop": "stop_sequences",
        "top_k": "k",
        "top_p": "p",
    }
)
"""Fields of OpenAI's chat -> their names here, for errors."""
_TOOL_CHOICES = {"REQUIRED": "required", "NONE": "none"}


class CohereMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Any = None
    """A string, or a list of parts."""
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_plan: str | None = None
    """Text of the assistant before its calls."""
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)] | None = None
    citations: Annotated[Any, NotYet([])] = None


class CohereFormat(Body):
    type: Literal["text", "json_object"]
    json_schema: Schema | None = None
    """The schema of the answer. Without it the answer is any JSON object."""


class CohereThinking(Body):
    type: Literal["enabled", "disabled"]
    token_budget: ReasoningBudget | None = None


class CohereChatBody(Body):
    """`POST /v2/chat`. Null is the same as absent."""

    model: str | None = None
    messages: Annotated[list[CohereMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    """Without it the model may call tools."""
    strict_tools: Unread = None
    """Calls always follow their schemas."""
    response_format: CohereFormat | None = None
    thinking: CohereThinking | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    stop_sequences: StopStrings | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] | None = None
    frequency_penalty: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=0, le=1)] | None = None
    k: Annotated[int, Field(ge=0, le=500)] | None = None
    """Keep the k most likely tokens; 0 keeps all."""
    p: Annotated[float, Field(gt=0, le=1)] | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    documents: Annotated[Any, NotYet([])] = None
    citation_options: Annotated[Any, NotYet({"mode": "OFF"})] = None
    safety_mode: Annotated[Any, NotYet("OFF", "NONE", "CONTEXTUAL")] = None
    """The server adds no safety instructions, so there are none to change."""
    logprobs: Annotated[Any, NotYet(False)] = None


class CohereChat(CallEndpoint):
    def __init__(self, parts: Parts) -> None:
        super().__init__(parts.reader, parts.in_flight, parts.off_loop)

    async def chat(self, data: bytes, http: HttpRequest) -> Response:
        """Answer a conversation, in the shape of Cohere's chat."""
        return await self.answer(data, http, self._read, NAMES)

    def _read(self, data: bytes, scope: Scope) -> tuple[Call, NewWriter]:
        body = parse_body(data, CohereChatBody, self.reader.ignored)
        return call_of_chat(self.reader, check_body(_chat(body), ChatCompletionBody), data, scope), CohereWriter


def _chat(body: CohereChatBody) -> dict[str, Any]:
    """Return the fields of OpenAI's chat."""
    return {
        "model": body.model,
        "messages": [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)],
        "stream": body.stream,
        "tools": body.tools,
        "tool_choice": None if body.tool_choice is None else _TOOL_CHOICES[body.tool_choice],
        "response_format": _response_format(body.response_format),
        "max_tokens": body.max_tokens,
        "stop": body.stop_sequences,
        "temperature": body.temperature,
        "seed": body.seed,
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "top_k": body.k,
        "top_p": body.p,
        "priority": body.priority,
        **_thinking(body.thinking),
    }


def _message(message: CohereMessage, param: str) -> dict[str, Any]:
    if message.tool_plan and message.content:
        raise invalid(f"'{param}' has both 'tool_plan' and 'content': send the text once.", f"{param}.tool_plan")
    return {
        "role": message.role,
        "content": message.tool_plan or "" if message.content in (None, "", []) else _content(message.content),
        "reasoning_content": _reasoning(message.content, f"{param}.content"),
        "tool_calls": message.tool_calls,
        "tool_call_id": message.tool_call_id,
    }


def _content(content: Any) -> Any:
    """Return OpenAI's parts for Cohere's, one for each, so that errors name the client's."""
    return [_as_text(part) for part in content] if isinstance(content, list) else content


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _reasoning(content: Any, param: str) -> str | None:
    """Return the text of the parts of reasoning, or None. Raises 400."""
    texts: list[str] = []
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not _is_thinking(part):
            continue
        text = part.get("thinking")
        if not isinstance(text, str):
            raise invalid(f"'{param}[{index}].thinking' must be a string.", f"{param}[{index}].thinking")
        texts.append(text)
    return "".join(texts) or None


def _as_text(part: Any) -> Any:
    """Return a tool's document as a part of text, and a part of reasoning as an empty one. The chat checks all others."""
    if _is_thinking(part):
        return {"type": "text", "text": ""}
    document = part.get("document") if isinstance(part, dict) and part.get("type") == "document" else None
    data = document.get("data") if isinstance(document, dict) else None
    return {"type": "text", "text": data} if isinstance(data, str) else part


def _response_format(asked: CohereFormat | None) -> dict[str, Any] | None:
    if asked is None or asked.type == "text":
        return None
    if asked.json_schema is None:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": asked.json_schema}}


def _thinking(thinking: CohereThinking | None) -> dict[str, Any]:
    if thinking is None:
        return {}
    if thinking.type == "disabled":
        if thinking.token_budget is not None:
            raise invalid("'thinking.token_budget' needs 'thinking.type' 'enabled'.", "thinking.token_budget")
        return {"reasoning_effort": "none"}
    return {"thinking_token_budget": thinking.token_budget}
