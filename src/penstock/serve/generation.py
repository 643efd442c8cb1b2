"""Fields, messages and tools in the form of OpenAI and vLLM, which several APIs share, and their neutral form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from penstock.calls.call import AskedGrammar, Conversation, FunctionTool, Names
from penstock.calls.check import check_conversation, told_tools
from penstock.serve.bodies import (
    INT32_MAX,
    MAX_ANSWER_CHARS,
    MAX_ANSWERS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CALL_ID_CHARS,
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_TOKENS,
    MAX_TOKEN_IDS,
    MAX_TOKENS_LIMIT,
    MAX_TOOLS,
    Body,
    LogitBias,
    NotYet,
    StopStrings,
    TemplateVariables,
    TokenId,
    ToolBody,
    ToolCallBody,
    Unread,
    check_depth,
    has_not_yet,
    has_sampling,
    past_call,
    sampling_of,
)
from penstock.serve.errors import RULE, invalid, shorten
from penstock.text.dialects import Message, PastCall
from penstock.text.grammar import MAX_LARK_CHARS, MAX_REGEX_CHARS, MAX_SOURCE_CHARS, Grammar, GrammarKind
from penstock.types.sampling import MAX_LOGPROBS

_KINDS: Mapping[str, GrammarKind] = MappingProxyType(
    {
        "json": GrammarKind.JSON_SCHEMA,
        "json_object": GrammarKind.JSON_OBJECT,
        "regex": GrammarKind.REGEX,
        "choice": GrammarKind.CHOICE,
        "grammar": GrammarKind.GRAMMAR,
        "structural_tag": GrammarKind.STRUCTURAL_TAG,
    }
)
"""Kinds of grammars by the fields of `structured_outputs`."""
_SYNTAXES: Mapping[str, GrammarKind] = MappingProxyType({"lark": GrammarKind.LARK, "gbnf": GrammarKind.GBNF})
"""Kinds of grammars by the values of `grammar_syntax`."""


def _an_object_or_text(value: Any) -> Any:
    if isinstance(value, dict) or (isinstance(value, str) and 0 < len(value) <= MAX_SOURCE_CHARS):
        return value
    message = "must be an object, or a string of 1 to {limit} characters that holds one as JSON"
    raise PydanticCustomError(RULE, message, {"limit": MAX_SOURCE_CHARS})


SchemaOrText = Annotated[
    Any,
    BeforeValidator(_an_object_or_text),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string", "minLength": 1, "maxLength": MAX_SOURCE_CHARS}]}),
]
"""A schema, or its JSON text."""


@has_not_yet("whitespace_pattern disable_fallback=false disable_any_whitespace=false disable_additional_properties=false")
class StructuredOutputs(Body):
    """vLLM's field for the form of an answer. Exactly one field besides `grammar_syntax` is set."""

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
    """A grammar in Lark's notation or in GBNF."""
    grammar_syntax: Literal["lark", "gbnf"] | None = None
    """The notation of `grammar`. xgrammar's EBNF is read as GBNF."""
    structural_tag: SchemaOrText | None = None
    """An object as `response_format` of the type `structural_tag`, or its JSON text."""


@has_sampling("openai")
class GenerationFields(Body):
    """Fields that `penstock.SamplingParams`, completions and chats share. Null is the same as absent."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS_LIMIT)] | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = None
    bad_words: (
        Annotated[
            list[Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]],
            Field(max_length=MAX_BAD_WORDS, fail_fast=True),
        ]
        | None
    ) = None
    stop: StopStrings | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, le=INT32_MAX)] | None = None
    """Keep only this many last tokens of a prompt. -1: as many as fit beside `max_tokens` (16 if absent)."""
    structured_outputs: StructuredOutputs | None = None
    """The form of the answer."""


class PythonFields(GenerationFields):
    """`penstock.SamplingParams`."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


def fields_of(body: GenerationFields) -> dict[str, Any]:
    """Return the body's fields for a neutral request, except the grammar."""
    return {
        "n": body.n or 1,
        "max_tokens": body.max_tokens,
        "sampling": sampling_of(body, "openai"),
        "logit_bias": body.logit_bias or {},
        "allowed_token_ids": body.allowed_token_ids,
        "bad_words": body.bad_words or (),
        "stop": body.stop or (),
        "stop_token_ids": body.stop_token_ids or (),
        "include_stop_str_in_output": bool(body.include_stop_str_in_output),
        "ignore_eos": bool(body.ignore_eos),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }


def structured_grammar(asked: StructuredOutputs | None) -> AskedGrammar | None:
    """Return the grammar of `structured_outputs`. Raises 400 unless exactly one form is given."""
    if asked is None:
        return None
    values = {"json": asked.json_, **{name: getattr(asked, name) for name in _KINDS if name != "json"}}
    # `"json_object": false` asks for nothing.
    given = [name for name, value in values.items() if value is not None and value is not False]
    if len(given) != 1:
        names = ", ".join(f"'{name}'" for name in given or _KINDS)
        rule = f"must have only one of {names}" if given else f"must have one of {names}"
        raise invalid(f"'structured_outputs' {rule}.", "structured_outputs")
    [name] = given
    param, value, kind = f"structured_outputs.{name}", values[name], _KINDS[name]
    if asked.grammar_syntax is not None:
        if name != "grammar":
            at = "structured_outputs.grammar_syntax"
            raise invalid(f"'{at}' is of a 'grammar', and '{name}' is asked for: leave it out.", at)
        kind = _SYNTAXES[asked.grammar_syntax]
    if value is True:
        return AskedGrammar(Grammar(kind, ""), param)
    return grammar_of(kind, value, param)


def grammar_of(kind: GrammarKind, value: Any, param: str) -> AskedGrammar:
    """Return the grammar of a text or a JSON value. Raises 400 for a value that is nested too deeply."""
    if isinstance(value, str):
        return AskedGrammar(Grammar(kind, value), param)
    try:
        return AskedGrammar(Grammar(kind, orjson.dumps(value).decode()), param)
    except orjson.JSONEncodeError:
        raise invalid(f"'{param}' is nested too deeply: make it flatter.", param) from None


def json_grammar(schema: Any, param: str) -> AskedGrammar:
    """Return the grammar of a JSON schema, or of any JSON object if the schema is None. Raises 400."""
    if schema is None:
        return AskedGrammar(Grammar(GrammarKind.JSON_OBJECT, ""), param)
    return grammar_of(GrammarKind.JSON_SCHEMA, schema, param)


# Messages and tools

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS_NOT_YET = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal", "thinking")
PART_NO_EFFECT = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of a message's part that have no effect, because prefixes are always cached."""


@has_not_yet('annotations=[] audio function_call="none"|"auto" refusal')
class ChatMessage(Body):
    role: Any
    content: Any = None
    name: str | None = None
    parsed: Unread = None
    """OpenAI's client parses `content` into this field, and sends it back with the history."""
    provider_specific_fields: Unread = None
    """litellm copies unknown fields of an answer here, and sends them back with the history."""
    cache_control: Unread = None
    reasoning: str | None = None
    """vLLM's name for `reasoning_content`."""
    reasoning_content: str | None = None
    """An assistant's reasoning. The chat template decides whether the model sees it."""
    tool_call_id: Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)] | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(Body):
    """Fields that decide how messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: Annotated[Any, NotYet()] = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


def read_conversation(fields: ChatTemplateFields) -> Conversation:
    """Return the conversation without its tools. Raises 400, also for parts other than text."""
    continues = bool(fields.continue_final_message)
    # To continue the last message means that no new turn is opened.
    opens = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    return Conversation(messages, opens, continues, fields.chat_template_kwargs or {})


def read_tools(tools: Sequence[ToolBody], at: str = "tools[{}].function") -> list[FunctionTool]:
    """Return the tools in neutral form. `at`: a tool's path in the body, by index. Raises 400 for schemas nested too deeply."""
    for index, tool in enumerate(tools):
        check_depth(tool.function.parameters, f"{at.format(index)}.parameters")
    return [
        FunctionTool(
            name=tool.function.name,
            description=tool.function.description,
            parameters=tool.function.parameters,
            is_strict=bool(tool.function.strict),
        )
        for tool in tools
    ]


def read_told_conversation(fields: ChatTemplateFields) -> Conversation:
    """Return the checked conversation, with its tools as the chat template gets them. Raises 400 and `Rejected`."""
    names = Names(fields={"tools.*": "tools[{}].function"})
    conversation = read_conversation(fields)
    check_conversation(conversation, names)
    return replace(conversation, tools=told_tools(read_tools(fields.tools or ()), names))


def _read_message(message: ChatMessage, at: str) -> Message:
    reasoning = message.reasoning_content or message.reasoning or ""
    if message.reasoning and message.reasoning != reasoning:
        raise invalid(f"'{at}.reasoning' and '{at}.reasoning_content' differ; give one of them.", f"{at}.reasoning")
    return make_message(
        at,
        message.role,
        message.content,
        name=message.name,
        calls=message.tool_calls or (),
        call_id=message.tool_call_id,
        reasoning=reasoning,
    )


def make_message(
    at: str,
    role: Any,
    content: Any,
    *,
    name: str | None = None,
    calls: Sequence[ToolCallBody] = (),
    call_id: str | None = None,
    reasoning: str = "",
) -> Message:
    """Return a message. `at`: its path in the body. `content`: a text or a list of text parts. Raises 400."""
    role = _role(role, f"{at}.role")
    past_calls: list[PastCall] = []
    for index, call in enumerate(calls):
        past_calls.append(past_call(call.id, call.function.name, call.function.arguments, f"{at}.tool_calls[{index}].function"))
    for field, value in (("tool_calls", calls), ("reasoning_content", reasoning)):
        if value and role != "assistant":
            raise invalid(f"'{at}.{field}' is for messages with the role 'assistant', not '{role}'.", f"{at}.{field}")
    if role == "tool" and call_id is None:
        raise invalid(f"Missing required parameter: '{at}.tool_call_id'.", f"{at}.tool_call_id")
    if role != "tool" and call_id is not None:
        raise invalid(f"'{at}.tool_call_id' is for messages with the role 'tool'.", f"{at}.tool_call_id")
    return Message(
        role=role,
        content="" if calls and content in (None, []) else _text(content, f"{at}.content"),
        name=name,
        calls=tuple(past_calls),
        call_id=call_id or "",
        reasoning=reasoning,
    )


def _role(role: Any, param: str) -> str:
    """Return the role, with `developer` as `system`. Raises 400."""
    if role == "function":
        raise invalid(f"'{param}' 'function' is not supported: send the role 'tool', which took its place.", param)
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"'{param}' must be one of {', '.join(_ROLES)}.", param)
    return "system" if role == "developer" else role


def _text(content: Any, param: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise invalid(f"'{param}' must be a string, or a list of text parts that is not empty.", param)
    return "".join([_part_text(part, f"{param}[{index}]") for index, part in enumerate(content)])


def _part_text(part: Any, param: str) -> str:
    if not isinstance(part, dict):
        raise invalid(f"'{param}' must be an object.", param)
    kind = part.get("type")
    if kind in _PARTS_NOT_YET:
        raise invalid(f"'{param}.type' {kind!r} is not supported yet; only text is.", f"{param}.type")
    if kind != "text":
        raise invalid(f"'{param}.type' must be 'text'.", f"{param}.type")
    for name in part:
        if name not in ("type", "text") and name not in PART_NO_EFFECT:
            raise invalid(f"Unknown parameter: '{param}.{shorten(name)}'.", param)
    if not isinstance(part.get("text"), str):
        raise invalid(f"'{param}.text' must be a string.", f"{param}.text")
    return str(part["text"])
