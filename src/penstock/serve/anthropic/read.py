"""From a body of Anthropic's Messages API to a `Call`, or the 400 that names what is wrong.

Messages become those of a conversation. All else becomes the fields of a chat, whose reader knows the rules.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from starlette.types import Scope

from penstock.calls.call import NAME_RULE, TOOL_NAME, Call, Conversation
from penstock.deploy.deployment import Deployment
from penstock.deploy.running import RunningModel
from penstock.serve.anthropic.schemas import ClientTool, CountTokensBody, MessagesBody
from penstock.serve.anthropic.write import NO_THREADS
from penstock.serve.asking import Reader, find_model
from penstock.serve.bodies import (
    MAX_CALL_ID_CHARS,
    MAX_TOOLS,
    FunctionBody,
    IgnoredParameters,
    NotYet,
    ToolBody,
    check_depth,
    parse_body,
)
from penstock.serve.errors import ApiError, invalid, shorten, unknown
from penstock.serve.generation import ChatTemplateFields, read_told_conversation
from penstock.serve.openai.read import call_of_chat
from penstock.serve.openai.schemas import ChatCompletionBody, JsonSchemaFormat, ResponseFormat
from penstock.text.dialects import Dialect, Message, PastCall
from penstock.types.errors import counted

ANSWER_PREFIX = "msg_"
NAMES: Mapping[str, str] = MappingProxyType(
    {
        "response_format.json_schema": "output_config.format",
        **{f"tools[{index}].function.parameters": f"tools[{index}].input_schema" for index in range(MAX_TOOLS)},
        **{f"tools[{index}].function": f"tools[{index}]" for index in range(MAX_TOOLS)},
    }
)
"""Fields of a chat as this API calls them, for errors."""
_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "text": frozenset({"text"}),
        "tool_use": frozenset({"id", "name", "input"}),
        "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
        "thinking": frozenset({"thinking", "signature"}),
    }
)
"""The blocks that are understood, and their own fields beside `type`. Signatures say nothing here."""
_HINTS: Mapping[str, NotYet] = MappingProxyType(
    {
        "citations": NotYet([]),
        "caller": NotYet({"type": "direct"}),
        "toolset_name": NotYet(),
    }
)
"""Fields of any block, and their values that ask for nothing: clients send along what they keep of an answer."""
_IN_ROLE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "system": frozenset({"text"}),
        "user": frozenset({"text", "tool_result"}),
        "assistant": frozenset({"text", "tool_use", "thinking"}),
    }
)
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "image": "the models here read text alone",
        "document": "the models here read text alone: send the document's text",
        "redacted_thinking": "it can be read by Anthropic's own models alone: leave it out",
    }
)
_EFFORTS: Mapping[str, str] = MappingProxyType(
    {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
)
"""Anthropic's words, and those of the chat templates that know efforts."""


class MessagesReader:
    """Reads what clients of Anthropic's API ask. Thread-safe."""

    def __init__(self, reader: Reader, deployment: Deployment, ignored: IgnoredParameters | None = None) -> None:
        """`ignored`: as for `parse_body`."""
        self._reader = reader
        self._deployment = deployment
        self._ignored = ignored

    def message(self, data: bytes, scope: Scope) -> Call:
        """The body of `/v1/messages`. Raises `ApiError`."""
        body = parse_body(data, MessagesBody, self._ignored)
        if body.thread is not None:
            message = "'thread' is not supported: no conversation is kept here. Send all of it in 'messages'."
            raise ApiError(400, message, code=NO_THREADS, param="thread")
        user = None if body.metadata is None else body.metadata.user_id
        running = self._reader.find(body.model, scope, user or "")[0].answerer()
        chat = ChatCompletionBody.model_construct(
            model=body.model,
            max_tokens=body.max_tokens,
            stream=body.stream,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            stop=body.stop_sequences,
            user=user,
            **self._chat_fields(body, running.dialect),
        )
        call = call_of_chat(self._reader, chat, data, scope)
        assert isinstance(call.prompts, Conversation)
        return dataclasses.replace(
            call,
            prompts=_conversation(body, call.prompts),
            answer=dataclasses.replace(call.answer, answer_id=f"{ANSWER_PREFIX}{call.terms.request_id}"),
        )

    def prompt(self, data: bytes, scope: Scope) -> tuple[RunningModel, Conversation]:
        """The body of `/v1/messages/count_tokens`, and the model that is meant. Raises `ApiError`."""
        body = parse_body(data, CountTokensBody, self._ignored)
        running = find_model(body.model, self._deployment, scope)
        if running.model.encoder is not None:
            raise invalid(f"{running.name} turns texts into numbers and takes no messages. Ask another model.", "model")
        fields = self._chat_fields(body, running.dialect)
        if fields.get("tool_choice") == "none":
            fields.pop("tools", None)
        template = ChatTemplateFields.model_construct(
            **{name: value for name, value in fields.items() if name in ChatTemplateFields.model_fields}
        )
        return running, _conversation(body, read_told_conversation(template))

    def _chat_fields(self, body: CountTokensBody, dialect: Dialect) -> dict[str, Any]:
        """The fields of a chat that speak of tools, reasoning and the form of the answer; its messages come later."""
        fields: dict[str, Any] = {"messages": []}
        variables: dict[str, Any] = {}
        if body.tools:
            fields["tools"] = _tools(body.tools)
        if body.tool_choice is not None:
            fields |= _tool_choice(body)
        self._read_thinking(body, dialect, fields, variables)
        output = body.output_config
        if output is not None and output.effort is not None and dialect.takes_effort:
            variables["reasoning_effort"] = _EFFORTS[output.effort]
        if output is not None and output.format is not None:
            check_depth(output.format.schema_, "output_config.format.schema")
            schema = JsonSchemaFormat.model_construct(name="answer", schema_=output.format.schema_)
            fields["response_format"] = ResponseFormat.model_construct(type="json_schema", json_schema=schema)
        if variables:
            fields["chat_template_kwargs"] = variables
        return fields

    def _read_thinking(
        self, body: CountTokensBody, dialect: Dialect, fields: dict[str, Any], variables: dict[str, Any]
    ) -> None:
        """Anthropic's default is not to think. A template that has no switch for it has its block ended at once."""
        thinking = body.thinking
        kind = "disabled" if thinking is None else thinking.type
        budget = None if thinking is None else thinking.budget_tokens
        if thinking is not None and (kind == "enabled") != (budget is not None):
            param = "thinking.budget_tokens"
            if budget is None:
                raise invalid(f"Missing required parameter: '{param}'.", param)
            raise invalid(f"'{param}' is for thinking of the type 'enabled', not '{kind}'.", param)
        if dialect.takes_enable_thinking:
            variables["enable_thinking"] = kind != "disabled"
        elif kind == "disabled" and dialect.reasoning is not None:
            fields["thinking_budget"] = 0
        if budget is not None and dialect.reasoning is not None:
            fields["thinking_budget"] = budget
        if thinking is not None and thinking.display == "omitted":
            fields["include_reasoning"] = False


# Tools


def _tools(tools: Sequence[ClientTool]) -> list[ToolBody]:
    return [
        ToolBody.model_construct(
            type="function",
            function=FunctionBody.model_construct(
                name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
            ),
        )
        for tool in tools
    ]


def _tool_choice(body: CountTokensBody) -> dict[str, Any]:
    """The choice in a chat's words."""
    choice = body.tool_choice
    assert choice is not None
    names = [tool.name for tool in body.tools or ()]
    if choice.type in ("any", "tool") and not names:
        raise invalid(f"'tool_choice' is '{choice.type}', but there are no 'tools'.", "tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        if choice.name is None:
            raise invalid("Missing required parameter: 'tool_choice.name'.", "tool_choice.name")
        raise invalid(f"'tool_choice.name' is for the type 'tool', not '{choice.type}'.", "tool_choice.name")
    if choice.name is not None and choice.name not in names:
        message = f"'tool_choice.name' is {shorten(choice.name)!r}, which none of the 'tools' has."
        raise invalid(message, "tool_choice.name")
    words: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
    words["tool"] = {"type": "function", "function": {"name": choice.name}}
    return {"tool_choice": words[choice.type], "parallel_tool_calls": not choice.disable_parallel_tool_use}


# Messages


def _conversation(body: CountTokensBody, told: Conversation) -> Conversation:
    """A conversation that has tools and variables already, with the body's messages."""
    made = _Messages()
    if body.system not in (None, "", []):
        made.add("system", body.system, "system")
    for index, message in enumerate(body.messages):
        made.add(message.role, message.content, f"messages[{index}].content")
    messages, goes_on = made.finish(), body.messages[-1].role == "assistant"
    if goes_on and messages[-1].calls:
        param = f"messages[{len(body.messages) - 1}]"
        raise invalid(f"'{param}' calls tools and is the last message: one with their results must follow.", param)
    return dataclasses.replace(told, messages=messages, add_generation_prompt=not goes_on, continue_final_message=goes_on)


class _Messages:
    """Messages of the conversation, put together from blocks. Turns of one role that follow each other become one, as at
    Anthropic: many chat templates take no others."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._call_ids: set[str] = set()
        self._role = ""
        """The role of the turn that is being put together; empty: there is none."""
        self._texts: list[str] = []
        self._calls: list[PastCall] = []
        self._reasoning: list[str] = []

    def finish(self) -> list[Message]:
        self._end_turn()
        return self._found

    def add(self, role: str, content: Any, param: str) -> None:
        """Add a message. A `system` message within the conversation becomes part of a user's turn: many templates refuse it.

        Raises 400.
        """
        turn = "user" if role == "system" and (self._found or self._role) else role
        if turn != self._role:
            self._end_turn()
            self._role = turn
        if isinstance(content, str):
            self._texts.append(content)
            return
        for at, block in _checked(content, role, param):
            match block["type"]:
                case "text":
                    self._texts.append(_string(block, "text", at))
                case "thinking":
                    self._reasoning.append(_string(block, "thinking", at))
                case "tool_use":
                    self._add_call(block, at)
                case _:
                    self._add_result(block, at)

    def _add_call(self, block: Mapping[str, Any], at: str) -> None:
        call_id, name = _string(block, "id", at), _string(block, "name", at)
        if not 0 < len(call_id) <= MAX_CALL_ID_CHARS:
            raise invalid(f"'{at}.id' must have 1 to {counted(MAX_CALL_ID_CHARS, 'character')}.", f"{at}.id")
        if not TOOL_NAME.fullmatch(name):
            raise invalid(f"'{at}.name' {NAME_RULE}.", f"{at}.name")
        if not isinstance(block.get("input"), dict):
            raise invalid(f"'{at}.input' must be an object.", f"{at}.input")
        check_depth(block["input"], f"{at}.input")
        if len(self._calls) == MAX_TOOLS:
            raise invalid(f"'{at}' is too many: a turn has at most {MAX_TOOLS} blocks of the type 'tool_use'.", at)
        self._call_ids.add(call_id)
        self._calls.append(PastCall(call_id, name, block["input"]))

    def _add_result(self, block: Mapping[str, Any], at: str) -> None:
        call_id = _string(block, "tool_use_id", at)
        if call_id not in self._call_ids:
            param = f"{at}.tool_use_id"
            raise invalid(f"'{param}' is {shorten(call_id)!r}, which no 'tool_use' before it has as its id.", param)
        content, is_error = block.get("content"), block.get("is_error")
        if is_error is not None and not isinstance(is_error, bool):
            raise invalid(f"'{at}.is_error' must be true or false.", f"{at}.is_error")
        if content is None or content == []:
            content = ""
        elif isinstance(content, list):
            blocks = _checked(content, "system", f"{at}.content")
            content = "\n".join([_string(one, "text", place) for place, one in blocks])
        elif not isinstance(content, str):
            raise invalid(f"'{at}.content' must be a string, or a list of text blocks.", f"{at}.content")
        self._end_turn()
        self._found.append(Message(role="tool", content=f"Error: {content}" if is_error else content, call_id=call_id))
        self._role = "user"

    def _end_turn(self) -> None:
        """Make a message of the turn: an assistant's texts are one, and others' have a line each."""
        if self._texts or self._calls or self._reasoning:
            between = "" if self._role == "assistant" else "\n"
            message = Message(
                role=self._role,
                content=between.join(self._texts),
                calls=tuple(self._calls),
                reasoning="\n".join(self._reasoning),
            )
            self._found.append(message)
        self._role, self._texts, self._calls, self._reasoning = "", [], [], []


def _checked(blocks: Any, role: str, param: str) -> list[tuple[str, dict[str, Any]]]:
    """Each block of a content with its place in the body, checked to be one that a message of this role may have."""
    if not isinstance(blocks, list) or not blocks:
        raise invalid(f"'{param}' must be a string, or a list of blocks that is not empty.", param)
    checked: list[tuple[str, dict[str, Any]]] = []
    for index, block in enumerate(blocks):
        at = f"{param}[{index}]"
        if not isinstance(block, dict):
            raise invalid(f"'{at}' must be an object.", at)
        _check_kind(block.get("type"), role, f"{at}.type")
        for name, value in block.items():
            if name in _HINTS:
                _HINTS[name].refuse(value, f"{at}.{name}")
            elif name not in ("type", "cache_control") and name not in _FIELDS[block["type"]]:
                raise unknown(f"{at}.{name}")
        checked.append((at, block))
    return checked


def _check_kind(kind: Any, role: str, param: str) -> None:
    if isinstance(kind, str) and kind in _IN_ROLE[role]:
        return
    if isinstance(kind, str) and kind in _WHY_NOT:
        raise invalid(f"'{param}' '{kind}' is not supported: {_WHY_NOT[kind]}.", param)
    known = ", ".join(f"'{one}'" for one in sorted(_IN_ROLE[role]))
    told = f" {shorten(kind)!r}" if isinstance(kind, str) else ""
    raise invalid(f"'{param}'{told} is not supported here: it must be one of {known}.", param)


def _string(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"'{at}.{name}' must be a string.", f"{at}.{name}")
    return value
