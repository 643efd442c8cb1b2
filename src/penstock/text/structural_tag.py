"""Translates structural tags, vLLM's JSON format for grammars, into llguidance's Lark.

The older form (`structures` and `triggers`) is converted to the newer one (`format`), a tree of formats, which becomes a
sequence of parts. A Lark terminal takes the longest text and gives nothing back, so a sequence is accepted only if that loses
no answer:

    constants and regexes side by side    one regular terminal
    free text                             up to the first text that follows it
    a regex inside a tag                  up to the first place where the tag may end
    JSON                                  before a constant that can't continue a number, or at the end

Anything else is refused, with its place. Text between tags contains no trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any, Literal, NoReturn

from penstock.text import json_schema
from penstock.text.tool_grammar import escaped
from penstock.types.errors import Rejected, wrong

MAX_TAGS = 128
MAX_REPEAT = 1000
MAX_DEPTH = 32
_OF_NUMBERS = frozenset("0123456789.eE+-")
"""Characters that can continue a JSON number."""
_ANY = "(.|\\n)*"
_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "const_string": {"value": ...},
    "regex": {"pattern": ...},
    "json_schema": {"json_schema": ..., "style": "json", "any_order": False},
    "any_text": {"excludes": [], "max_tokens": None, "max_chars": None},
    "sequence": {"elements": ...},
    "or": {"elements": ...},
    "optional": {"content": ...},
    "plus": {"content": ...},
    "star": {"content": ...},
    "repeat": {"min": ..., "max": ..., "content": ...},
    "tag": {"begin": ..., "content": ..., "end": ...},
    "triggered_tags": {"triggers": ..., "tags": ..., "at_least_one": False, "stop_after_first": False, "excludes": []},
    "tags_with_separator": {"tags": ..., "separator": ..., "at_least_one": False, "stop_after_first": False},
}
"""Fields of each type with their defaults; `...` marks required ones."""
_ONLY_DEFAULT = ("style", "any_order", "excludes", "max_tokens", "max_chars")
"""Fields that support only their default."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a sequence: constants and regexes, JSON, free text up to the next part, or tags, which must be last."""

    kind: Literal["text", "json", "free", "tags"]
    place: str
    lark: str = ""
    """The terminals of a text, or the name of the rule for tags."""
    constants: tuple[str, ...] = ()
    """The strings that a text can be. Empty for a regex."""
    schema: Any = None


def of_structural_tag(source: str, spell: Callable[[str], str], max_regex_chars: int) -> str:
    """Return Lark for a structural tag. `spell` writes a text as Lark, special tokens by their ids.

    `max_regex_chars` limits all regexes together. Raises `Rejected` with the place in the JSON.
    """
    try:
        asked = json.loads(source)
    except (ValueError, RecursionError) as error:
        _refuse("", f"is not JSON: {error}")
    writer = _Writer(spell, max_regex_chars)
    writer.lines[0] = f"start: {writer.row(writer.parts(_format_of(asked), 'format', 0), is_last=True)}"
    return "\n".join(writer.lines) + "\n"


def _format_of(asked: Any) -> Any:
    if not isinstance(asked, dict) or asked.get("type") != "structural_tag":
        _refuse("", "must be an object of the type structural_tag")
    names = asked.keys() - {"type"}
    if names == {"format"}:
        return asked["format"]
    if names != {"structures", "triggers"}:
        _refuse("", "must have 'structures' and 'triggers', or 'format', and nothing else")
    if not isinstance(asked["structures"], list):
        _refuse("structures", "must be a list")
    tags = []
    for nth, one in enumerate(asked["structures"]):
        if not isinstance(one, dict) or one.keys() != {"begin", "schema", "end"}:
            _refuse(f"structures[{nth}]", "must have 'begin', 'schema' and 'end'")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags}


@dataclass(frozen=True, slots=True)
class _Tag:
    begin: str
    content: list[_Part]
    ends: tuple[str, ...]
    place: str


@dataclass(slots=True)
class _Writer:
    spell: Callable[[str], str]
    max_regex_chars: int
    num_regex_chars: int = 0
    lines: list[str] = field(default_factory=lambda: [""])
    """The first line is the start rule."""
    count: json_schema.SchemaCount = field(default_factory=json_schema.SchemaCount)

    # reading

    def parts(self, one: Any, place: str, depth: int) -> list[_Part]:
        """Return a format (JSON data) as a sequence of parts."""
        fields = self._fields(one, place, depth)
        match one["type"]:
            case "const_string":
                return [self._constants((self._string(fields["value"], f"{place}.value"),), place)]
            case "regex":
                return [_Part("text", place, self._regex(fields["pattern"], f"{place}.pattern"))]
            case "json_schema":
                schema, place = fields["json_schema"], f"{place}.json_schema"
                if not isinstance(schema, dict) and schema is not True:
                    _refuse(place, "must be a JSON schema, an object")
                return [_Part("json", place, schema={} if schema is True else schema)]
            case "any_text":
                return [_Part("free", place)]
            case "sequence":
                elements = self._list(fields["elements"], f"{place}.elements")
                return [
                    part
                    for nth, inside in enumerate(elements)
                    for part in self.parts(inside, f"{place}.elements[{nth}]", depth + 1)
                ]
            case "tag":
                tag = self._tag(one, place, depth)
                return [self._constants((tag.begin,), place), *tag.content, self._constants(tag.ends, place)]
            case "triggered_tags":
                return [_Part("tags", place, self._triggered(fields, place, depth))]
            case "tags_with_separator":
                return [_Part("tags", place, self._separated(fields, place, depth))]
        return [_Part("text", place, self._repeated(one["type"], fields, place, depth))]

    def _fields(self, one: Any, place: str, depth: int) -> Mapping[str, Any]:
        if depth > MAX_DEPTH:
            _refuse(place, f"is inside more than {MAX_DEPTH} others")
        if not isinstance(one, dict) or not isinstance(one.get("type"), str):
            _refuse(place, "must be an object with a type")
        known = _FIELDS.get(one["type"])
        if known is None:
            _refuse(place, f"has the type {one['type'][:64]!r}, and supported are {', '.join(_FIELDS)}")
        fields = dict(known)
        for name, value in one.items():
            if name != "type" and name not in known:
                _refuse(place, f"has the field {name[:64]!r}, which {one['type']} does not know")
            if name in _ONLY_DEFAULT and value != known[name]:
                _refuse(f"{place}.{name}", f"supports only {json.dumps(known[name])}")
            fields[name] = value
        if missing := [name for name, value in fields.items() if value is ...]:
            _refuse(place, f"needs {', '.join(map(repr, missing))}")
        return fields

    def _repeated(self, kind: str, fields: Mapping[str, Any], place: str, depth: int) -> str:
        if kind == "or":
            elements = self._list(fields["elements"], f"{place}.elements")
            texts = [self._text(one, f"{place}.elements[{nth}]", depth) for nth, one in enumerate(elements)]
            return f"({' | '.join(texts)})"
        text = self._text(fields["content"], f"{place}.content", depth)
        if kind != "repeat":
            return f"({text}){ {'optional': '?', 'plus': '+', 'star': '*'}[kind] }"
        least, most = fields["min"], fields["max"]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (least, most)):
            _refuse(place, "needs integers in 'min' and 'max'")
        if not 0 <= least <= MAX_REPEAT or not (most == -1 or max(1, least) <= most <= MAX_REPEAT):
            _refuse(place, f"needs 'min' and 'max' in order, and at most {MAX_REPEAT}; a 'max' of -1 is any number")
        return f"({text}){{{least},{'' if most == -1 else most}}}"

    def _text(self, one: Any, place: str, depth: int) -> str:
        """Return a format made of constants and regexes as one Lark expression."""
        parts = self.parts(one, place, depth + 1)
        texts = [part.lark for part in parts if part.kind == "text"]
        if len(texts) < len(parts):
            _refuse(place, "must be made of texts and regexes here. Write JSON and free text in a tag of its own")
        return " ".join(texts)

    def _tag(self, one: Any, place: str, depth: int) -> _Tag:
        fields = self._fields(one, place, depth)
        if one["type"] != "tag":
            _refuse(place, "must be a tag")
        end = fields["end"]
        ends = end if isinstance(end, list) else [end]
        texts = tuple(self._string(text, f"{place}.end") for text in self._list(ends, f"{place}.end"))
        for text, other in permutations(texts, 2):
            if other.startswith(text):
                _refuse(f"{place}.end", f"has {text[:64]!r}, which is the beginning of another end: the two are ambiguous")
        begin = self._string(fields["begin"], f"{place}.begin")
        return _Tag(begin, self.parts(fields["content"], f"{place}.content", depth + 1), texts, place)

    def _tags(self, fields: Mapping[str, Any], place: str, depth: int) -> list[_Tag]:
        listed = self._list(fields["tags"], f"{place}.tags")
        tags = [self._tag(one, f"{place}.tags[{nth}]", depth + 1) for nth, one in enumerate(listed)]
        for name in ("at_least_one", "stop_after_first"):
            if not isinstance(fields[name], bool):
                _refuse(f"{place}.{name}", "must be true or false")
        for one, other in permutations(tags, 2):
            if other.begin.startswith(one.begin):
                _refuse(f"{other.place}.begin", f"begins with that of {one.place}: the two are ambiguous")
        return tags

    def _list(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
            _refuse(place, f"must be a list with 1 to {MAX_TAGS} entries")
        return value

    def _string(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not value:
            _refuse(place, "must be a text that is not empty")
        return value

    # writing

    def _constants(self, texts: Sequence[str], place: str) -> _Part:
        spelled = [self.spell(text) for text in texts]
        if len(texts) > 1 and any("<[" in one for one in spelled):
            _refuse(place, "has several texts, and a special token of the model in one of them")
        return _Part("text", place, spelled[0] if len(texts) == 1 else f"({' | '.join(spelled)})", tuple(texts))

    def _regex(self, value: Any, place: str) -> str:
        from llguidance import regex_to_lark

        self.num_regex_chars += len(self._string(value, place))
        if self.num_regex_chars > self.max_regex_chars:
            _refuse(place, f"brings the regexes to more than {self.max_regex_chars} characters in total")
        return f"/{regex_to_lark(value, '')}/"

    def row(self, parts: Sequence[_Part], *, is_last: bool) -> str:
        """Return Lark for a sequence of parts. Unless it `is_last`, regexes end at the first possible character."""
        written: list[str] = []
        texts: list[_Part] = []
        """Regular parts side by side."""
        waiting = list(reversed(parts))
        while waiting:
            part = waiting.pop()
            if part.kind == "text":
                texts.append(part)
                continue
            if not all(text.constants for text in texts):
                _refuse(part.place, "follows a regex, whose end would be ambiguous")
            written += [text.lark for text in texts]
            texts = []
            ends = waiting[-1].constants if waiting else ()
            is_followed = bool(waiting) or not is_last
            if part.kind == "tags":
                if is_followed:
                    _refuse(part.place, "has no fixed end, so nothing can follow it")
                written.append(part.lark)
                continue
            if is_followed and not ends:
                _refuse(part.place, "must be followed by a constant text or end the answer")
            if part.kind == "json":
                if any(text[0] in _OF_NUMBERS for text in ends):
                    _refuse(part.place, "is followed by a text that could continue a number: begin it with another character")
                written.append(self._json(part))
            else:
                written.append(self._free(ends))
                if ends:
                    waiting.pop()  # the terminal includes the ends
        return " ".join([*written, self._of_texts(texts, is_lazy=not is_last)])

    def _of_texts(self, texts: Sequence[_Part], *, is_lazy: bool) -> str:
        """Write adjacent constants and regexes as one terminal. Pure constants stay separate: some contain special tokens."""
        if all(text.constants for text in texts):
            return " ".join(text.lark for text in texts)
        if any("<[" in text.lark for text in texts):
            _refuse("", "has a special token of the model beside a regex")
        name = f"text{len(self.lines)}"
        self.lines += [
            f"{name}{'[lazy]' * is_lazy}: {name.upper()}",
            f"{name.upper()}: {' '.join(text.lark for text in texts)}",
        ]
        return name

    def _json(self, part: _Part) -> str:
        name = f"json{len(self.lines)}"
        try:
            self.lines.append(f"{name}: %json {json_schema.json_of(part.schema, self.count)}")
        except Rejected as rejected:
            _refuse(part.place, f"is refused. {rejected.detail.removesuffix('.')}")
        return name

    def _free(self, ends: Sequence[str]) -> str:
        """Write a rule for any text, through the first of `ends` if there are any, and return its name."""
        name = f"free{len(self.lines)}"
        if not ends:
            self.lines.append(f"{name}: /{_ANY}/")
            return name
        spelled = self.spell(ends[0])
        if spelled.startswith("<["):  # a special token, which no text holds
            self.lines.append(f"{name}: {name.upper()}? {spelled}")
            self.lines.append(f"{name.upper()}: /(.|\\n)+/")
        else:
            self.lines.append(f"{name}[lazy]: /{_ANY}({'|'.join(map(escaped, ends))})/")
        return name

    def _whole(self, tag: _Tag, num_read: int) -> str:
        """Return Lark for a tag without the first `num_read` characters of its `begin`, which the trigger matched."""
        begin = [self._constants((tag.begin[num_read:],), tag.place)] if num_read < len(tag.begin) else []
        return self.row([*begin, *tag.content, self._constants(tag.ends, tag.place)], is_last=False)

    def _triggered(self, fields: Mapping[str, Any], place: str, depth: int) -> str:
        tags = self._tags(fields, place, depth)
        listed = self._list(fields["triggers"], f"{place}.triggers")
        triggers = [self._string(one, f"{place}.triggers[{nth}]") for nth, one in enumerate(listed)]
        for one, other in permutations(triggers, 2):
            if one in other:
                _refuse(f"{place}.triggers", f"has {one[:64]!r} inside another one: the two are ambiguous")
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                _refuse(f"{tag.place}.begin", "begins with none of the triggers")
        name = f"tags{len(self.lines)}"
        at = len(self.lines)
        self.lines.append("")
        texts = [one for one in triggers if not self.spell(one).startswith("<[")]
        no_trigger = f" & ~/{_ANY}({'|'.join(map(escaped, texts))}){_ANY}/" if texts else ""
        rest = f"{name.upper()}_REST"
        ways, first_ways = [], []
        for nth, trigger in enumerate(triggers):
            meant = [tag for tag in tags if tag.begin.startswith(trigger)]
            if not meant:
                _refuse(f"{place}.triggers[{nth}]", "begins none of the tags")
            spelled, head = self.spell(trigger), f"{name}_head{nth}"
            if "<[" in spelled and not (spelled.startswith("<[") and " " not in spelled):
                _refuse(f"{place}.triggers[{nth}]", "has a special token of the model beside other text")
            behind = f"({' | '.join(self._whole(tag, len(trigger)) for tag in meant)})"
            self.lines.append(
                f"{head}: {rest}? {spelled}" if spelled.startswith("<[") else f"{head}[lazy]: /{_ANY}{escaped(trigger)}/"
            )
            ways.append(f"{head} {behind}")
            first_ways.append(f"{spelled} {behind}")
        once = f"({' | '.join(ways)})"
        first = f"({' | '.join(first_ways)})" if fields["at_least_one"] else once
        if fields["stop_after_first"]:
            whole = first if fields["at_least_one"] else f"{first} | {rest}?"
        else:
            whole = f"{first} {once}* {rest}?" if fields["at_least_one"] else f"{once}* {rest}?"
        self.lines[at] = f"{name}: {whole}"
        self.lines.append(f"{rest}: /(.|\\n)+/{no_trigger}")
        return name

    def _separated(self, fields: Mapping[str, Any], place: str, depth: int) -> str:
        tags = self._tags(fields, place, depth)
        separator = self.spell(self._string(fields["separator"], f"{place}.separator"))
        name = f"tags{len(self.lines)}"
        at = len(self.lines)
        self.lines.append("")
        one = f"({' | '.join(self._whole(tag, 0) for tag in tags)})"
        more = "" if fields["stop_after_first"] else f" ({separator} {one})*"
        self.lines[at] = f"{name}: {one}{more}" if fields["at_least_one"] else f"{name}: ({one}{more})?"
        return name


def _refuse(place: str, what: str) -> NoReturn:
    raise wrong(f"The structural_tag{f', at {place},' if place else ''} {what}.")
