"""Types of which the answers of several APIs are made. pydantic makes the schemas of the OpenAPI document of them.

An answer's type is a `TypedDict` beside the code that fills it. At run time that is a plain dictionary.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from penstock.text.answers import Answer

Count = Annotated[int, Field(ge=0)]
Object = Annotated[Any, WithJsonSchema({"type": "object"})]
"""Any JSON object."""
Vector = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "number"}})]
"""NumPy's array of one dimension, or a list."""
Base64 = Annotated[str, WithJsonSchema({"type": "string", "description": "float32 in little-endian order, as base64"})]


FinishWord = Literal["stop", "length"]
ChatFinishWord = Literal["stop", "length", "tool_calls"]


Success = TypedDict("Success", {"success": bool})
Status = TypedDict("Status", {"status": str})
Version = TypedDict("Version", {"version": str})


class TokenUsage(TypedDict):
    """Tokens of texts, which have no answer in tokens."""

    prompt_tokens: Count
    total_tokens: Count


CachedTokens = TypedDict("CachedTokens", {"cached_tokens": Count})
ReasoningTokens = TypedDict("ReasoningTokens", {"reasoning_tokens": Count})


class Usage(TokenUsage):
    """Tokens of a question and of its answer, in OpenAI's shape."""

    completion_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


FunctionCall = TypedDict("FunctionCall", {"name": str, "arguments": str})


class ToolCall(TypedDict):
    """A call of a tool in an answer, in OpenAI's shape."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def told_calls(answer: Answer) -> list[ToolCall]:
    """Return the calls of an answer in OpenAI's shape."""
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


class ApiVersion(TypedDict):
    """Cohere's word for which of its API's versions an answer follows."""

    version: str
