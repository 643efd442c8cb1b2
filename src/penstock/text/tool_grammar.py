"""Translates the tools of a request into a grammar for tool calls, in llguidance's Lark. `text.grammar` calls it.

A strict tool's schema is followed exactly. For other tools, an object with `properties` allows no additional ones unless its
schema says so, and arguments may be any object if the schema cannot be compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.text import json_schema
from penstock.text.dialects import BY_NAME, SPELLED_PARTS, ToolFormat, Way
from penstock.text.parameters import Tags, Types, as_json, parameter_types, types_of
from penstock.types.errors import Rejected, wrong

_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_COMBINING = ("$ref", "allOf", "anyOf", "oneOf", "patternProperties", "additionalProperties", "unevaluatedProperties")
_PARTS = ("$ref", "anyOf", "oneOf", "properties", "required", "patternProperties", "additionalProperties", "items")
"""Keywords that describe a value together. Each schema of `allOf` is another part."""
_LENGTHS = ("minLength", "maxLength")
_MAX_LENGTH = 2048
"""A longer string that is written in full exceeds llguidance's `max_lexer_states`, and its request would fail."""
_KEY = r"[^\s<>\"=]{1,64}"
"""Names of tagged parameters that the schema does not name."""
_NAME = r"[^\x00-\x1f<>]+"
"""Names of properties that a tag can have."""
_MAX_COPIED_CHARS = 1 << 18
"""Most characters that are copied to tagged parameters for their $refs. Each parameter is a grammar of its own."""
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


def types_in(source: str) -> dict[str, Types]:
    """Return the types of each tool's parameters, by the tool's name. `source`: see `tool_source`."""
    return {name: parameter_types(parameters) for name, parameters, _ in json.loads(source)[3]}


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
    spell_way = spell if has_trigger or not ways[0].has_no_mark else partial(_spell_json, spell)
    for nth, way in enumerate(ways):
        if has_trigger:
            lines.append(_of_trigger(f"head{nth}", way, spell))
        lines += _of_way(
            f"way{nth}", way, tools, spell_way, is_parallel=is_parallel, trigger=way.trigger if has_trigger else ""
        )
    count, are_followed = json_schema.SchemaCount(), True
    for nth, tool in enumerate(tools):
        if ways[0].parameter is not None:
            rules, is_followed = _Parameters(f"args{nth}", tool, ways[0].parameter, spell, count, check).rules()
            lines += rules
        else:
            schema, is_followed = _arguments(tool, count, check)
            lines.append(f"args{nth}: %json {schema}")
        are_followed &= is_followed
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
    # The text next to a name is part of its lexeme, so that the lexer can distinguish a name from a longer one.
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


def _spell_json(spell: Callable[[str], str], text: str) -> str:
    """Return Lark for a piece of JSON with the lexemes that JSON has. Longer ones would exclude a response format's JSON."""
    return " ".join(map(spell, re.findall(r'"[^"]*"|[^"]', text)))


def _flexible(text: str, spell: Callable[[str], str]) -> str:
    parts = re.split(r"(\s+)", text)
    return " ".join("W?" if part.isspace() else spell(part) for part in parts if part)


def _arguments(tool: Tool, count: json_schema.SchemaCount, check: Callable[[str], None] | None) -> tuple[str, bool]:
    """Return Lark for a tool's arguments, and whether they follow the tool's own schema."""
    schema = dict(_NO_ARGUMENTS if tool.parameters is None else tool.parameters)
    try:
        if not tool.is_strict:
            _forbid_additional(schema)
            _leave_out_lengths(schema)
        schema.setdefault("type", "object")
        written = json_schema.json_of(schema, count)
        if check is not None:
            check(written)
    except Rejected as rejected:
        if check is not None and not tool.is_strict:
            return json_schema.json_of({"type": "object"}, count), False
        raise wrong(f"The tool {tool.name!r}: {rejected.detail}") from rejected
    return written, True


class _Parameters:
    """Writes Lark for the tagged parameters of a tool, in the order of its schema.

    A string is any text up to the closing tag, within its length limits or enum. Other keywords, such as `pattern`, are ignored
    if the tool is not strict, and refused otherwise.
    """

    def __init__(
        self,
        rule: str,
        tool: Tool,
        tags: Tags,
        spell: Callable[[str], str],
        count: json_schema.SchemaCount,
        check: Callable[[str], None] | None,
    ) -> None:
        self._rule, self._tool, self._tags, self._spell = rule, tool, tags, spell
        self._count, self._check = count, check
        self._is_followed = True
        self._schema: dict[str, Any] = dict(_NO_ARGUMENTS if tool.parameters is None else tool.parameters)
        self._types: dict[str, frozenset[str]] = {}
        """Types of the schema's definitions."""
        self._lines: list[str] = []

    def rules(self) -> tuple[list[str], bool]:
        """Return the rules, and whether the schema is followed. Raises `Rejected` if that fails for a strict tool."""
        if not self._tool.is_strict:
            _forbid_additional(self._schema)
        schema = self._schema
        if unread := [name for name in _COMBINING if name in schema and not isinstance(schema[name], bool)]:
            self._cannot_follow(f"{unread[0]!r} is not supported for a model that writes parameters in tags.")
            schema = {}
        told, required = schema.get("properties"), schema.get("required")
        properties: dict[str, Any] = told if isinstance(told, dict) else {}
        names = [name for name in properties if re.fullmatch(_NAME, name)]
        needed = required if isinstance(required, list) else []
        if lost := [name for name in needed if name not in names]:
            self._cannot_follow(f"the required property {lost[0]!r} is not described, or has a name that no tag can have.")
        items = []
        for nth, name in enumerate(names):
            self._parameter(f"{self._rule}_{nth}", self._spell_key(name), properties[name])
            items.append(f"{self._rule}_{nth}{'' if name in needed else '?'}")
        if schema.get("additionalProperties", True):
            named = "|".join(map(escaped, names))
            before, after = map(escaped, self._glued)
            self._lines.append(f"{self._rule.upper()}_KEY: /{before}{_KEY}{after}/ & ~/{before}({named}){after}/")
            self._parameter(f"{self._rule}_more", f"{self._rule.upper()}_KEY", {})
            items.append(f"{self._rule}_more*")
        return [f"{self._rule}: {' '.join(items) or self._spell('')}", *self._lines], self._is_followed

    def _cannot_follow(self, why: str) -> None:
        if self._check is None or self._tool.is_strict:
            raise wrong(f"The tool {self._tool.name!r}: {why}")
        self._is_followed = False

    @property
    def _glued(self) -> tuple[str, str]:
        """The texts next to a key, which are part of its lexeme. Empty if they are special tokens."""
        before, after = self._tags.before, self._tags.between.split()[0]
        return tuple("" if self._spell(text).startswith("<[") else text for text in (before, after))  # type: ignore[return-value]

    def _spell_key(self, name: str) -> str:
        return json.dumps(self._glued[0] + name + self._glued[1])

    def _parameter(self, rule: str, key: str, schema: Any) -> None:
        tags = self._tags
        before = "" if self._glued[0] else f"{self._spell(tags.before)} "
        between = _flexible(tags.between.removeprefix(self._glued[1]), self._spell)
        line = self._spell("\n") if tags.has_lines else ""
        close = self._spell(tags.close)
        types = types_of(schema, self._schema, self._types)
        if "string" not in types:
            self._lines += [
                f"{rule}: {before}{key} {between} W? {rule}_v W? {close} W?",
                f"{rule}_v: %json {self._json(schema, types)}",
            ]
            return
        values = _values(schema, types)
        texts = [text for text in values if tags.close not in text and json.loads(as_json(text, types)) == values[text]]
        if len(texts) < len(values):
            self._cannot_follow("its enum has two values that look the same in a tag, or one that contains the closing tag.")
        if texts:
            spelled = " | ".join(map(json.dumps, texts))
            self._lines.append(f"{rule}: {before}{key} {between} {line} ({spelled}) {line} {close} W?")
            return
        if self._tool.is_strict and not _is_text(schema, _LENGTHS if types == {"string"} else ()):
            self._cannot_follow("for a string in tags, only its type, lengths and enum can be followed.")
        text = self._text(schema if isinstance(schema, dict) and types == {"string"} else {})
        self._lines += [
            f"{rule}: {before}{key} {between} {line} {rule}_v W?",
            f"{rule.upper()}: /{text}/ & ~/(.|\\n)*{escaped(tags.close)}(.|\\n)*/",
        ]
        if close.startswith("<["):  # a special token
            self._lines.append(f"{rule}_v: {rule.upper()} {close}")
        else:
            self._lines.append(f"{rule}_v[lazy]: {rule.upper()} {close}")

    def _text(self, schema: Mapping[str, Any]) -> str:
        """Return a regex of strings of the schema's lengths."""
        least, most = (schema.get(name) for name in _LENGTHS)
        is_known = all(number is None or (type(number) is int and 0 <= number <= _MAX_LENGTH) for number in (least, most))
        is_known = is_known and (least or 0) <= (most if most is not None else _MAX_LENGTH)
        if self._tool.is_strict and not is_known:
            self._cannot_follow(f"lengths of more than {_MAX_LENGTH} can't be followed in tagged parameters.")
        least, most = (least or 0, most) if is_known else (0, None)

        def characters(less: int) -> str:
            return f"(.|\\n){{{least - less},{'' if most is None else most - less}}}"

        if not self._tags.has_lines:
            return characters(0)
        # A line break at the end does not count.
        return f"({characters(0)}\\n|{characters(1)}[^\\n])" if least else f"{characters(0)}\\n?"

    def _json(self, schema: Any, types: frozenset[str]) -> str:
        try:
            written = json_schema.json_of(self._alone(schema), self._count)
            if self._check is not None:
                self._check(written)
        except Rejected as rejected:
            self._cannot_follow(rejected.detail)
            return json_schema.json_of({"type": sorted(types)} if types else {}, self._count)
        return written

    def _alone(self, schema: Any) -> dict[str, Any]:
        """Return a copy of a parameter's schema, with the parts of the tool's schema that its $refs name under $defs.

        Raises `Rejected` if the parameters of all tools need too many copies.
        """
        alone: dict[str, Any] = json.loads(json.dumps(schema))
        needed: dict[str, Any] = {}
        waiting: list[Any] = [alone]
        while waiting:
            node = waiting.pop()
            if not isinstance(node, dict):
                continue
            node.pop("$defs", None)
            node.pop("definitions", None)
            ref = node.get("$ref")
            if isinstance(ref, str) and (part := self._target(schema, ref)) is not None:
                name = ref.removeprefix("#/$defs/")
                node["$ref"] = json_schema.fragment(["$defs", name])
                if name not in needed:
                    needed[name] = json.loads(self._counted(part))
                    waiting.append(needed[name])
            waiting += [inside for _, inside in json_schema.subschemas(node)]
        return alone | {"$defs": needed} if needed else alone

    def _target(self, schema: Any, ref: str) -> Any:
        """Return what a parameter's $ref names in the tool's schema, else in its own: some clients nest whole schemas."""
        part = json_schema.referred(self._schema, ref)
        return json_schema.referred(schema, ref) if part is None else part

    def _counted(self, part: Any) -> str:
        if self._count.num_copied_chars > _MAX_COPIED_CHARS:
            what = f"the targets of $ref, counted for each parameter, have more than {_MAX_COPIED_CHARS} characters"
            raise wrong(f"{what}. Make them smaller, or refer to them from fewer parameters.")
        text = json.dumps(part)
        self._count.num_copied_chars += len(text)
        return text


def _is_text(schema: Any, others: Sequence[str]) -> bool:
    """Return whether any text is valid: the schema has only types and, at its top level, the keywords `others`."""
    if not isinstance(schema, dict):
        return True
    told = [schema.get(name) for name in ("anyOf", "oneOf")]
    options = [option for found in told if isinstance(found, list) for option in found]
    return schema.keys() <= {"type", "anyOf", "oneOf", *others} and all(_is_text(option, ()) for option in options)


def _values(schema: Any, types: frozenset[str]) -> dict[str, Any]:
    """Return text -> value for an enum's values of these types. Empty without an enum or a const."""
    told = schema if isinstance(schema, dict) else {}
    values = [told["const"]] if "const" in told else told.get("enum")
    if not isinstance(values, list):
        return {}
    allowed = [value for value in values if types_of({"const": value}, {}, {}) <= types]
    return {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False): value for value in allowed}


def _forbid_additional(schema: dict[str, Any]) -> None:
    """Forbid additional properties in a schema and in those inside it, unless a schema allows some, or combines others."""
    nodes = list(_within(schema, [schema]))
    combined = _within(schema, [part for node in nodes for part in _combined(node, schema)])
    open_ids = {id(node) for node in combined}
    for node in nodes:
        if _names_all(node) and id(node) not in open_ids and not any(name in node for name in _COMBINING):
            node["additionalProperties"] = False


def _names_all(node: dict[str, Any]) -> bool:
    """Return whether the schema has properties, and none is required that it does not describe."""
    properties, required = node.get("properties"), node.get("required", [])
    if not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(isinstance(name, str) and name in properties for name in required)


def _within(schema: dict[str, Any], waiting: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield each schema of `waiting`, the schemas inside it, and the targets of their $refs in `schema`; none twice."""
    seen_ids: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict) and id(node) not in seen_ids:
            seen_ids.add(id(node))
            yield node
            waiting += [part for _, part in json_schema.subschemas(node)]
            waiting += _named(node, schema)


def _combined(node: dict[str, Any], schema: dict[str, Any]) -> list[Any]:
    """Return the schemas whose values other parts of `node` describe, too: forbidding properties would refuse the others'."""
    inside = [(path[0], part) for path, part in json_schema.subschemas(node) if path[0] not in ("$defs", "definitions")]
    named = _named(node, schema)
    others = [part for name, part in inside if name in ("allOf", "anyOf", "oneOf")] + named
    num_parts = sum(name in node for name in _PARTS) + len([part for name, part in inside if name == "allOf"])
    if num_parts < 2 or all(isinstance(part, dict) and part.keys() <= {"type", "required"} for part in others):
        return []
    return [part for _, part in inside] + named


def _named(node: dict[str, Any], schema: dict[str, Any]) -> list[Any]:
    ref = node.get("$ref")
    return [json_schema.referred(schema, ref)] if isinstance(ref, str) else []


def _leave_out_lengths(schema: Any) -> None:
    """Remove length limits of strings that are too large for the lexer."""
    waiting = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            for name in _LENGTHS:
                if isinstance(node.get(name), int | float) and node[name] > json_schema.MAX_LENGTHS:
                    del node[name]
            waiting += [part for _, part in json_schema.subschemas(node)]


def escaped(text: str) -> str:
    return re.sub(r"([.+*?()|\[\]{}^$/\\#&~-])", r"\\\1", text).replace("\n", "\\n")
