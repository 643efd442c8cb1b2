"""The request bodies of `/v1/completions` and `/v1/chat/completions`, as types: names, kinds and ranges of every field.

Read by `bodies` to check what comes and by FastAPI to write the OpenAPI document. Every list ends at its first wrong item
and every object has a limit, so that no body has many findings: each costs a microsecond or two. Holds no rule that needs
more than one field, the model or the tokenizer: those are in `validation`. Fields that are known but not supported yet are
in `unsupported`.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from penstock.serve.openai.errors import RULE
from penstock.serve.openai.unsupported import NotSupportedYet, UnsupportedHint
from penstock.text.grammar import MAX_LARK_CHARS, MAX_REGEX_CHARS, MAX_SOURCE_CHARS
from penstock.types.sampling import MAX_LENGTH_PENALTY, MAX_LOGPROBS

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_SALT_CHARS = 256
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_TOKEN_IDS = 2**20
MAX_TEXT_CHARS = 2**20
"""Characters of one text, unless the model's context holds more; tokenising them takes about a second."""
MAX_MESSAGES = 2**14
MAX_TEMPLATE_KWARGS = 256
MAX_ANSWERS, MAX_ANSWER_CHARS = 4096, 1000
"""That one can be chosen from."""
MAX_METADATA, MAX_METADATA_KEY_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""OpenAI's own limits."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied or divided by it; in this range none of a real model's overflows."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


class Body(BaseModel):
    """Base of every request body: no unknown fields, no silent conversions (`"16"` is not a number)."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @classmethod
    def field_names(cls) -> frozenset[str]:
        """As clients write them."""
        return frozenset(field.alias or name for name, field in cls.model_fields.items())

    @model_validator(mode="before")
    @classmethod
    def _refuse_too_many_fields(cls, value: Any) -> Any:
        # With more fields than there are, some are unknown: a few of them are named, and not all of them counted.
        if isinstance(value, dict) and len(value) > len(cls.model_fields):
            known = cls.field_names()
            unknown = (name for name in value if name not in known)
            raise PydanticCustomError("too_many_fields", "Too many fields", {"names": list(islice(unknown, 3))})
        return value


def _at_most(num_entries: int) -> BeforeValidator:
    """Limits an object before its entries are looked at; `Field(max_length=...)` does so after them."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > num_entries:
            raise PydanticCustomError(RULE, "must have at most {limit} entries", {"limit": num_entries})
        return value

    return BeforeValidator(check)


def _an_object(value: Any) -> Any:
    if isinstance(value, dict):
        return value
    raise PydanticCustomError(RULE, "must be an object")


def _an_object_or_text(value: Any) -> Any:
    if isinstance(value, str) and 0 < len(value) <= MAX_SOURCE_CHARS:
        return value
    if isinstance(value, dict):
        return value
    message = "must be an object, or a string of 1 to {limit} characters that holds one as JSON"
    raise PydanticCustomError(RULE, message, {"limit": MAX_SOURCE_CHARS})


def _one_or_many(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _true_false_or_never(value: Any) -> Any:
    if value is True or value is False or value == "never":
        return value
    raise PydanticCustomError(RULE, "must be true, false or 'never'")


StopStrings = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
    Field(max_length=MAX_STOP_STRINGS, fail_fast=True),
    BeforeValidator(_one_or_many),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS},
                    "maxItems": MAX_STOP_STRINGS,
                },
            ]
        }
    ),
]

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
"""Checked in `prompts`, where the messages can name the element."""

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
LogitBias = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
"""Checked in `validation`, which knows how many tokens there are, and ends at the first wrong entry."""

Metadata = Annotated[
    dict[
        Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)],
        Annotated[str, Field(max_length=MAX_METADATA_CHARS)],
    ],
    _at_most(MAX_METADATA),
]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: `usage` so far in every chunk, and not only in one at the end."""
    include_obfuscation: NotSupportedYet = None


Schema = Annotated[Any, BeforeValidator(_an_object), WithJsonSchema({"type": "object"})]
SchemaOrText = Annotated[
    Any,
    BeforeValidator(_an_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": MAX_SOURCE_CHARS}]}),
]
"""A schema, or a string that holds one as JSON."""


class JsonSchemaFormat(Body):
    """OpenAI's. The schema is followed as it is, whatever `strict` says."""

    name: Annotated[str, Field(pattern="^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    schema_: Annotated[Schema, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's word for what an answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """llama.cpp's: the schema of a `json_object`."""


class StructuredOutputs(Body):
    """vLLM's word for what an answer must be: one of the first five fields."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=MAX_REGEX_CHARS)] | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_ANSWER_CHARS)]],
            Field(min_length=1, max_length=MAX_ANSWERS, fail_fast=True),
        ]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=MAX_LARK_CHARS)] | None = None
    """In Lark's notation."""
    whitespace_pattern: NotSupportedYet = None
    disable_fallback: NotSupportedYet = None
    disable_any_whitespace: NotSupportedYet = None
    disable_additional_properties: NotSupportedYet = None
    structural_tag: NotSupportedYet = None


class GenerationBody(Body):
    """Fields that both endpoints have. Null is the same as absent."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_LIMIT)] | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """0 and -1 keep all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    use_beam_search: bool | None = None
    """The `n` choices are the hypotheses of a search with as many beams, the best first."""
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)] | None = None
    early_stopping: Annotated[Literal[True, False, "never"], BeforeValidator(_true_false_or_never)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None

    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep only the last so many prompt tokens; -1: as many as fit beside `max_tokens`, or beside 16 if that is not said."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """What is generated follows one of these; see `grammars`."""

    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    # Without effect on the answer, and so accepted: they inform other parts of a platform.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    metadata: Metadata | None = None
    spaces_between_special_tokens: bool | None = None
    """Without effect, too: a token's text is the same wherever it stands."""

    cache_control: UnsupportedHint = None
    prompt_cache_options: UnsupportedHint = None
    prompt_cache_retention: UnsupportedHint = None
    service_tier: UnsupportedHint = None
    store: UnsupportedHint = None
    stream_interval: UnsupportedHint = None
    thinking_token_budget: UnsupportedHint = None

    ec_transfer_params: NotSupportedYet = None
    guided_choice: NotSupportedYet = None
    guided_decoding_backend: NotSupportedYet = None
    guided_grammar: NotSupportedYet = None
    guided_json: NotSupportedYet = None
    guided_json_object: NotSupportedYet = None
    guided_regex: NotSupportedYet = None
    guided_whitespace_pattern: NotSupportedYet = None
    include_reasoning: NotSupportedYet = None
    kv_transfer_params: NotSupportedYet = None
    logits_processors: NotSupportedYet = None
    logprob_token_ids: NotSupportedYet = None
    prompt_logprobs: NotSupportedYet = None
    repetition_detection: NotSupportedYet = None
    return_mm_kwargs: NotSupportedYet = None
    return_token_offsets: NotSupportedYet = None
    return_tokens_as_token_ids: NotSupportedYet = None
    routed_experts_prompt_start: NotSupportedYet = None
    structural_tag: NotSupportedYet = None
    truncation_side: NotSupportedYet = None
    vllm_xargs: NotSupportedYet = None
    watermarking: NotSupportedYet = None

    @property
    def num_choices(self) -> int:
        return self.n or 1


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: NotSupportedYet = None
    prompt_embeds: NotSupportedYet = None


class ChatMessage(Body):
    role: Any
    content: Any = None
    name: str | None = None
    parsed: Any = None
    """Without effect: what OpenAI's client has made of `content`, and sends along when an answer comes back as a message."""
    annotations: NotSupportedYet = None
    audio: NotSupportedYet = None
    cache_control: NotSupportedYet = None
    function_call: NotSupportedYet = None
    reasoning: NotSupportedYet = None
    reasoning_content: NotSupportedYet = None
    refusal: NotSupportedYet = None
    tool_call_id: NotSupportedYet = None
    tool_calls: NotSupportedYet = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(Body):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], _at_most(MAX_TEMPLATE_KWARGS)] | None = None
    chat_template: NotSupportedYet = None


class ChatCompletionBody(ChatTemplateFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None
    """Without effect, as there are no tools."""
    prediction: UnsupportedHint = None
    reasoning_effort: UnsupportedHint = None
    verbosity: UnsupportedHint = None

    audio: NotSupportedYet = None
    best_of: NotSupportedYet = None
    documents: NotSupportedYet = None
    echo: NotSupportedYet = None
    function_call: NotSupportedYet = None
    functions: NotSupportedYet = None
    media_io_kwargs: NotSupportedYet = None
    mm_processor_kwargs: NotSupportedYet = None
    modalities: NotSupportedYet = None
    moderation: NotSupportedYet = None
    return_prompt_text: NotSupportedYet = None
    tool_choice: NotSupportedYet = None
    tools: NotSupportedYet = None
    web_search_options: NotSupportedYet = None
