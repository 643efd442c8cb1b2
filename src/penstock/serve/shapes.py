"""Types and values that the answers of several APIs share. pydantic derives the schemas of the OpenAPI document from them."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, WithJsonSchema
from typing_extensions import TypedDict

from penstock import fast_json
from penstock.text.answers import Answer

Count = Annotated[int, Field(ge=0)]
Object = Annotated[Any, WithJsonSchema({"type": "object"})]
"""Any JSON object."""
Vector = Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "number"}})]
"""A one-dimensional NumPy array, or a list of numbers."""
Base64 = Annotated[str, WithJsonSchema({"type": "string", "description": "float32 in little-endian order, as base64"})]


FinishWord = Literal["stop", "length"]
ChatFinishWord = Literal["stop", "length", "tool_calls"]


Success = TypedDict("Success", {"success": bool})
Status = TypedDict("Status", {"status": str})
Version = TypedDict("Version", {"version": str})


class TokenUsage(TypedDict):
    """Token counts of a request to an encoder, which generates no tokens."""

    prompt_tokens: Count
    total_tokens: Count


CachedTokens = TypedDict("CachedTokens", {"cached_tokens": Count})
ReasoningTokens = TypedDict("ReasoningTokens", {"reasoning_tokens": Count})


class Usage(TokenUsage):
    """Token counts of a prompt and its answer, in OpenAI's form."""

    completion_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: NotRequired[ReasoningTokens]


InputTokenDetails = TypedDict("InputTokenDetails", {"cached_tokens": Count, "cache_write_tokens": Count})
"""OpenAI's SDK requires `cache_write_tokens`, which is always 0 here."""


class ResponseUsage(TypedDict):
    input_tokens: Count
    input_tokens_details: InputTokenDetails
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


def response_usage(num_prompt: int, num_cached: int, num_generated: int, num_reasoning: int) -> ResponseUsage:
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": num_cached, "cache_write_tokens": 0},
        "output_tokens": num_generated,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": num_prompt + num_generated,
    }


FunctionCall = TypedDict("FunctionCall", {"name": str, "arguments": str})


class ToolCall(TypedDict):
    """A tool call in an answer, in OpenAI's form."""

    id: str
    type: Literal["function"]
    function: FunctionCall


def utc(unix_s: float) -> str:
    """Return a time in RFC 3339's format."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def tool_calls_of(answer: Answer) -> list[ToolCall]:
    """Return an answer's tool calls in OpenAI's form."""
    return [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in answer.calls
    ]


def arguments_object(arguments: str) -> fast_json.Raw | None:
    """Return a tool call's arguments as JSON to embed, or None if they are not a JSON object.

    Numbers keep all digits that the model wrote.
    """
    try:
        value = json.loads(arguments, parse_int=str, parse_float=str, parse_constant=int)  # int() refuses NaN and Infinity
    except (ValueError, RecursionError):
        return None
    return fast_json.Raw(arguments.replace("\n", " ").replace("\r", " ")) if isinstance(value, dict) else None


class ApiVersion(TypedDict):
    """The version of Cohere's API that an answer follows."""

    version: str
