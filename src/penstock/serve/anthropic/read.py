"""Reads bodies of Anthropic's Messages API into requests common to all APIs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from starlette.types import Scope

from penstock.calls.call import Call, ChatRequest, Conversation, FunctionTool, Names, ToolChoice
from penstock.calls.check import TEMPLATE_EFFORTS, check_conversation, tools_for_template
from penstock.deploy.running import RunningModel
from penstock.serve.anthropic.schemas import ClientTool, CountTokensBody, MessagesBody
from penstock.serve.anthropic.write import NO_THREADS, MessageWriter
from penstock.serve.asking import Asked, Reader, check_filled, find_allowed
from penstock.serve.bodies import NotYet, check_depth, json_grammar, parse_body, sampling_of
from penstock.serve.errors import ApiError, invalid, refuse_unknown, shorten
from penstock.serve.messages import MAX_CALL_ID_CHARS, MAX_MESSAGES, function_tool, past_call
from penstock.serve.streams import NewWriter
from penstock.text.dialects import Dialect, Message, PastCall
from penstock.types.errors import counted

_NAMES: Mapping[str, str] = MappingProxyType({"stop": "stop_sequences", "max_reasoning_tokens": "thinking.budget_tokens"})
_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "text": frozenset({"text"}),
        "tool_use": frozenset({"id", "name", "input"}),
        "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
        "tool_reference": frozenset({"tool_name"}),
        "thinking": frozenset({"thinking", "signature"}),
    }
)
"""Supported types of blocks, with their fields besides `type`. Signatures are ignored."""
_HINTS: Mapping[str, NotYet] = MappingProxyType(
    {
        "citations": NotYet([]),
        "caller": NotYet({"type": "direct"}),
        "toolset_name": NotYet(),
    }
)
"""Fields of any block with their neutral values. Clients send them back with blocks of earlier answers."""
_IN_ROLE: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "system": frozenset({"text"}),
        "result": frozenset({"text", "tool_reference"}),
        "user": frozenset({"text", "tool_result"}),
        "assistant": frozenset({"text", "tool_use", "thinking"}),
    }
)
_WHY_NOT: Mapping[str, str] = MappingProxyType(
    {
        "image": "the models here read text alone",
        "document": "the models here read text alone: send the document's text",
        "redacted_thinking": "only Anthropic's own models can read it: leave it out",
    }
)


def create(body: MessagesBody, asked: Asked) -> tuple[Call, NewWriter]:
    """Answer a conversation, in the shape of Anthropic's Messages API."""
    if body.thread is not None:
        message = "'thread' is not supported: no conversation is kept here. Send all of it in 'messages'."
        raise ApiError(400, message, code=NO_THREADS, param="thread")
    user = (None if body.metadata is None else body.metadata.user_id) or ""
    dialect = asked.find(body.model, user)[0].answerer().dialect
    budget, output = _reasoning_budget(body, dialect), body.output_config
    schema = None if output is None or output.format is None else output.format.schema_
    param = "output_config.format.schema"
    check_depth(schema, param)
    shown = _shown(body)
    request = ChatRequest(
        names=_names(shown),
        answer_prefix="msg_",
        model=body.model,
        max_tokens=body.max_tokens,
        is_streamed=bool(body.stream),
        sampling=sampling_of(body, "anthropic"),
        stop=body.stop_sequences or (),
        user=user,
        conversation_name=user,
        conversation=_conversation(body, dialect),
        tools=_tools(shown),
        tool_choice=_tool_choice(body, shown),
        grammar=None if schema is None else json_grammar(schema, param),
        max_reasoning_tokens=budget,
        has_reasoning=body.thinking is None or body.thinking.display != "omitted",
    )
    return asked.call(request), MessageWriter


def read_prompt(data: bytes, scope: Scope, reader: Reader) -> tuple[RunningModel, Conversation]:
    """Return the prompt of a body of `/v1/messages/count_tokens`, and its model. Raises `ApiError` and `Rejected`."""
    body = parse_body(data, CountTokensBody, reader.ignored)
    served, _ = find_allowed(body.model, reader.deployment, scope)
    check_filled(body.model, reader.deployment, scope)
    running = served.answerer()
    if running.model.encoder is not None:
        raise invalid(f"{running.name} is an encoder and takes no messages. Choose another model.", "model")
    _reasoning_budget(body, running.dialect)
    shown = _shown(body)
    names = _names(shown)
    tools = () if _tool_choice(body, shown).mode == "none" else tools_for_template(_tools(shown), names)
    conversation = _conversation(body, running.dialect)
    check_conversation(conversation, names)
    return running, replace(conversation, tools=tools)


def _variables(body: CountTokensBody, dialect: Dialect) -> dict[str, Any]:
    """Return the template variables that control reasoning. Without `thinking`, the model does not reason, as at Anthropic."""
    variables: dict[str, Any] = {}
    if dialect.thinking_variable is not None:
        variables[dialect.thinking_variable] = body.thinking is not None and body.thinking.type != "disabled"
    if body.output_config is not None and body.output_config.effort is not None and dialect.takes_effort:
        effort = body.output_config.effort
        variables["reasoning_effort"] = TEMPLATE_EFFORTS.get(effort, effort)
    return variables


def _reasoning_budget(body: CountTokensBody, dialect: Dialect) -> int | None:
    """Return the limit of reasoning tokens, or None. Raises 400.

    0 disables reasoning if the chat template has no variable for that.
    """
    thinking = body.thinking
    kind = "disabled" if thinking is None else thinking.type
    budget = None if thinking is None else thinking.budget_tokens
    if thinking is not None and (kind == "enabled") != (budget is not None):
        param = "thinking.budget_tokens"
        if budget is None:
            raise invalid(f"Missing required parameter: '{param}'.", param)
        raise invalid(f"'{param}' is for thinking of the type 'enabled', not '{kind}'.", param)
    if dialect.reasoning is None:
        return None
    return 0 if kind == "disabled" and dialect.thinking_variable is None else budget


def _names(shown: Sequence[tuple[int, ClientTool]]) -> Names:
    """Return the client's names of fields. A tool's index counts the hidden ones, too."""
    fields = dict(_NAMES)
    for nth, (index, _) in enumerate(shown):
        fields |= {f"tools.{nth}": f"tools[{index}]", f"tools.{nth}.parameters": f"tools[{index}].input_schema"}
    return Names("anthropic", fields=fields)


def _tools(shown: Sequence[tuple[int, ClientTool]]) -> list[FunctionTool]:
    return [
        function_tool(one.name, one.description, one.input_schema, is_strict=one.strict, at=f"tools[{index}].input_schema")
        for index, one in shown
    ]


def _shown(body: CountTokensBody) -> list[tuple[int, ClientTool]]:
    """Return the tools that the model sees, by index. A deferred one is seen once a result refers to it, as of a search."""
    tools = list(enumerate(body.tools or ()))
    if any(tool.defer_loading for _, tool in tools):
        parts = [
            part for message in body.messages for block in _dicts(message.content) for part in _dicts(block.get("content"))
        ]
        found = {str(part.get("tool_name")) for part in parts if part.get("type") == "tool_reference"}
        tools = [(index, tool) for index, tool in tools if not tool.defer_loading or tool.name in found]
    return tools


def _dicts(blocks: Any) -> list[dict[str, Any]]:
    return [block for block in blocks if isinstance(block, dict)] if isinstance(blocks, list) else []


def _tool_choice(body: CountTokensBody, shown: Sequence[tuple[int, ClientTool]]) -> ToolChoice:
    choice, names = body.tool_choice, [tool.name for _, tool in shown]
    if choice is None:
        return ToolChoice()
    if choice.type in ("any", "tool") and not names:
        raise invalid(f"'tool_choice' is '{choice.type}', but there are no 'tools'.", "tool_choice")
    if (choice.type == "tool") != (choice.name is not None):
        if choice.name is None:
            raise invalid("Missing required parameter: 'tool_choice.name'.", "tool_choice.name")
        raise invalid(f"'tool_choice.name' is for the type 'tool', not '{choice.type}'.", "tool_choice.name")
    if choice.name is not None and choice.name not in names:
        message = f"'tool_choice.name' is {shorten(choice.name)!r}, which none of the 'tools' has."
        raise invalid(message, "tool_choice.name")
    is_parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "tool":
            return ToolChoice("required", frozenset([choice.name or ""]), is_parallel=False)
        case "any":
            return ToolChoice("required", is_parallel=is_parallel)
        case other:
            return ToolChoice(other, is_parallel=is_parallel)


# Messages


def _conversation(body: CountTokensBody, dialect: Dialect) -> Conversation:
    """Return the body's messages, without its tools. Raises 400."""
    made = _Messages()
    if body.system not in (None, "", []):
        made.add("system", body.system, "system")
    for index, message in enumerate(body.messages):
        made.add(message.role, message.content, f"messages[{index}].content")
    messages, goes_on = made.finish(), body.messages[-1].role == "assistant"
    if goes_on and messages[-1].calls:
        param = f"messages[{len(body.messages) - 1}]"
        raise invalid(f"'{param}' calls tools and is the last message: one with their results must follow.", param)
    return Conversation(
        messages, add_generation_prompt=not goes_on, continue_final_message=goes_on, variables=_variables(body, dialect)
    )


class _Messages:
    """Turns Anthropic's messages into a template's. Consecutive messages of one role are joined, as many templates require."""

    def __init__(self) -> None:
        self._found: list[Message] = []
        self._call_ids: set[str] = set()
        self._role = ""
        """The role of the message that is being built, or empty."""
        self._texts: list[str] = []
        self._calls: list[PastCall] = []
        self._reasoning: list[str] = []

    def finish(self) -> list[Message]:
        self._end_turn()
        return self._found

    def add(self, role: str, content: Any, param: str) -> None:
        """Add a message. Raises 400. A later `system` message becomes a user's, since many templates refuse it there."""
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
        if not isinstance(block.get("input"), dict):
            raise invalid(f"'{at}.input' must be an object.", f"{at}.input")
        call = past_call(call_id, name, block["input"], at, field="input")
        if len(self._calls) == MAX_MESSAGES:
            raise invalid(f"'{at}' is too many: a turn has at most {MAX_MESSAGES} blocks of the type 'tool_use'.", at)
        self._call_ids.add(call_id)
        self._calls.append(call)

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
            blocks = _checked(content, "result", f"{at}.content")
            content = "\n".join([_result_text(one, place) for place, one in blocks])
        elif not isinstance(content, str):
            raise invalid(f"'{at}.content' must be a string, or a list of text blocks.", f"{at}.content")
        self._end_turn()
        self._found.append(Message(role="tool", content=f"Error: {content}" if is_error else content, call_id=call_id))
        self._role = "user"

    def _end_turn(self) -> None:
        """Finish the message being built. An assistant's texts are joined directly, other texts by line breaks."""
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
    """Return a message's content blocks, each with its path in the body. Raises 400 for a block that the role may not have."""
    if not isinstance(blocks, list) or not blocks:
        raise invalid(f"'{param}' must be a string, or a list of blocks that is not empty.", param)
    checked: list[tuple[str, dict[str, Any]]] = []
    for index, block in enumerate(blocks):
        at = f"{param}[{index}]"
        if not isinstance(block, dict):
            raise invalid(f"'{at}' must be an object.", at)
        _check_kind(block.get("type"), role, f"{at}.type")
        for name, hint in _HINTS.items():
            hint.refuse(block.get(name), f"{at}.{name}")
        refuse_unknown(block, {"type", "cache_control", *_FIELDS[block["type"]], *_HINTS}, at)
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


def _result_text(block: Mapping[str, Any], at: str) -> str:
    if block["type"] == "tool_reference":
        return f"The tool {_string(block, 'tool_name', at)} can be called now."
    return _string(block, "text", at)


def _string(block: Mapping[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise invalid(f"'{at}.{name}' must be a string.", f"{at}.{name}")
    return value
