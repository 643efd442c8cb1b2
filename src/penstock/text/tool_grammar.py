"""Translates the tools of a request into a grammar for calls of them, in llguidance's Lark. `text.grammar` calls it.

A strict tool's schema is followed exactly. For other tools, an object with `properties` allows no additional ones unless its
schema says so, and arguments may be any object if the schema cannot be compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.text import json_schema
from penstock.text.dialects import BY_NAME, SPELLED_PARTS, ToolFormat, Way
from penstock.types.errors import Rejected, RejectReason

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties")
_DESCRIPTIONS = ("title", "description", "examples", "default", "$comment")


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Mapping[str, Any] | None
    """Schema of the arguments, or None for a tool without arguments."""
    is_strict: bool = False


def tool_source(tools: Sequence[Tool], tool_format: ToolFormat, *, is_parallel: bool, has_trigger: bool) -> str:
    """Return the tools and their format as JSON text, for `Grammar.source`.

    With a trigger, the answer may begin with free text. Otherwise it begins with a call.
    """
    described = [[tool.name, _bare(tool.parameters), tool.is_strict] for tool in tools]
    return json.dumps([tool_format.name, is_parallel, has_trigger, described], separators=(",", ":"))


def _bare(schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    copy: Mapping[str, Any] | None = json.loads(json.dumps(schema))
    waiting: list[Any] = [copy]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name in _DESCRIPTIONS:
                node.pop(name, None)
            waiting += [part for _, part in json_schema.subschemas(node)]
    return copy


def triggers_of(source: str) -> tuple[str, ...]:
    """Return the texts that turn free text into a call, or () if the answer begins with a call. `source`: see `tool_source`."""
    name, _, has_trigger, _ = json.loads(source)
    return tuple(way.trigger for way in BY_NAME[name].marked) if has_trigger else ()


def of_tools(source: str, spell: Callable[[str], str], check: Callable[[str], None] | None = None) -> tuple[str, bool]:
    """Return Lark for a `tool_source`, and whether all schemas are followed. `spell` writes a text as Lark.

    `check` raises `Rejected` for a schema that cannot be compiled. The arguments of such a tool may be any object, unless the
    tool is strict. Raises `Rejected`, naming the tool.
    """
    name, is_parallel, has_trigger, described = json.loads(source)
    tools = [Tool(*each) for each in described]
    ways = BY_NAME[name].ways if has_trigger else BY_NAME[name].ways[:1]
    starts = [f"head{nth} way{nth}" if has_trigger else f"way{nth}" for nth in range(len(ways))]
    lines = [f"start: {' | '.join(starts)}"]
    for nth, way in enumerate(ways):
        if has_trigger:
            lines.append(_of_trigger(f"head{nth}", way, spell))
        lines += _of_way(f"way{nth}", way, tools, spell, is_parallel=is_parallel, trigger=way.trigger if has_trigger else "")
    count, are_followed = json_schema.SchemaCount(), True
    for nth, tool in enumerate(tools):
        schema, is_followed = _arguments(tool, count, check)
        are_followed &= is_followed
        lines.append(f"args{nth}: %json {schema}")
    lines.append(f"W: /{json_schema.WHITESPACE}/")
    return "\n".join(lines) + "\n", are_followed


def _of_trigger(rule: str, way: Way, spell: Callable[[str], str]) -> str:
    """Return the Lark rule for the trigger. It also matches text before the trigger in the same token."""
    trigger = way.trigger
    if way.has_no_mark:
        words = "\\s*".join(map(escaped, trigger.split()))
        return f"{rule}[lazy]: /\\s*{words}/"
    spelled = spell(trigger)
    return f"{rule}: {spelled}" if spelled.startswith("<[") else f"{rule}[lazy]: /(.|\\n)*{escaped(trigger)}/"


def _of_way(
    rule: str, way: Way, tools: Sequence[Tool], spell: Callable[[str], str], *, is_parallel: bool, trigger: str
) -> list[str]:
    before, middle, after = way.parts
    # The text glued to a name is part of its lexeme, so that names with a common beginning are told apart.
    glued_before = re.findall(r"\S*$", re.split(SPELLED_PARTS, before)[-1])[0]
    glued_after = re.findall(r"^\S*", re.split(SPELLED_PARTS, middle)[0])[0]
    head, middle = before[: len(before) - len(glued_before)], middle[len(glued_after) :]
    first = way.begin + head
    glued_trigger = trigger.removeprefix(first) if trigger.startswith(first) else ""

    def calls(num_read: int) -> str:
        names = [spell((glued_before + tool.name + glued_after)[num_read:]) for tool in tools]
        rest = _flexible(middle, spell)
        alternatives = [f"{name} {rest} args{nth}" for nth, name in enumerate(names)]
        return f"({' | '.join(alternatives)}) {_flexible(after, spell)}"

    again = f"({_flexible(f'{way.between}{head}', spell)} {rule}_call)*" if is_parallel and way.between is not None else ""
    begin = _flexible(first[len(trigger) :], spell)
    return [
        f"{rule}: {begin} {rule}_first {again} {_flexible(way.end, spell)}",
        f"{rule}_first: {calls(len(glued_trigger))}",
        f"{rule}_call: {calls(0)}",
    ]


def _flexible(text: str, spell: Callable[[str], str]) -> str:
    parts = re.split(r"(\s+)", text)
    return " ".join("W?" if part.isspace() else spell(part) for part in parts if part)


def _arguments(tool: Tool, count: json_schema.SchemaCount, check: Callable[[str], None] | None) -> tuple[str, bool]:
    """Return Lark for a tool's arguments, and whether they follow the tool's own schema."""
    schema = json.loads(json.dumps(_NO_ARGUMENTS if tool.parameters is None else tool.parameters))
    try:
        if not tool.is_strict:
            _close(schema)
        schema.setdefault("type", "object")
        written = json_schema.json_of(schema, count)
        if check is not None:
            check(written)
    except Rejected as rejected:
        if check is not None and not tool.is_strict:
            return json_schema.json_of({"type": "object"}, count), False
        raise Rejected(RejectReason.INVALID, f"The tool {tool.name!r}: {rejected.detail}") from rejected
    return written, True


def _close(schema: Any) -> None:
    """Forbid additional properties in a schema and those inside it, unless a schema allows or combines others."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        properties = node.get("properties")
        if isinstance(properties, dict):
            if not any(name in node for name in _COMBINING):
                node["additionalProperties"] = False
            waiting += properties.values()
        waiting.append(node.get("items"))


def escaped(text: str) -> str:
    return re.sub(r"([.+*?()|\[\]{}^$/\\#&~-])", r"\\\1", text)
