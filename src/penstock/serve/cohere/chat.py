"""`POST /v2/chat`, Cohere's chat (https://docs.cohere.com/reference/chat)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from penstock import fast_json
from penstock.calls.call import Call, ChatRequest, Conversation, Names, ToolChoice
from penstock.serve.asking import Asked
from penstock.serve.bodies import (
    Body,
    MaxTokens,
    Priority,
    ReasoningBudget,
    Schema,
    StopStrings,
    Unread,
    check_depth,
    has_not_yet,
    has_sampling,
    json_grammar,
    sampling_of,
)
from penstock.serve.cohere.write import CohereWriter
from penstock.serve.errors import invalid
from penstock.serve.messages import (
    MAX_MESSAGES,
    CallId,
    ToolBodies,
    ToolCallBodies,
    check_results,
    make_message,
    read_tools,
)
from penstock.serve.streams import NewWriter
from penstock.text.dialects import Message
from penstock.text.grammar import Grammar

_NAMES = Names(
    "cohere",
    fields={"tools.*": "tools[{}].function", "stop": "stop_sequences", "max_reasoning_tokens": "thinking.token_budget"}
    | {"reasoning_effort": "thinking"},
)
_EFFORTS = {"enabled": "medium", "disabled": "none"}
"""Cohere's `thinking.type` -> the effort for the chat template. Some templates do not reason unless they get one."""
_TOOL_CHOICES = {"REQUIRED": ToolChoice("required"), "NONE": ToolChoice("none")}


@has_not_yet("citations=[]")
class CohereMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: Any = None
    """A string, or a list of parts."""
    tool_calls: ToolCallBodies | None = None
    tool_plan: str | None = None
    """The assistant's text before its calls."""
    tool_call_id: CallId | None = None


class CohereFormat(Body):
    type: Literal["text", "json_object"]
    json_schema: Schema | None = None
    """The schema of the answer. Without a schema, the answer is any JSON object."""


class CohereThinking(Body):
    type: Literal["enabled", "disabled"]
    token_budget: ReasoningBudget | None = None


@has_sampling("cohere")
# The server adds no safety instructions.
@has_not_yet('documents=[] citation_options={"mode":"OFF"} logprobs=false safety_mode="OFF"|"NONE"|"CONTEXTUAL"')
class CohereChatBody(Body):
    """`POST /v2/chat`. Null is the same as absent."""

    model: str | None = None
    messages: Annotated[list[CohereMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    stream: bool | None = None
    tools: ToolBodies | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    """Without this field, the model may call tools or not."""
    strict_tools: Unread = None
    """No effect: calls always follow their schemas."""
    response_format: CohereFormat | None = None
    thinking: CohereThinking | None = None
    max_tokens: MaxTokens | None = None
    stop_sequences: StopStrings | None = None
    priority: Priority | None = None


def chat(body: CohereChatBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Answer a conversation, in the shape of Cohere's chat."""
    return asked.call(_request(body)), CohereWriter


def _request(body: CohereChatBody) -> ChatRequest:
    thinking, names = body.thinking, [tool.function.name for tool in body.tools or ()]
    effort = None if thinking is None else _EFFORTS[thinking.type]
    budget = None if thinking is None or thinking.token_budget == -1 else thinking.token_budget
    if effort == "none" and budget is not None:
        raise invalid("'thinking.token_budget' needs 'thinking.type' 'enabled'.", "thinking.token_budget")
    if body.tool_choice == "REQUIRED" and not names:
        raise invalid("'tool_choice' is 'REQUIRED', but there are no 'tools'.", "tool_choice")
    messages = [_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    check_results(messages)
    asked = body.response_format
    return ChatRequest(
        names=_NAMES,
        answer_prefix="chatcmpl-",
        model=body.model,
        conversation=Conversation(messages),
        is_streamed=bool(body.stream),
        tools=read_tools(body.tools or ()),
        tool_choice=ToolChoice() if body.tool_choice is None else _TOOL_CHOICES[body.tool_choice],
        grammar=None if asked is None or asked.type == "text" else _grammar(asked),
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or (),
        sampling=sampling_of(body, "cohere"),
        priority=body.priority,
        reasoning_effort=effort,
        max_reasoning_tokens=budget,
    )


def _grammar(asked: CohereFormat) -> Grammar:
    schema = asked.json_schema
    return json_grammar(schema, "response_format" if schema is None else "response_format.json_schema")


def _message(message: CohereMessage, at: str) -> Message:
    content = [] if message.content in (None, "") else message.content
    if message.tool_plan:
        if not isinstance(content, list) or not all(map(_is_thinking, content)):
            raise invalid(f"'{at}' has both 'tool_plan' and 'content': send the text once.", f"{at}.tool_plan")
        content = [*content, {"type": "text", "text": message.tool_plan}]
    if isinstance(content, list):
        content = [_as_text(part, f"{at}.content[{index}]") for index, part in enumerate(content)] or ""
    return make_message(
        at,
        message.role,
        content,
        calls=message.tool_calls or (),
        call_id=message.tool_call_id,
        reasoning=_reasoning(message.content, f"{at}.content"),
    )


def _is_thinking(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def _reasoning(content: Any, param: str) -> str:
    """Return the joined texts of a message's reasoning parts. Raises 400."""
    texts: list[str] = []
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if _is_thinking(part):
            text = part.get("thinking")
            if not isinstance(text, str):
                raise invalid(f"'{param}[{index}].thinking' must be a string.", f"{param}[{index}].thinking")
            texts.append(text)
    return "".join(texts)


def _as_text(part: Any, param: str) -> Any:
    """Return a content part as text. Reasoning becomes an empty text, so that errors have the indices of the client's parts.

    A document's object becomes JSON. Raises 400 if it is nested too deeply.
    """
    if _is_thinking(part):
        return {"type": "text", "text": ""}
    document = part.get("document") if isinstance(part, dict) and part.get("type") == "document" else None
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, dict):
        check_depth(data, f"{param}.document.data")
        data = fast_json.dumps(data).decode()
    return {"type": "text", "text": data} if isinstance(data, str) else part
