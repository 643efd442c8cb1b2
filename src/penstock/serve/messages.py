"""Messages and tools in the form of OpenAI, which several APIs share. May run on any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from penstock import fast_json
from penstock.calls.call import NAME_RULE, TOOL_NAME, Conversation, FunctionTool, Names, ToolChoice
from penstock.calls.check import check_conversation, tools_for_template
from penstock.serve.bodies import Body, NotYet, Schema, TemplateVariables, Unread, check_depth, has_not_yet
from penstock.serve.errors import invalid, refuse_unknown, shorten
from penstock.text.dialects import Message, PastCall

MAX_MESSAGES = 2**12
"""Most messages in one body, and calls in one message. Validating them blocks the process for 10 us each."""
MAX_TOOLS = 128
"""OpenAI's limit of tools."""
MAX_CALL_ID_CHARS = 256
_ROLES = ("system", "developer", "user", "assistant", "tool")
_PARTS_NOT_YET = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal", "thinking")
PART_NO_EFFECT = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields of a message's part that have no effect, because prefixes are always cached."""
Description = Annotated[str, Field(max_length=1 << 15)]
CallId = Annotated[str, Field(max_length=MAX_CALL_ID_CHARS)]


class FunctionBody(Body):
    """A function that an answer can call."""

    name: str
    description: Description | None = None
    parameters: Annotated[Schema | None, WithJsonSchema({"type": "object"})] = None
    """JSON schema of the arguments. None: the function takes no arguments."""
    strict: bool | None = None
    """True: refuse a schema that can't be enforced. Otherwise a call may have any object as arguments."""
    cache_control: Unread = None


class ToolBody(Body):
    remedies = dict.fromkeys(
        ("name", "description", "parameters", "input_schema", "strict"),
        'A tool has the form {"type": "function", "function": {"name": ..., "parameters": ...}}.',
    )

    type: Literal["function"]
    function: FunctionBody
    cache_control: Unread = None


class CalledFunction(Body):
    name: str
    arguments: Any = ""
    """JSON text of an object, or the object itself."""
    parsed_arguments: Unread = None
    """OpenAI's clients parse `arguments` into this field, and send it back with the history."""


class ToolCallBody(Body):
    """A tool call by the assistant, earlier in the conversation."""

    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: Unread = None
    """Sent back by clients that assembled the call from a stream."""


ToolBodies = Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCallBodies = Annotated[list[ToolCallBody], Field(max_length=MAX_MESSAGES, fail_fast=True)]


def read_tools(tools: Sequence[ToolBody]) -> list[FunctionTool]:
    """Return the tools in the form for all APIs. Raises 400 for schemas nested too deeply."""
    return [
        function_tool(one.name, one.description, one.parameters, is_strict=one.strict, at=f"tools[{index}].function.parameters")
        for index, one in enumerate([tool.function for tool in tools])
    ]


def function_tool(name: str, description: str | None, parameters: Any, *, is_strict: bool | None, at: str) -> FunctionTool:
    """Return a tool in the form for all APIs. Raises 400 for a schema nested too deeply. `at`: its path in the body."""
    check_depth(parameters, at)
    if parameters is not None:  # clients in Go send `"properties": null`
        parameters = {keyword: value for keyword, value in parameters.items() if value is not None}
    return FunctionTool(name=name, description=description, parameters=parameters, is_strict=bool(is_strict))


def read_choice(choice: Any, names: Sequence[str], *, is_parallel: bool, is_nested: bool) -> ToolChoice:
    """Return a checked `tool_choice`. Raises 400.

    `names`: the tools'. `is_nested`: fields are in an object with the name of the type, as in `{"type": T, T: {...}}`.
    """
    if is_nested and isinstance(choice, dict) and "function" in choice:
        choice = {"type": "function"} | choice  # text-generation-inference's has no type
    match choice:
        case "required" if not names:
            raise invalid("'tool_choice' is 'required', but there are no 'tools'.", "tool_choice")
        case None | "auto" | "none" | "required":
            return ToolChoice(choice or "auto", is_parallel=is_parallel)
        case str() if choice in names:  # text-generation-inference's
            return ToolChoice("required", frozenset([choice]), is_parallel=False)
        case str():
            message = "'tool_choice' must be 'none', 'auto', 'required', the name of a tool, or an object that names one."
            raise invalid(message, "tool_choice")
        case {"type": "function"}:
            name = _named(choice, names, "tool_choice", is_nested=is_nested)
            return ToolChoice("required", frozenset([name]), is_parallel=False)
        case {"type": "allowed_tools"}:
            fields, param = _fields(choice, "allowed_tools", ("mode", "tools"), "tool_choice", is_nested=is_nested)
            mode, listed = fields.get("mode"), fields.get("tools")
            if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
                raise invalid(f"'{param}' must have a 'mode' of 'auto' or 'required', and 'tools'.", param)
            found = [_named(one, names, f"{param}.tools[{at}]", is_nested=is_nested) for at, one in enumerate(listed)]
            return ToolChoice(mode, frozenset(found), is_parallel=is_parallel)
    kind = choice.get("type") if isinstance(choice, dict) else None
    told = f" {shorten(kind)!r}" if isinstance(kind, str) else ""
    wrong = "is missing" if kind is None else "is not supported"
    raise invalid(f"'tool_choice.type'{told} {wrong}; it must be 'function' or 'allowed_tools'.", "tool_choice.type")


def _named(one: Any, names: Sequence[str], param: str, *, is_nested: bool) -> str:
    kind = one.get("type", "function" if is_nested else None) if isinstance(one, dict) else None
    if kind != "function":
        raise invalid(f"'{param}.type' must be 'function'.", f"{param}.type")
    fields, param = _fields(one, "function", ("name",), param, is_nested=is_nested)
    name = fields.get("name")
    if not isinstance(name, str):
        raise invalid(f"'{param}.name' must be a string.", f"{param}.name")
    if name not in names:
        raise invalid(f"'{param}.name' is {name[:64]!r}, which is not the name of a tool in 'tools'.", f"{param}.name")
    return name


def _fields(one: dict[str, Any], kind: str, names: Sequence[str], param: str, *, is_nested: bool) -> tuple[dict[str, Any], str]:
    """Return the fields of an object of this type, and their path. Raises 400 for fields other than `names`."""
    if not is_nested:
        refuse_unknown(one, ("type", *names), param)
        return one, param
    refuse_unknown(one, ("type", kind), param)
    param = f"{param}.{kind}"
    fields = one[kind] if isinstance(one.get(kind), dict) else {}
    refuse_unknown(fields, names, param)
    return fields, param


def past_call(call_id: str, name: str, arguments: Any, at: str, *, field: str = "arguments") -> PastCall:
    """Return an earlier tool call of the conversation. Raises 400.

    `arguments`: an object or JSON. `at`: the call's path in the body. `field`: the name of the arguments there.
    """
    if not TOOL_NAME.fullmatch(name):
        raise invalid(f"'{at}.name' {NAME_RULE}.", f"{at}.name")
    if isinstance(arguments, str):
        try:
            arguments = fast_json.loads(arguments or "{}")
        except fast_json.DecodeError:
            raise invalid(f"'{at}.{field}' must be the JSON text of an object.", f"{at}.{field}") from None
    if not isinstance(arguments, dict):
        raise invalid(f"'{at}.{field}' must be the JSON text of an object.", f"{at}.{field}")
    check_depth(arguments, f"{at}.{field}")
    return PastCall(call_id, name, arguments)


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
    tool_call_id: CallId | None = None
    tool_calls: ToolCallBodies | None = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]


class ChatTemplateFields(Body):
    """Fields that decide how messages become a prompt."""

    messages: Messages
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: TemplateVariables | None = None
    chat_template: Annotated[Any, NotYet()] = None
    tools: ToolBodies | None = None


def read_conversation(fields: ChatTemplateFields) -> Conversation:
    """Return the conversation without its tools. Raises 400, also for message parts other than text."""
    continues = bool(fields.continue_final_message)
    # To continue the last message means that no new turn is opened.
    opens = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    messages = [_read_message(message, f"messages[{index}]") for index, message in enumerate(fields.messages)]
    check_results(messages)
    check_depth(fields.chat_template_kwargs, "chat_template_kwargs")
    return Conversation(messages, opens, continues, fields.chat_template_kwargs or {})


def read_conversation_with_tools(fields: ChatTemplateFields) -> Conversation:
    """Return the checked conversation, with its tools as the chat template gets them. Raises 400 and `Rejected`."""
    names = Names(fields={"tools.*": "tools[{}].function"})
    conversation = read_conversation(fields)
    check_conversation(conversation, names)
    return replace(conversation, tools=tools_for_template(read_tools(fields.tools or ()), names))


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
        content="" if role == "assistant" and content in (None, []) else _text(content, f"{at}.content"),
        name=name,
        calls=tuple(past_calls),
        call_id=call_id or "",
        reasoning=reasoning,
    )


def check_results(messages: Sequence[Message]) -> None:
    """Raise 400 for a tool's result without its call before it."""
    call_ids = set[str]()
    for index, message in enumerate(messages):
        call_ids.update([call.call_id for call in message.calls])
        if message.role == "tool" and message.call_id not in call_ids:
            param = f"messages[{index}].tool_call_id"
            raise invalid(f"'{param}' is {shorten(message.call_id)!r}, which no 'tool_calls' before it have as an id.", param)


def _role(role: Any, param: str) -> str:
    """Return the role, with `developer` as `system`. Raises 400."""
    if role == "function":
        raise invalid(f"'{param}' 'function' is not supported. Use the role 'tool' instead.", param)
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
    refuse_unknown(part, ("type", "text", *PART_NO_EFFECT), param)
    if not isinstance(part.get("text"), str):
        raise invalid(f"'{param}.text' must be a string.", f"{param}.text")
    return str(part["text"])
