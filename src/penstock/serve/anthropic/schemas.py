"""Request bodies of Anthropic's Messages API (https://platform.claude.com/docs/en/api/messages).

`read` checks messages and their blocks, so that an error can name the block.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.serve.bodies import (
    INT32_MAX,
    Body,
    MaxTokens,
    NoEffect,
    Schema,
    StopList,
    Unread,
    has_not_yet,
    has_sampling,
    has_unread,
)
from penstock.serve.errors import RULE, shorten
from penstock.serve.messages import MAX_MESSAGES, MAX_TOOLS, Description

_BLOCKS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}


def _a_tool_of_the_client(value: Any) -> Any:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in (None, "custom"):
        return value
    message = "has the type {kind}: only tools with an 'input_schema', whose type is 'custom', are supported"
    raise PydanticCustomError(RULE, message, {"kind": repr(kind) if not isinstance(kind, str) else repr(shorten(kind))})


class MessageBody(Body):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Any, WithJsonSchema(_BLOCKS)]
    """A string, or a list of blocks."""


@has_not_yet('allowed_callers=[]|["direct"] input_examples=[]')
class ClientTool(Body):
    """A tool that the client runs."""

    name: str
    description: Description | None = None
    input_schema: Schema
    type: Literal["custom"] | None = None
    strict: bool | None = None
    """True refuses a schema that can't be enforced. Otherwise such a tool accepts any object."""
    defer_loading: bool | None = None
    """True leaves the tool out of the prompt until a tool's result has a `tool_reference` to it."""
    eager_input_streaming: Unread = None
    """No effect: input is always streamed as the model writes it."""
    cache_control: Unread = None


class ToolChoiceBody(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """The tool, for the type `tool`."""
    disable_parallel_tool_use: bool | None = None


class ThinkingBody(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    """The end of the reasoning is forced after this many tokens."""
    display: Literal["summarized", "updates", "omitted"] | None = None
    """`omitted` leaves the reasoning out of the answer. Otherwise the answer shows it in full."""


class OutputFormatBody(Body):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfigBody(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatBody | None = None


class ClearThinking(Body):
    """A context edit that drops earlier reasoning. Only `keep` `all` is supported, which drops nothing."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagementBody(Body):
    edits: Annotated[list[ClearThinking], Field(fail_fast=True)] | None = None


class MetadataBody(Body):
    user_id: Annotated[Annotated[str, Field(max_length=512)] | None, NoEffect()] = None


@has_unread("cache_control speed")
@has_not_yet("mcp_servers=[]")
class CountTokensBody(Body):
    """`POST /v1/messages/count_tokens`: the fields that make up the prompt."""

    model: str
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[Any, WithJsonSchema(_BLOCKS)] = None
    """A string, or a list of text blocks."""
    tools: (
        Annotated[
            list[Annotated[ClientTool, BeforeValidator(_a_tool_of_the_client)]], Field(max_length=MAX_TOOLS, fail_fast=True)
        ]
        | None
    ) = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    """Without this field the model does not reason."""
    output_config: OutputConfigBody | None = None

    context_management: ContextManagementBody | None = None


@has_unread("diagnostics inference_geo service_tier")
@has_sampling("anthropic")
@has_not_yet("container")
class MessagesBody(CountTokensBody):
    """`POST /v1/messages`."""

    max_tokens: MaxTokens
    stream: bool | None = None
    stop_sequences: StopList | None = None
    metadata: MetadataBody | None = None
    thread: Annotated[Any, WithJsonSchema({"type": "null"})] = None
    """Refused by `read` with the code on which clients send whole conversations."""
