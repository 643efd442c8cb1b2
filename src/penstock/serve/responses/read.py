"""Reads bodies of `/v1/responses`, with the conversation before them, into requests common to all APIs.

May run on any thread and never waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal

from penstock import fast_json
from penstock.calls.call import Call, ChatRequest, Conversation, Names
from penstock.serve.asking import Asked
from penstock.serve.bodies import check_depth, check_part, json_grammar, sampling_of
from penstock.serve.course import course_of
from penstock.serve.errors import invalid, shorten
from penstock.serve.http.checks import identity_of
from penstock.serve.messages import MAX_MESSAGES, past_call, read_choice
from penstock.serve.responses.answers import Response
from penstock.serve.responses.schemas import (
    LOGPROBS,
    FunctionCallItem,
    FunctionOutputItem,
    ItemReference,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextFormat,
    TextPart,
)
from penstock.serve.responses.tools import Tools, chat_name, read_tools
from penstock.serve.streams import fingerprint
from penstock.text.dialects import Message
from penstock.text.grammar import Grammar

Item = Any
"""An item as clients receive it and the store keeps it: JSON data with an `id`."""
ItemBody = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem

_ITEMS: Mapping[str, type[ItemBody]] = MappingProxyType(
    {
        "message": MessageItem,
        "function_call": FunctionCallItem,
        "function_call_output": FunctionOutputItem,
        "reasoning": ReasoningItem,
    }
)
_ID_PREFIXES: Mapping[str, str] = MappingProxyType(
    {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
)
NO_COMPACTION = (
    "This server does not compact conversations: ask the model for a summary, and begin a new conversation with it. Codex CLI "
    "does so itself where the provider in its configuration has another name than 'OpenAI'."
)
_PARTS_NOT_YET = ("input_image", "input_file", "input_audio", "refusal")
_FIELDS = {
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "max_reasoning_tokens": "thinking_budget",
}
"""Field of a `GenerationRequest`, the form that all APIs share -> its name in this API, where they differ."""


@dataclass(frozen=True, slots=True)
class Past:
    """The conversation that a response continues."""

    items: Sequence[bytes]
    """Items as JSON, oldest first."""
    referenced: Mapping[str, bytes]
    """Id -> item, for the items that the body refers to."""
    num_bytes: int
    """Size of all items. An item counts as often as the body refers to it."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The parts of a request that are needed to write its response."""

    response_id: str
    response: Response
    """The response object without output."""
    items: list[Item]
    """The items of `input`."""
    tools: Tools

    def new_id(self, kind: str, index: int) -> str:
        """Return the id of an item of the answer."""
        return _item_id(kind, self.response_id, len(self.items) + index)


def _item_id(kind: str, response_id: str, index: int) -> str:
    return f"{_ID_PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{index}"


def references(body: ResponsesBody) -> list[str]:
    """Return the ids of the items that a body refers to. Raises 400 for too many items."""
    items = body.input if isinstance(body.input, list) else ()
    if len(items) > MAX_MESSAGES:  # before each id is looked up
        raise invalid(f"'input' must have at most {MAX_MESSAGES} items.", "input")
    return [item["id"] for item in items if _is_reference(item) and isinstance(item.get("id"), str)]


def _is_reference(item: Any) -> bool:
    """Return whether an item is a reference: by its type, or because it has only an id."""
    if not isinstance(item, dict):
        return False
    return item.get("type") == "item_reference" or ("id" in item and item.get("type") is None and set(item) <= {"id", "type"})


def read(body: ResponsesBody, past: Past, asked: Asked, *, keeps: bool) -> tuple[Call, Draft]:
    """Return the call and the draft of its response. Raises `ApiError` and `Rejected`. `keeps` is the default of `store`."""
    is_named = body.request_id is not None or identity_of(asked.scope).is_from_header
    items = _own_items(body, past)
    before = [fast_json.loads(item) for item in past.items]
    if len(before) + len(items) > MAX_MESSAGES:
        raise invalid(f"The conversation has {len(before) + len(items)} items; at most {MAX_MESSAGES} are taken.", "input")
    messages = _messages(body.instructions, [*map(_body_of, before), *items], len(before))
    tools = read_tools(body.tools)
    call = asked.call(_request(body, messages, tools))
    course = course_of(asked.scope)
    name = course.response_name
    if name is None:  # a client may use a request id twice, but ids of responses are unique
        name = call.running.sources.new_request_id() if is_named else call.terms.request_id
    response_id = f"resp_{name}"
    created_unix_s = course.created_unix_s or call.answer.created_unix_s
    answer = replace(call.answer, answer_id=response_id, created_unix_s=created_unix_s)
    call = replace(call, answer=answer, num_bytes=len(asked.data) + past.num_bytes)
    last = {item.id: index for index, item in enumerate(items)}
    kept = [_stored_item(item, index, response_id, has_own_id=last[item.id] == index) for index, item in enumerate(items)]
    return call, Draft(response_id, _as_json(body, call, tools, keeps=keeps), kept, tools)


# Items


def _own_items(body: ResponsesBody, past: Past) -> list[ItemBody]:
    given = body.input
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if given is None:
        raise invalid("Missing required parameter: 'input'.", "input")
    if not isinstance(given, list) or not given:
        raise invalid("'input' must be a string, or a list of items that is not empty.", "input")
    items: list[ItemBody] = []
    for index, item in enumerate(given):
        if _is_reference(item):
            item = fast_json.loads(past.referenced[check_part(item, ItemReference, "input", index).id])
        items.append(_checked(item, index))
    return items


def _checked(item: Any, index: int) -> ItemBody:
    at = f"input[{index}]"
    kind = item.get("type", "message") if isinstance(item, dict) else None
    item_type = _ITEMS.get(kind or "message") if isinstance(kind, str | None) else None
    if kind == "compaction_trigger":
        raise invalid(NO_COMPACTION, f"{at}.type")
    if item_type is None:
        known = ", ".join(f"'{name}'" for name in (*_ITEMS, "item_reference"))
        told = f" {shorten(kind)!r}" if isinstance(kind, str) else ""
        raise invalid(f"'{at}.type'{told} is not supported; it must be one of {known}.", f"{at}.type")
    return check_part(item, item_type, "input", index)


def _body_of(item: Item) -> ItemBody:
    return _ITEMS[item["type"]].model_validate(item)


def _text(content: Any, index: int, field: str) -> str:
    if isinstance(content, str):
        return content
    param = f"input[{index}].{field}"
    if not isinstance(content, list) or not content:
        raise invalid(f"'{param}' must be a string, or a list of text parts that is not empty.", param)
    texts: list[str] = []
    for nth, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _PARTS_NOT_YET:
            raise invalid(f"'{param}[{nth}].type' {kind!r} is not supported yet; only text is.", f"{param}[{nth}].type")
        checked = check_part(part, TextPart, "input", index, field, nth)
        if checked.type not in ("input_text", "output_text"):
            raise invalid(f"'{param}[{nth}].type' must be 'input_text' or 'output_text'.", f"{param}[{nth}].type")
        texts.append(checked.text)
    return "".join(texts)


def _stored_item(item: ItemBody, index: int, response_id: str, *, has_own_id: bool) -> Item:
    """Return an item of `input` in the form in which it is stored. `has_own_id`: no later item has the same id."""
    kind = item.type or "message"
    item_id = (has_own_id and item.id) or _item_id(kind, response_id, index)
    kept: Item = {"id": item_id, "type": kind, "status": item.status or "completed"}
    match item:
        case MessageItem():
            default = "output_text" if item.role == "assistant" else "input_text"
            return kept | {"role": item.role, "content": _kept_parts(item.content, default)}
        case FunctionCallItem():
            namespace = {} if item.namespace is None else {"namespace": item.namespace}
            return kept | {"call_id": item.call_id, "name": item.name, **namespace, "arguments": item.arguments}
        case FunctionOutputItem():
            output = item.output if isinstance(item.output, str) else _kept_parts(item.output, "input_text")
            return kept | {"call_id": item.call_id, "output": output}
        case ReasoningItem():
            summary, content = (
                [{"type": part.type, "text": part.text} for part in parts or ()] for parts in (item.summary, item.content)
            )
            return kept | {"summary": summary, "content": content}


def _kept_parts(content: Any, kind: str) -> list[Item]:
    """Return the parts of a checked content. A string becomes one part of the type `kind`."""
    if isinstance(content, str):
        content = [{"type": kind, "text": content}]
    annotations: dict[str, Item] = {"output_text": {"annotations": []}}
    return [{"type": part["type"], "text": part["text"], **annotations.get(part["type"], {})} for part in content]


# The request in the form that all APIs share


def _messages(instructions: str | None, items: Iterable[ItemBody], num_before: int) -> list[Message]:
    """Return the items as messages for the chat template. The first `num_before` are not of `input`. Raises 400.

    Leading system messages are joined, since templates expect one. Consecutive items of the assistant become one message.
    Incomplete calls are left out, with their outputs.
    """
    messages: list[Message] = []
    of_system = [instructions] if instructions else []
    has_text = False  # whether the last message, an assistant's, has its text
    is_whole: dict[str, bool] = {}  # by the call's id
    for index, item in enumerate(items, -num_before):
        is_assistant = bool(messages) and messages[-1].role == "assistant"
        match item:
            case MessageItem(role="assistant"):
                text = _text(item.content, index, "content")
                if is_assistant and not has_text and not messages[-1].calls:
                    messages[-1] = replace(messages[-1], content=text)
                else:
                    messages.append(Message(role="assistant", content=text))
                has_text = True
            case MessageItem():
                text, is_system = _text(item.content, index, "content"), item.role in ("system", "developer")
                if is_system and not messages:
                    of_system.append(text)
                else:
                    messages.append(Message(role="system" if is_system else item.role, content=text))
            case ReasoningItem():
                if said := "".join([part.text for part in item.content or item.summary or ()]):
                    messages.append(Message(role="assistant", content="", reasoning=said))
                    has_text = False
            case FunctionCallItem():
                is_whole[item.call_id] = item.status != "incomplete"
                if not is_whole[item.call_id]:
                    continue
                if not is_assistant:
                    messages.append(Message(role="assistant", content=""))
                    has_text = False
                place = f"input[{index}]" if index >= 0 else "previous_response_id"
                call = past_call(item.call_id, chat_name(item.namespace, item.name), item.arguments, place)
                messages[-1] = replace(messages[-1], calls=(*messages[-1].calls, call))
            case FunctionOutputItem():
                text = _text(item.output, index, "output")
                if item.call_id not in is_whole and index >= 0:
                    param = f"input[{index}].call_id"
                    raise invalid(f"'{param}' is {shorten(item.call_id)!r}, which no 'function_call' before it has.", param)
                if is_whole.get(item.call_id, True):  # kept ones were not always checked
                    messages.append(Message(role="tool", content=text, call_id=item.call_id))
    if of_system:
        messages.insert(0, Message(role="system", content="\n\n".join(of_system)))
    return messages


def _request(body: ResponsesBody, messages: list[Message], tools: Tools) -> ChatRequest:
    if body.background and body.stream:
        raise invalid("'background' with 'stream' is not supported yet: leave one of them out.", "background")
    has_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not has_logprobs:
        raise invalid(f"'top_logprobs' needs {LOGPROBS!r} in 'include'.", "top_logprobs")
    check_depth(body.chat_template_kwargs, "chat_template_kwargs")
    places = {f"tools.{index}": place for index, place in enumerate(tools.places)}
    return ChatRequest(
        names=Names("responses", fields=_FIELDS | places),
        model=body.model,
        conversation=Conversation(messages, variables=body.chat_template_kwargs or {}, param="input"),
        tools=tools.functions,
        tool_choice=read_choice(
            body.tool_choice,
            [tool.name for tool in tools.functions],
            is_parallel=body.parallel_tool_calls is not False,
            is_nested=False,
        ),
        grammar=None if body.text is None or body.text.format is None else _grammar(body.text.format),
        sampling=sampling_of(body, "responses"),
        logit_bias=body.logit_bias or {},
        stop=body.stop or (),
        max_tokens=body.max_output_tokens,
        max_reasoning_tokens=None if body.thinking_budget == -1 else body.thinking_budget,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        logprobs=(body.top_logprobs or 0) if has_logprobs else None,
        is_streamed=bool(body.stream),
        priority=body.priority,
        cache_salt=body.cache_salt or "",
        conversation_name=body.prompt_cache_key or body.user or "",
        user=body.safety_identifier or body.user or "",
    )


def _grammar(asked: TextFormat) -> Grammar | None:
    if asked.type != "json_schema":
        for name in ("name", "schema", "strict"):
            if getattr(asked, "schema_" if name == "schema" else name) is not None:
                raise invalid(f"'text.format.{name}' needs 'type': 'json_schema', not '{asked.type}'.", f"text.format.{name}")
        return None if asked.type == "text" else json_grammar(None, "text.format")
    if asked.name is None or asked.schema_ is None:
        name = "text.format.name" if asked.name is None else "text.format.schema"
        raise invalid(f"Missing required parameter: '{name}'.", name)
    return json_grammar(asked.schema_, "text.format.schema")


# The response repeats the request


def _as_json(body: ResponsesBody, call: Call, tools: Tools, *, keeps: bool) -> Response:
    store: bool = keeps if body.store is None else body.store
    text: TextFormat | Literal["text"] = "text" if body.text is None or body.text.format is None else body.text.format
    shape = {"type": "text"} if text == "text" else text.model_dump(by_alias=True, exclude_none=True)
    return {
        "id": call.answer.answer_id,
        "object": "response",
        "created_at": call.answer.created_unix_s,
        "status": "in_progress",
        "background": bool(body.background),
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "model": call.answer.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": store,
        "system_fingerprint": fingerprint(call.answer),
        "temperature": call.sampling.temperature,
        "text": {"format": shape, "verbosity": "medium"},
        "tool_choice": _choice_as_json(body.tool_choice),
        "tools": tools.as_json,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": call.sampling.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _choice_as_json(choice: Any) -> Any:
    """Return a checked `tool_choice` in the form that the response repeats."""
    match choice:
        case {"type": "function", "name": name}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "mode": mode, "tools": tools}:
            named = [{"type": "function", "name": tool["name"]} for tool in tools]
            return {"type": "allowed_tools", "mode": mode, "tools": named}
        case str() if choice not in ("none", "auto", "required"):
            return {"type": "function", "name": choice}
    return choice or "auto"
