"""The body of `POST /v1/responses` and the items in its `input`. Rules about several fields are in `read`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock.serve.bodies import (
    INT32_MAX,
    Body,
    CacheSalt,
    LogitBias,
    MaxTokens,
    Metadata,
    NoEffect,
    NumLogprobs,
    Priority,
    ReasoningBudget,
    RequestId,
    Schema,
    StopStrings,
    TemplateVariables,
    Unread,
    has_not_yet,
    has_sampling,
    has_unread,
)
from penstock.serve.messages import MAX_TOOLS, CallId, Description

MAX_ID_CHARS = 512
"""The longest id of an item or a response. The server's own ids are shorter."""
ItemId = Annotated[str, Field(max_length=MAX_ID_CHARS)]
ItemStatus = Literal["in_progress", "completed", "incomplete"]
LOGPROBS = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
"""Words of `include`. Only the first has an effect."""


@has_not_yet('allowed_callers=[]|["direct"] async=false defer_loading=false output_schema={}')
class FunctionBody(Body):
    """A function that an answer can call. Its schema is always enforced. With `strict`, a schema that can't be is refused."""

    type: Literal["function"]
    name: str
    description: Description | None = None
    parameters: Annotated[Schema | None, WithJsonSchema({"type": "object"})] = None
    strict: bool | None = None


class NamespaceTool(Body):
    """A group of functions. A call names the function and the namespace."""

    type: Literal["namespace"]
    name: str
    description: Description | None = None
    tools: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS, fail_fast=True)]


# An answer shows the reasoning itself, not a summary.
@has_not_yet('summary="auto" generate_summary="auto" context="auto" mode="standard"')
class ReasoningOptions(Body):
    effort: str | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema"), WithJsonSchema({"type": "object"})] = None
    strict: bool | None = None


class TextOptions(Body):
    format: TextFormat | None = None
    verbosity: Unread = None


class ResponseStreamOptions(Body):
    include_obfuscation: Unread = None


@has_unread("client_metadata prompt_cache_options prompt_cache_retention service_tier")
@has_sampling("responses")
@has_not_yet(
    'access_programs={} background_options={}|{"completion_window":"soonest"} context_management=[] conversation '
    'image={}|{"context_compression":"auto"} moderation prompt'
)
class ResponsesBody(Body):
    """`POST /v1/responses`. Null is the same as absent."""

    input: Annotated[
        Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}, "minItems": 1}]})
    ]
    """`read` checks the items."""
    instructions: str | None = None
    """A system message before all others, for this response only."""
    previous_response_id: Annotated[str, Field(max_length=MAX_ID_CHARS)] | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    store: bool | None = None
    """The default is true if the server keeps responses."""
    include: Annotated[list[Included], Field(max_length=32, fail_fast=True)] | None = None

    max_output_tokens: MaxTokens | None = None
    top_logprobs: NumLogprobs | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, NoEffect()] = None
    """No effect: a conversation that is too long is refused."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}, "maxItems": MAX_TOOLS})] = None
    """`tools` checks this field."""
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    """`read` checks this field."""
    parallel_tool_calls: bool | None = None
    """False allows at most one call."""
    max_tool_calls: Annotated[Annotated[int, Field(ge=1, le=INT32_MAX)] | None, NoEffect()] = None
    """OpenAI's limit of built-in tools, which this server lacks."""

    # Further fields, with vLLM's names.
    logit_bias: LogitBias | None = None
    stop: StopStrings | None = None
    chat_template_kwargs: TemplateVariables | None = None
    thinking_budget: ReasoningBudget | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None

    # The response repeats these four.
    metadata: Annotated[Metadata | None, NoEffect()] = None
    user: Annotated[str | None, NoEffect()] = None
    safety_identifier: Annotated[str | None, NoEffect()] = None
    prompt_cache_key: Annotated[str | None, NoEffect()] = None


# The items of `input`


class MessageItem(Body):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: Any
    """A string, or a list of parts. `read` checks it."""
    id: ItemId | None = None
    status: ItemStatus | None = None
    internal_chat_message_metadata_passthrough: Unread = None
    """Codex CLI sends this field if the provider is called OpenAI."""
    phase: Unread = None


@has_not_yet('async=false caller={"type":"direct"}')
class FunctionCallItem(Body):
    type: Literal["function_call"]
    call_id: CallId
    name: str
    arguments: str
    """JSON text of an object."""
    id: ItemId | None = None
    status: ItemStatus | None = None
    internal_chat_message_metadata_passthrough: Unread = None
    parsed_arguments: Unread = None
    """OpenAI's client parses `arguments` into this field."""
    namespace: str | None = None


@has_not_yet('caller={"type":"direct"}')
class FunctionOutputItem(Body):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Any
    """A string, or a list of parts of the type `input_text`."""
    id: ItemId | None = None
    status: ItemStatus | None = None
    internal_chat_message_metadata_passthrough: Unread = None
    name: str | None = None
    namespace: str | None = None
    """`namespace` and `name` have no effect: `call_id` identifies the call."""


@has_unread("logprobs prompt_cache_breakpoint")
@has_not_yet("annotations=[]")
class TextPart(Body):
    """A part of a message, of a call's output or of reasoning, depending on `type`."""

    type: str
    text: str
    parsed: Unread = None
    """OpenAI's client parses `text` into this field."""


@has_not_yet('encrypted_content=""')
class ReasoningItem(Body):
    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    content: Annotated[list[TextPart], Field(max_length=1024, fail_fast=True)] | None = None
    status: ItemStatus | None = None
    internal_chat_message_metadata_passthrough: Unread = None


class ItemReference(Body):
    """A reference to an item of a kept response."""

    type: Literal["item_reference"] | None = None
    id: ItemId
