"""The request bodies of OpenAI's completions and chats, with vLLM's and llama.cpp's fields.

The OpenAPI document is generated from these types. `read` and `calls.check` have rules about several fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.serve.bodies import (
    INT32_MAX,
    MAX_CHOICES,
    MAX_SUFFIX_CHARS,
    Body,
    CacheSalt,
    GenerationFields,
    MaxTokensOrAll,
    NoEffect,
    NotYet,
    NumLogprobs,
    Priority,
    ReasoningBudget,
    RequestId,
    Schema,
    Unread,
    has_not_yet,
    has_unread,
)
from penstock.serve.errors import RULE
from penstock.serve.messages import ChatTemplateFields
from penstock.types.sampling import MAX_LENGTH_PENALTY


def _true_false_or_never(value: Any) -> Any:
    if value is True or value is False or value == "never":
        return value
    raise PydanticCustomError(RULE, "must be true, false or 'never'")


Prompt = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
            ]
        }
    ),
]
"""`read` checks it, so that errors can name the element."""


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk has the `usage` so far, not only the last chunk."""
    include_obfuscation: Unread = None


class JsonSchemaFormat(Body):
    """OpenAI's field `json_schema`. Answers always follow the schema, also without `strict`."""

    remedies: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (
            *("type", "properties", "required", "additionalProperties", "title", "items", "enum", "const"),
            *("anyOf", "oneOf", "allOf", "$ref", "$id", "$schema", "$defs", "definitions"),
        ),
        "Put the schema itself in 'schema', beside its 'name'.",
    )

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class TagStructure(Body):
    """A part of an answer that follows a schema, between two fixed texts."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[Schema, Field(alias="schema")]
    end: Annotated[str, Field(min_length=1)]


class ResponseFormat(Body):
    """OpenAI's `response_format`, which constrains an answer, for example to a JSON schema."""

    type: Literal["text", "json_object", "json_schema", "structural_tag", "json", "regex"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """llama.cpp's field: the schema of a `json_object`."""
    value: Any = None
    """text-generation-inference's field: the schema of a `json` or `json_object`, or the pattern of a `regex`."""
    structures: Annotated[list[TagStructure], Field(min_length=1)] | None = None
    """vLLM's fields for a `structural_tag`: `structures` and `triggers`, or `format`."""
    triggers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    format: Schema | None = None


REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "n_predict": "Send 'max_tokens'.",
        "grammar": "Send it as 'structured_outputs': {'grammar': ...}.",
        "json_schema": "Send it as 'structured_outputs': {'json': ...}, or in 'response_format'.",
        "regex": "Send it as 'structured_outputs': {'regex': ...}.",
        "ebnf": "Send it as 'structured_outputs': {'grammar': ...}.",
    }
)
"""Fields of llama.cpp's own routes and of SGLang -> what to send here instead."""


@has_unread(
    "metadata cache_control prompt_cache_options prompt_cache_retention return_progress service_tier "
    "spaces_between_special_tokens store stream_interval verbose"
)
@has_not_yet(
    "ec_transfer_params={} guided_decoding_backend guided_whitespace_pattern include_reasoning=true "
    "kv_transfer_params={} logits_processors=[] logprob_token_ids repetition_detection return_mm_kwargs=true "
    "return_token_offsets=false return_tokens_as_token_ids=false routed_experts_prompt_start=0 "
    'thinking_token_budget=-1 truncation_side="left" vllm_xargs={} watermarking=false'
)
class GenerationBody(GenerationFields):
    """Fields common to completions and chats. Null is the same as absent."""

    remedies = REMEDIES

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    use_beam_search: bool | None = None
    """Search with `n` beams. They become the choices, best first."""
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[Literal[True, False, "never"], BeforeValidator(_true_false_or_never)] | None = None
    timings_per_token: bool | None = None
    """llama.cpp's."""
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None

    prompt_logprobs: NumLogprobs | None = None
    """vLLM's: return log-probabilities of each prompt token and of this many likeliest ones. Not in a stream."""
    return_token_ids: bool | None = None
    priority: Priority | None = None
    request_id: RequestId | None = None
    cache_salt: CacheSalt | None = None

    user: Annotated[str | None, NoEffect()] = None
    """The user's name, unless `safety_identifier` gives one (docs/ab.md)."""
    safety_identifier: Annotated[str | None, NoEffect()] = None
    prompt_cache_key: Annotated[str | None, NoEffect()] = None
    session_id: Annotated[str | None, NoEffect()] = None

    guided_choice: Annotated[Any, NotYet(instead="choice")] = None
    guided_grammar: Annotated[Any, NotYet(instead="grammar")] = None
    guided_json: Annotated[Any, NotYet(instead="json")] = None
    guided_json_object: Annotated[Any, NotYet(False, instead="json_object")] = None
    guided_regex: Annotated[Any, NotYet(instead="regex")] = None
    structural_tag: Annotated[Any, NotYet(instead="structural_tag")] = None


@has_not_yet("prompt_embeds")
class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    remedies: ClassVar[Mapping[str, str]] = {
        **REMEDIES,
        "max_completion_tokens": "Send 'max_tokens'.",
        "messages": "Messages go to /v1/chat/completions; this route takes a 'prompt'.",
    }

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    """0: generate nothing. The prompt is computed, and scored with `echo` and `logprobs`."""
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = None
    """The text after the completion, for a model that fills in the middle. Empty: none."""


# The fields from `background_tasks` on are for Open WebUI's own use.
@has_unread(
    "prediction verbosity cache_prompt id_slot background_tasks chat_id features filter_ids id model_item tool_ids "
    "tool_servers variables"
)
@has_not_yet(
    'audio best_of=1 documents=[] echo=false media_io_kwargs={} mm_processor_kwargs={} modalities=["text"] moderation '
    "return_prompt_text=false web_search_options"
)
class ChatCompletionBody(ChatTemplateFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    remedies: ClassVar[Mapping[str, str]] = {
        **REMEDIES,
        "prompt": "A prompt goes to /v1/completions; this route takes 'messages'.",
    }

    max_tokens: MaxTokensOrAll = None
    max_completion_tokens: MaxTokensOrAll = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None

    parallel_tool_calls: bool | None = None
    """False allows at most one call."""
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    """`read` checks this field, `function_call` and `functions`."""
    function_call: Annotated[Any, WithJsonSchema({"enum": ["none", "auto"]})] = None
    functions: Annotated[Any, WithJsonSchema({"type": "array", "maxItems": 0})] = None
    include_reasoning: bool | None = None
    """False leaves the reasoning out of the answer."""
    reasoning_effort: str | None = None
    thinking_token_budget: ReasoningBudget | None = None
    max_thinking_tokens: ReasoningBudget | None = None
    thinking_budget: ReasoningBudget | None = None
    """The last three fields are names of one limit: the end of the reasoning is forced after this many tokens. -1: no limit."""
