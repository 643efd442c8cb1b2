"""The request bodies of the OpenAI routes, as types with names, kinds and ranges of every field, and `parse_body`, which makes
one of the bytes that a client sent, on any thread.

The OpenAPI document is written from the types. A body that would keep the interpreter's lock for long is refused early:
very many objects, or very many findings, each of which costs a microsecond or two. So every list ends at its first wrong item
and every object has a limit. Rules that need more than one field, or the model, are in `read`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from penstock.serve.errors import RULE, UNKNOWN_FIELDS, did_you_mean, from_finding, invalid, param_path
from penstock.text.grammar import MAX_LARK_CHARS, MAX_REGEX_CHARS, MAX_SOURCE_CHARS
from penstock.types.errors import counted
from penstock.types.sampling import MAX_LENGTH_PENALTY, MAX_LOGPROBS

_log = logging.getLogger(__name__)

MAX_CHOICES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_SUFFIX_CHARS = 2**20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 1000
MAX_STOP_TOKENS = 256
MAX_SALT_CHARS = 256
MAX_TOKENS_LIMIT = 2**31 - 1
MAX_TOKEN_IDS = 2**18
"""Token ids in one body, twice the longest usual context. Nothing else in the process can run while a body is parsed, and more
ids would take tens of milliseconds. Elements of all other lists and objects count as well: see `load_json`."""
MAX_MESSAGES = 2**12
"""Messages, or items of a conversation, in one body. One call validates them, and holds the interpreter for 10 us each."""
MAX_TEMPLATE_KWARGS = 256
MAX_TOOLS = 128
"""OpenAI's limit; also of the calls in one message."""
MAX_DESCRIPTION_CHARS = 1 << 15
MAX_CALL_ID_CHARS = 256
MAX_ANSWERS, MAX_ANSWER_CHARS = 4096, 1000
"""That one can be chosen from."""
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied or divided by it; in this range none of a real model's overflows."""
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1

INLINE_MAX_BYTES = 1 << 15
"""Bodies up to here are read within a few milliseconds, so the event loop may do it."""

MAX_CONTAINERS = 100_000
"""Objects and lists in one body. Text and token ids are not counted, so only what is no request has more: the parser would
spend most of a second on the two millions that fit into 4 MiB, and nothing else in the process could run meanwhile."""

MAX_LOGGED_NAMES, MAX_LOGGED_CHARS = 100, 64
"""Limits of what is logged about ignored parameters: clients choose the names, and could fill the log and the memory."""


class NotYet:
    """Marks a field of the API that is known and not supported. It may be null, or a value that asks for nothing."""

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        """`neutral`: values that mean the same as leaving the field out. `instead`: the field of `structured_outputs` that
        took its place, at vLLM and here.
        """
        self.neutral = neutral
        self._instead = instead

    def is_neutral(self, value: object) -> bool:
        # `1 == True` in Python, but not in JSON: compare the types too.
        return value is None or any(type(value) is type(neutral) and value == neutral for neutral in self.neutral)

    def refuse(self, value: object, param: str) -> None:
        """Raise a 400 unless the value asks for nothing."""
        if not self.is_neutral(value):
            raise invalid(f"'{param}' is not supported yet{self._remedy()}.", param)

    def _remedy(self) -> str:
        if self._instead:
            return f": send it as 'structured_outputs': {{'{self._instead}': ...}}"
        if not self.neutral:
            return ""
        return f" (accepted: null or {' or '.join(orjson.dumps(value).decode() for value in self.neutral)})"

    def __get_pydantic_json_schema__(self, _schema: CoreSchema, _handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"description": "Not supported yet: only values that ask for nothing are accepted."}


class NoEffect:
    """Marks a field that clients send for their own bookkeeping. The answer is the same with it and without it.

    docs/http-api.md lists all of them in one table, under "Fields without effect".
    """

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "description": "No effect on the answer."}


Unread = Annotated[Any, NoEffect()]
"""A value that nothing reads. The limits of the whole body bound its size."""

MAX_NAMED = 3
"""Unknown fields that one error names."""


class Body(BaseModel):
    """Base of every request body: no unknown fields, no silent conversions (`"16"` is not a number)."""

    model_config = ConfigDict(extra="forbid", strict=True)
    field_names: ClassVar[frozenset[str]] = frozenset()
    """As clients write them."""
    unsupported: ClassVar[dict[str, NotYet]] = {}
    no_effect: ClassVar[frozenset[str]] = frozenset()
    kinds: ClassVar[tuple[Any, ...]] = ()
    """The values that a required field `type` may have."""
    remedies: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that belong to other APIs and routes -> what to do here instead."""

    @classmethod
    def __pydantic_init_subclass__(cls, **_kwargs: Any) -> None:
        fields = cls.model_fields
        cls.field_names = frozenset(field.alias or name for name, field in fields.items())
        cls.kinds = get_args(fields["type"].annotation) if "type" in fields and fields["type"].is_required() else ()
        marks = [(name, mark) for name, field in fields.items() for mark in field.metadata]
        cls.unsupported = {name: mark for name, mark in marks if isinstance(mark, NotYet)}
        cls.no_effect = frozenset(name for name, mark in marks if isinstance(mark, NoEffect))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_fields(cls, value: Any) -> Any:
        # One finding for all of them, and not one for each: there may be very many.
        if not isinstance(value, dict) or value.keys() <= cls.field_names:
            return value
        if cls.kinds and value.get("type", cls.kinds[0]) not in cls.kinds:
            return {"type": value["type"]}  # an object of another kind: that is told, and not its fields
        names = list(islice((name for name in value if name not in cls.field_names), MAX_NAMED + 1))
        remedy = f" {cls.remedies[names[0]]}" if names[0] in cls.remedies else ""
        remedy = remedy or did_you_mean(names[0], cls.field_names - cls.unsupported.keys())
        told = {"names": names[:MAX_NAMED], "has_more": len(names) > MAX_NAMED, "remedy": remedy}
        raise PydanticCustomError(UNKNOWN_FIELDS, "Unknown fields", told)


def at_most(num_entries: int) -> BeforeValidator:
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
"""Checked in `read`, where the messages can name the element."""

ReasoningBudget = Annotated[int, Field(ge=-1, le=INT32_MAX)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]
RepeatLastN = Annotated[int, Field(ge=-1, le=INT32_MAX)]
"""The penalties count only the last so many tokens. -1: all; 0: no penalties."""
LogitBias = Annotated[
    dict[str, Any],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
"""Checked in `read`, which knows how many tokens there are, and ends at the first wrong entry."""

TemplateVariables = Annotated[dict[str, Any], at_most(MAX_TEMPLATE_KWARGS)]


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's: `usage` so far in every chunk, and not only in one at the end."""
    include_obfuscation: Unread = None


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


class TagStructure(Body):
    """A part of an answer that has a form, between two texts."""

    begin: Annotated[str, Field(min_length=1)]
    schema_: Annotated[Schema, Field(alias="schema")]
    end: Annotated[str, Field(min_length=1)]


class ResponseFormat(Body):
    """OpenAI's word for what an answer must be."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None
    """llama.cpp's: the schema of a `json_object`."""
    structures: Annotated[list[TagStructure], Field(min_length=1)] | None = None
    """This and the next are vLLM's, of a `structural_tag`; so is the third, instead of both."""
    triggers: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    format: Schema | None = None


class StructuredOutputs(Body):
    """vLLM's word for what an answer must be: one of the first six fields."""

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
    """In Lark's notation, or in GBNF, whose rules are written with `::=`."""
    grammar_syntax: Literal["lark", "gbnf"] | None = None
    """The one that is meant. xgrammar's EBNF is read as GBNF."""
    structural_tag: SchemaOrText | None = None
    """The object that `response_format` is with that type, or its text."""
    whitespace_pattern: Annotated[Any, NotYet()] = None
    disable_fallback: Annotated[Any, NotYet(False)] = None
    disable_any_whitespace: Annotated[Any, NotYet(False)] = None
    disable_additional_properties: Annotated[Any, NotYet(False)] = None


LLAMA_REMEDIES: Mapping[str, str] = MappingProxyType(
    {
        "n_predict": "Send 'max_tokens'.",
        "grammar": "Send it as 'structured_outputs': {'grammar': ...}.",
        "json_schema": "Send it as 'structured_outputs': {'json': ...}, or in 'response_format'.",
    }
)
"""Fields of llama.cpp's own routes, and those that do the same in OpenAI's."""


class GenerationBody(Body):
    """Fields that both endpoints have. Null is the same as absent."""

    remedies = LLAMA_REMEDIES

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
    repeat_last_n: RepeatLastN | None = None
    """llama.cpp's."""
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
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    verbose: Unread = None
    """These three are llama.cpp's."""
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep only the last so many prompt tokens; -1: as many as fit beside `max_tokens`, or beside 16 if that is not said."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    """The answer follows one of these; see `grammars`."""

    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """vLLM's: how likely each token of the prompt was, and so many of the likeliest there. Not of a stream."""
    return_token_ids: bool | None = None
    priority: Annotated[int, Field(ge=INT32_MIN, le=INT32_MAX)] | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None

    user: Annotated[str | None, NoEffect()] = None
    """This and `safety_identifier` choose the arm of an A/B test."""
    safety_identifier: Annotated[str | None, NoEffect()] = None
    prompt_cache_key: Annotated[str | None, NoEffect()] = None
    session_id: Annotated[str | None, NoEffect()] = None
    metadata: Unread = None
    cache_control: Unread = None
    prompt_cache_options: Unread = None
    prompt_cache_retention: Unread = None
    service_tier: Unread = None
    spaces_between_special_tokens: Unread = None
    store: Unread = None
    stream_interval: Unread = None

    ec_transfer_params: Annotated[Any, NotYet({})] = None
    guided_choice: Annotated[Any, NotYet(instead="choice")] = None
    guided_decoding_backend: Annotated[Any, NotYet()] = None
    guided_grammar: Annotated[Any, NotYet(instead="grammar")] = None
    guided_json: Annotated[Any, NotYet(instead="json")] = None
    guided_json_object: Annotated[Any, NotYet(False, instead="json_object")] = None
    guided_regex: Annotated[Any, NotYet(instead="regex")] = None
    guided_whitespace_pattern: Annotated[Any, NotYet()] = None
    include_reasoning: Annotated[Any, NotYet(True)] = None
    kv_transfer_params: Annotated[Any, NotYet({})] = None
    logits_processors: Annotated[Any, NotYet([])] = None
    logprob_token_ids: Annotated[Any, NotYet()] = None
    repetition_detection: Annotated[Any, NotYet()] = None
    return_mm_kwargs: Annotated[Any, NotYet(True)] = None
    return_token_offsets: Annotated[Any, NotYet(False)] = None
    return_tokens_as_token_ids: Annotated[Any, NotYet(False)] = None
    routed_experts_prompt_start: Annotated[Any, NotYet(0)] = None
    structural_tag: Annotated[Any, NotYet(instead="structural_tag")] = None
    thinking_token_budget: Annotated[Any, NotYet(-1)] = None
    truncation_side: Annotated[Any, NotYet("left")] = None
    vllm_xargs: Annotated[Any, NotYet({})] = None
    watermarking: Annotated[Any, NotYet(False)] = None

    @property
    def num_choices(self) -> int:
        return self.n or 1


class CompletionBody(GenerationBody):
    """`POST /v1/completions`."""

    remedies = {
        **LLAMA_REMEDIES,
        "max_completion_tokens": "Send 'max_tokens'.",
        "messages": "Messages go to /v1/chat/completions; this route takes a 'prompt'.",
    }

    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS_LIMIT)] | None = None
    """0: nothing is generated; the prompt is computed, and scored if that is asked for."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    suffix: Annotated[str, Field(max_length=MAX_SUFFIX_CHARS)] | None = None
    """The text behind the completion: the model fills in the middle. Empty: nothing does."""
    prompt_embeds: Annotated[Any, NotYet()] = None


class FunctionBody(Body):
    """A function that an answer may call."""

    name: str
    description: Annotated[str, Field(max_length=MAX_DESCRIPTION_CHARS)] | None = None
    parameters: Annotated[Schema | None, WithJsonSchema({"type": "object"})] = None
    """JSON schema of the arguments; without it there are none."""
    strict: bool | None = None
    """True: a schema that can't be followed is refused. Else its arguments are any object then."""


class ToolBody(Body):
    remedies = dict.fromkeys(
        ("name", "description", "parameters", "input_schema", "strict"),
        'A tool has the form {"type": "function", "function": {"name": ..., "parameters": ...}}.',
    )

    type: Literal["function"]
    function: FunctionBody


class CalledFunction(Body):
    name: str
    arguments: Any = ""
    """JSON text of an object; also the object itself."""
    parsed_arguments: Unread = None
    """OpenAI's clients parse `arguments` into this field, and send it when an answer comes back as a message."""


class ToolCallBody(Body):
    """A call that an assistant made, in the history."""

    id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Unread = None
    """Clients that assemble an answer from a stream keep the index of its events."""


class ChatMessage(Body):
    role: Any
    content: Any = None
    name: str | None = None
    parsed: Unread = None
    """OpenAI's client parses `content` into this field, and sends it when an answer comes back as a message."""
    provider_specific_fields: Unread = None
    """litellm copies fields of an answer that it does not know to this one, and sends it in the same way."""
    annotations: Annotated[Any, NotYet([])] = None
    audio: Annotated[Any, NotYet()] = None
    cache_control: Unread = None
    function_call: Annotated[Any, NotYet("none", "auto")] = None
    reasoning: str | None = None
    """vLLM's name for `reasoning_content`."""
    reasoning_content: str | None = None
    """An assistant's reasoning: the template shows it or not."""
    refusal: Annotated[Any, NotYet()] = None
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)] | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(Body):
    """How messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: Annotated[Any, NotYet()] = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class ChatCompletionBody(ChatTemplateFields, GenerationBody):
    """`POST /v1/chat/completions`."""

    remedies = {**LLAMA_REMEDIES, "prompt": "A prompt goes to /v1/completions; this route takes 'messages'."}

    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    parallel_tool_calls: bool | None = None
    """False: one call at most."""
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]})] = None
    """Checked in `tools`, as are the next two."""
    function_call: Annotated[Any, WithJsonSchema({"enum": ["none", "auto"]})] = None
    functions: Annotated[Any, WithJsonSchema({"type": "array", "maxItems": 0})] = None
    include_reasoning: bool | None = None
    """False: what a model reasons is left out of the answer."""
    reasoning_effort: str | None = None
    thinking_token_budget: ReasoningBudget | None = None
    max_thinking_tokens: ReasoningBudget | None = None
    thinking_budget: ReasoningBudget | None = None
    """Tokens of the reasoning block, after which its end is forced; one of these three names. -1: no limit."""
    prediction: Unread = None
    verbosity: Unread = None

    # llama.cpp's.
    cache_prompt: Unread = None
    id_slot: Unread = None

    # Open WebUI's. It acts on them itself.
    background_tasks: Unread = None
    chat_id: Unread = None
    features: Unread = None
    filter_ids: Unread = None
    id: Unread = None
    model_item: Unread = None
    tool_ids: Unread = None
    tool_servers: Unread = None
    variables: Unread = None

    audio: Annotated[Any, NotYet()] = None
    best_of: Annotated[Any, NotYet(1)] = None
    documents: Annotated[Any, NotYet([])] = None
    echo: Annotated[Any, NotYet(False)] = None
    media_io_kwargs: Annotated[Any, NotYet({})] = None
    mm_processor_kwargs: Annotated[Any, NotYet({})] = None
    modalities: Annotated[Any, NotYet(["text"])] = None
    moderation: Annotated[Any, NotYet()] = None
    return_prompt_text: Annotated[Any, NotYet(False)] = None
    web_search_options: Annotated[Any, NotYet()] = None


# From bytes to a body.

_Body = TypeVar("_Body", bound=Body)


class IgnoredParameters:
    """The names that were ignored so far under `--ignore-unknown-parameters`. Each is logged once, by whichever thread."""

    def __init__(self) -> None:
        self._logged: set[str] = set()
        self._lock = threading.Lock()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            if len(self._logged) == MAX_LOGGED_NAMES:
                return
            shown = name[:MAX_LOGGED_CHARS]
            with self._lock:
                if shown in self._logged or len(self._logged) == MAX_LOGGED_NAMES:
                    continue
                self._logged.add(shown)
                is_last = len(self._logged) == MAX_LOGGED_NAMES
            _log.warning("the parameter %r is ignored (--ignore-unknown-parameters)", shown)
            if is_last:
                _log.warning("names of further parameters that are ignored are not logged")


def parse_body(data: bytes, body_type: type[_Body], ignored: IgnoredParameters | None = None) -> _Body:
    """The body. Raises 400 for the first thing that is wrong.

    `ignored` takes note of unknown fields; without it they are wrong.
    """
    return check_body(load_json(data), body_type, ignored)


def check_body(value: Any, body_type: type[_Body], ignored: IgnoredParameters | None = None) -> _Body:
    """The body of a JSON value that `load_json` gave; `parse_body` does both."""
    if ignored is not None and isinstance(value, dict):
        unknown = [name for name in value if name not in body_type.field_names]
        for name in unknown:
            del value[name]
        ignored.note(unknown)
    try:
        body = body_type.model_validate(value)
    except ValidationError as error:
        raise from_finding(error.errors(include_url=False)[0]) from None
    _refuse_unsupported(body)
    return body


def check_part(value: Any, part_type: type[_Body], *place: str | int) -> _Body:
    """A part of a body that was left as it came; `place` says where it stands. Raises 400."""
    try:
        part = part_type.model_validate(value)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        raise from_finding({**finding, "loc": (*place, *finding["loc"])}) from None
    _refuse_unsupported(part, prefix=f"{param_path(place)}.")
    return part


def _refuse_unsupported(body: Body, *, prefix: str = "") -> None:
    """Raise a 400 that names a field which asks for something that is not there yet. Descends into nested bodies."""
    unsupported = body.unsupported
    for name in sorted(body.model_fields_set):  # few, and the others ask for nothing
        value = getattr(body, name)
        if value is None:
            continue
        param = f"{prefix}{name}"
        if isinstance(value, Body):
            _refuse_unsupported(value, prefix=f"{param}.")
        elif isinstance(value, list) and value and isinstance(value[0], Body):
            for index, item in enumerate(value):
                _refuse_unsupported(item, prefix=f"{param}[{index}].")
        elif name in unsupported:
            unsupported[name].refuse(value, param)


def load_json(data: bytes) -> Any:
    """Return the value of a body. Raises 400 for what is no JSON, or has too many elements to parse beside other requests."""
    if _is_more(data, b"{[", MAX_CONTAINERS):
        raise invalid(f"The body has more than {MAX_CONTAINERS} objects and lists.")
    if _is_more(data, b",", MAX_TOKEN_IDS):
        raise invalid(f"The body has more than {MAX_TOKEN_IDS} token ids, or other elements of lists and objects.")
    try:
        # Faster than the standard library, and strict about NaN, surrogates and depth.
        return orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise invalid(_why_no_json(data, error)) from error


def _why_no_json(data: bytes, error: orjson.JSONDecodeError) -> str:
    try:
        data.decode()
    except UnicodeDecodeError as wrong:
        before = data[: wrong.start].decode()
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        byte = data[wrong.start]
        return (
            f"The body is not UTF-8, as JSON has to be: byte 0x{byte:02x} after {counted(wrong.start, 'byte')}, "
            f"line {line} column {column}."
        )
    if "surrogate" in error.msg:
        place = f"line {error.lineno} column {error.colno}"
        return f"The body is not valid JSON: a \\u escape is half a surrogate pair, without the other half: {place}."
    return f"The body is not valid JSON: {error}."


def _is_more(data: bytes, marks: bytes, limit: int) -> bool:
    """Whether more than `limit` of these characters stand outside of strings. Nothing is parsed."""
    if _count(data, marks) <= limit:
        return False
    unescaped = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    return _count(b"".join(unescaped.split(b'"')[::2]), marks) > limit


def _count(data: bytes, marks: bytes) -> int:
    return sum([data.count(mark) for mark in marks])
