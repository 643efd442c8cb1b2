"""The answers of `/v1/responses` as types. https://developers.openai.com/api/reference/resources/responses"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict
from typing_extensions import TypedDict

from penstock.serve.logprobs import ChatToken
from penstock.serve.shapes import Count, Object, ResponseUsage


class TextPart(TypedDict):
    type: str
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[ChatToken]]


ItemHead = TypedDict("ItemHead", {"id": str, "status": Literal["in_progress", "completed", "incomplete"]})


class OutputMessage(ItemHead):
    type: Literal["message"]
    role: str
    content: list[TextPart]


ReasoningPart = TypedDict("ReasoningPart", {"type": str, "text": str})


class OutputReasoning(ItemHead):
    type: Literal["reasoning"]
    summary: list[ReasoningPart]
    content: list[ReasoningPart]


class OutputCall(ItemHead):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: NotRequired[str]
    arguments: str


class CallOutput(ItemHead):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]


ResponseItem = OutputMessage | OutputReasoning | OutputCall | CallOutput


class ResponseItems(TypedDict):
    object: Literal["list"]
    data: list[ResponseItem]
    first_id: str | None
    last_id: str | None
    has_more: bool


ResponseError = TypedDict("ResponseError", {"code": str, "message": str})
IncompleteDetails = TypedDict("IncompleteDetails", {"reason": str})
ReasoningSettings = TypedDict("ReasoningSettings", {"effort": str | None, "summary": None})
TextSettings = TypedDict("TextSettings", {"format": Object, "verbosity": str})


class Response(TypedDict):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    completed_at: int | None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: Count | None
    max_tool_calls: Count | None
    metadata: dict[str, str]
    model: str
    output: list[ResponseItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: str
    store: bool
    system_fingerprint: str
    temperature: float
    text: TextSettings
    tool_choice: str | Object
    tools: list[Object]
    top_logprobs: Count
    top_p: float
    truncation: str
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(TypedDict):
    """An event of a stream. Further fields depend on `type`."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]
    type: str
    sequence_number: Count


ResponseForgotten = TypedDict("ResponseForgotten", {"id": str, "object": Literal["response"], "deleted": bool})
