"""Reads bodies of `/v1/completions` and `/v1/chat/completions` into requests common to all APIs. May run on any thread."""

from __future__ import annotations

from typing import Any

from starlette.types import Scope

from penstock.calls.call import BeamSearch, Call, ChatRequest, CompletionRequest, Names, TextPrompt, TokenPrompt, ToolChoice
from penstock.serve.asking import Asked
from penstock.serve.bodies import (
    MAX_CHOICES,
    fields_of,
    grammar_of,
    json_grammar,
    parse_body,
    structured_grammar,
    value_grammar,
)
from penstock.serve.errors import invalid
from penstock.serve.http.checks import identity_of
from penstock.serve.messages import read_choice, read_conversation, read_tools
from penstock.serve.openai.schemas import ChatCompletionBody, CompletionBody, GenerationBody, ResponseFormat
from penstock.serve.openai.write import ChatWriter, CompletionWriter
from penstock.serve.streams import NewWriter
from penstock.text.grammar import Grammar, GrammarKind

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. Chats have the rest of the context."""
_BUDGETS = ("thinking_token_budget", "max_thinking_tokens", "thinking_budget")
"""Names of the field that limits reasoning: vLLM's, and two of other servers."""
_ONLY_WITH_BEAMS = {"length_penalty": 1.0, "early_stopping": False}
"""Fields that need a beam search, with vLLM's defaults."""


def read_chat(asked: Asked) -> Call:
    """Read a body of `/v1/chat/completions`. Raises `ApiError` and `Rejected`."""
    return chat(parse_body(asked.data, ChatCompletionBody, asked.reader.ignored), asked)[0]


def chat(body: ChatCompletionBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Answer a conversation. The model's own chat template turns the messages into its prompt."""
    fields = _fields(body, asked.scope)
    if body.logprobs:
        fields["logprobs"] = body.top_logprobs or 0
    elif body.top_logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    if body.max_completion_tokens is not None:
        if body.max_tokens not in (None, body.max_completion_tokens):
            raise invalid("'max_tokens' and 'max_completion_tokens' differ; give one of them.", "max_tokens")
        fields["max_tokens"] = body.max_completion_tokens
    budget_field, budget = _budget(body)
    request = ChatRequest(
        **fields,
        names=Names(fields={"tools.*": "tools[{}].function", "max_reasoning_tokens": budget_field}),
        answer_prefix="chatcmpl-",
        conversation=read_conversation(body),
        adds_special_tokens=body.add_special_tokens is True,
        tools=read_tools(body.tools or ()),
        tool_choice=_choice(body),
        reasoning_effort=body.reasoning_effort,
        max_reasoning_tokens=budget,
        has_reasoning=body.include_reasoning is not False,
    )
    return asked.call(request), ChatWriter


def completion(body: CompletionBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Continue one or more prompts, given as text or token ids."""
    fields = _fields(body, asked.scope)
    if body.best_of is not None and body.best_of != fields["n"]:
        raise invalid(f"'best_of' other than n ({fields['n']}) is not supported yet.", "best_of")
    is_empty = body.suffix and body.prompt == ""
    request = CompletionRequest(
        **fields,
        answer_prefix="cmpl-",
        prompts=(TextPrompt("", "prompt"),) if is_empty else _prompts(body.prompt),
        logprobs=body.logprobs,
        adds_special_tokens=body.add_special_tokens is not False,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS,
        ends_with_context=False,
        suffix=body.suffix or "",
        echo=bool(body.echo),
        scores_echo=bool(body.echo),
    )
    return asked.call(request), CompletionWriter


def _fields(body: GenerationBody, scope: Scope) -> dict[str, Any]:
    """Return the fields common to chats and completions. Raises 400."""
    if body.request_id is not None:
        identity_of(scope).adopt(body.request_id)  # first, so that any later refusal has this id
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("'stream_options' needs 'stream': true.", "stream_options")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        param = "stream_options.continuous_usage_stats"
        raise invalid(f"'{param}' needs 'include_usage': true.", param)
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("'prompt_logprobs' is not supported in a stream: leave out 'stream'.", "prompt_logprobs")
    if not body.use_beam_search:
        for field, neutral in _ONLY_WITH_BEAMS.items():
            if getattr(body, field) not in (None, neutral):
                raise invalid(f"'{field}' needs 'use_beam_search': true.", field)
    beams = BeamSearch(
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
    )
    return fields_of(body) | {
        "model": body.model,
        "beams": beams if body.use_beam_search else None,
        "grammar": _grammar(body),
        "prompt_logprobs": body.prompt_logprobs,
        "is_streamed": bool(body.stream),
        "includes_usage": bool(options and options.include_usage),
        "has_continuous_usage": bool(options and options.continuous_usage_stats),
        "has_timings": bool(body.timings_per_token),
        "has_token_ids": bool(body.return_token_ids),
        "priority": body.priority,
        "cache_salt": body.cache_salt or "",
        "conversation_name": body.prompt_cache_key or body.session_id or body.user or "",
        "user": body.safety_identifier or body.user or "",
    }


def _grammar(body: GenerationBody) -> Grammar | None:
    of_format = None if body.response_format is None else _format_grammar(body.response_format)
    if of_format is not None and body.structured_outputs is not None:
        message = "'response_format' and 'structured_outputs' both say what the answer must be: leave one of them out."
        raise invalid(message, "structured_outputs")
    return of_format or structured_grammar(body.structured_outputs)


def _format_grammar(asked: ResponseFormat) -> Grammar | None:
    schema = asked.json_schema
    tags = [name for name in ("structures", "triggers", "format") if getattr(asked, name) is not None]
    fields = [("json_schema", schema is not None, "json_schema"), ("schema", asked.schema_ is not None, "json_object")]
    fields += [(name, True, "structural_tag") for name in tags]
    fields.append(("value", asked.value is not None and asked.type not in ("json_object", "regex"), "json"))
    for field, is_given, kind in fields:
        if is_given and asked.type != kind:
            param = f"response_format.{field}"
            raise invalid(f"'{param}' needs 'type': '{kind}', not '{asked.type}'.", param)
    if asked.value is not None and asked.schema_ is not None:
        raise invalid("Give one of 'response_format.schema' and 'response_format.value'.", "response_format.value")
    match asked.type:
        case "text":
            return None
        case "structural_tag":
            value = asked.model_dump(include={"type", *tags}, by_alias=True)
            return grammar_of(GrammarKind.STRUCTURAL_TAG, value, "response_format")
        case "json_object" if asked.value is None:  # with an empty schema, too: llama.cpp's default
            return json_grammar(asked.schema_ or None, f"response_format{'.schema' if asked.schema_ else ''}")
        case "json" | "json_object" | "regex":
            return value_grammar(asked.type, asked.value, "response_format.value")
    if schema is None:
        raise invalid("Missing required parameter: 'response_format.json_schema'.", "response_format.json_schema")
    return json_grammar(schema.schema_, "response_format.json_schema.schema")


def _prompts(value: Any) -> tuple[TextPrompt | TokenPrompt, ...]:
    """Return the prompts of `str | list[str] | list[int] | list[list[int]]`: at most `MAX_CHOICES`, none empty."""
    if not isinstance(value, str | list):
        raise invalid("'prompt' must be a string, a list of strings, a list of token ids or a list of those.", "prompt")
    if not value or isinstance(value, str) or type(value[0]) is int:
        return (_prompt(value, "prompt"),)
    if len(value) > MAX_CHOICES:
        raise invalid(f"'prompt' has {len(value)} prompts; at most {MAX_CHOICES} are taken at once.", "prompt")
    for index, item in enumerate(value):
        if type(item) is not type(value[0]) or not isinstance(item, str | list):
            param = f"prompt[{index}]"
            raise invalid(f"'{param}' must be like the prompts before it: all strings, or all lists of token ids.", param)
    return tuple(_prompt(item, f"prompt[{index}]") for index, item in enumerate(value))


def _prompt(value: str | list[Any], param: str) -> TextPrompt | TokenPrompt:
    if not value:
        raise invalid(f"'{param}' is empty.", param)
    if isinstance(value, str):
        return TextPrompt(value, param)
    for index, token_id in enumerate(value):
        if type(token_id) is not int:
            raise invalid(f"'{param}[{index}]' must be a token id.", param)
    return TokenPrompt(tuple(value), param)


# Tools and reasoning


def _choice(body: ChatCompletionBody) -> ToolChoice:
    has_functions = body.functions not in (None, [])
    if has_functions or body.function_call not in (None, "none", "auto"):
        field, instead = ("functions", "tools") if has_functions else ("function_call", "tool_choice")
        raise invalid(f"'{field}' is not supported: send '{instead}', which took its place.", field)
    names = [tool.function.name for tool in body.tools or ()]
    return read_choice(body.tool_choice, names, is_parallel=body.parallel_tool_calls is not False, is_nested=True)


def _budget(body: ChatCompletionBody) -> tuple[str, int | None]:
    """Return name and value of the field that limits reasoning. Raises 400 if two such fields differ."""
    given: dict[str, int] = {name: value for name in _BUDGETS if (value := getattr(body, name)) not in (None, -1)}
    names = [*given, *_BUDGETS]
    if len(set(given.values())) > 1:
        raise invalid(f"'{names[0]}' and '{names[1]}' differ; give one of them.", names[1])
    return names[0], given.get(names[0])
