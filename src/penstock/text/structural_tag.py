"""The grammar of an answer with structural tags, in llguidance's Lark: from the JSON that vLLM takes, in the older form
(`structures` and `triggers`) or in the newer one (`format`). Called by `text.grammar`.

A format is a tree, which is read as a row of parts: constants, regular texts, JSON and free text. Terminals of Lark take the
longest text they can and give none back, so a row is taken only where that makes no difference:

    constants and regexes side by side    one terminal, which is exact, as all of it is regular
    free text                             up to the first text that stands behind it
    a regex inside a tag                  up to the first place where the tag may end
    JSON                                  before a constant that can't be more of a number, or at the end

All other formats are refused by name. Between tags that have triggers stands any text without a trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

from penstock.text import json_schema
from penstock.text.tool_grammar import escaped
from penstock.types.errors import Rejected, RejectReason

MAX_TAGS = 128
MAX_REPEAT = 1000
MAX_DEPTH = 32
_OF_NUMBERS = frozenset("0123456789.eE+-")
"""Characters that may go on with a number of JSON."""
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
"""Fields of each type with their values where they are left out; `...`: they may not be."""
_ONLY_DEFAULT = ("style", "any_order", "excludes", "max_tokens", "max_chars")
"""Fields of which no other value is supported."""


@dataclass(frozen=True, slots=True)
class _Text:
    """A regular part, as an expression of terminals. `constants`: it is one of these; empty: it is not known so well."""

    lark: str
    constants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Json:
    schema: Any
    place: str


@dataclass(frozen=True, slots=True)
class _Free:
    """Any text up to what follows."""

    place: str


@dataclass(frozen=True, slots=True)
class _Rule:
    """A rule that is whole in itself: tags with triggers, or with a separator. More may come of it, so nothing may follow."""

    name: str
    place: str


_Part = _Text | _Json | _Free | _Rule


def of_structural_tag(source: str, spell: Callable[[str], str], max_regex_chars: int) -> str:
    """Lark. `spell` writes a text as Lark, its special tokens by their ids. `max_regex_chars`: of all regexes together.

    Raises `Rejected`, naming the place.
    """
    try:
        asked = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _refused("", f"is not JSON: {error}") from error
    writer = _Writer(spell, max_regex_chars)
    writer.lines[0] = f"start: {writer.row(writer.parts(_format_of(asked), 'format', 0), is_last=True)}"
    return "\n".join(writer.lines) + "\n"


def _format_of(asked: Any) -> Any:
    """The newer form of what is asked for."""
    if not isinstance(asked, dict) or asked.get("type") != "structural_tag":
        raise _refused("", "must be an object of the type structural_tag")
    names = asked.keys() - {"type"}
    if names == {"format"}:
        return asked["format"]
    if names != {"structures", "triggers"}:
        raise _refused("", "must have 'structures' and 'triggers', or 'format', and nothing else")
    if not isinstance(asked["structures"], list):
        raise _refused("structures", "must be a list")
    tags = []
    for nth, one in enumerate(asked["structures"]):
        if not isinstance(one, dict) or one.keys() != {"begin", "schema", "end"}:
            raise _refused(f"structures[{nth}]", "must have 'begin', 'schema' and 'end'")
        content = {"type": "json_schema", "json_schema": one["schema"]}
        tags.append({"type": "tag", "begin": one["begin"], "content": content, "end": one["end"]})
    return {"type": "triggered_tags", "triggers": asked["triggers"], "tags": tags}


@dataclass(slots=True)
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
    """The first is the start."""
    count: json_schema.SchemaCount = field(default_factory=json_schema.SchemaCount)

    # reading

    def parts(self, one: Any, place: str, depth: int) -> list[_Part]:
        """A format as a row of parts."""
        fields = self._fields(one, place, depth)
        match one["type"]:
            case "const_string":
                return [self._constants((self._string(fields["value"], f"{place}.value"),), place)]
            case "regex":
                return [_Text(self._regex(fields["pattern"], f"{place}.pattern"))]
            case "json_schema":
                return [_Json(fields["json_schema"], f"{place}.json_schema")]
            case "any_text":
                return [_Free(place)]
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
                return [self._triggered(fields, place, depth)]
            case "tags_with_separator":
                return [self._separated(fields, place, depth)]
        return [self._repeated(one["type"], fields, place, depth)]

    def _fields(self, one: Any, place: str, depth: int) -> Mapping[str, Any]:
        if depth > MAX_DEPTH:
            raise _refused(place, f"is inside more than {MAX_DEPTH} others")
        if not isinstance(one, dict) or not isinstance(one.get("type"), str):
            raise _refused(place, "must be an object with a type")
        known = _FIELDS.get(one["type"])
        if known is None:
            raise _refused(place, f"has the type {one['type'][:64]!r}, and supported are {', '.join(_FIELDS)}")
        fields = dict(known)
        for name, value in one.items():
            if name != "type" and name not in known:
                raise _refused(place, f"has the field {name[:64]!r}, which {one['type']} does not know")
            if name in _ONLY_DEFAULT and value != known[name]:
                raise _refused(f"{place}.{name}", f"is not supported but for {json.dumps(known[name])}")
            fields[name] = value
        if missing := [name for name, value in fields.items() if value is ...]:
            raise _refused(place, f"needs {', '.join(map(repr, missing))}")
        return fields

    def _repeated(self, kind: str, fields: Mapping[str, Any], place: str, depth: int) -> _Text:
        if kind == "or":
            elements = self._list(fields["elements"], f"{place}.elements")
            texts = [self._text(one, f"{place}.elements[{nth}]", depth) for nth, one in enumerate(elements)]
            return _Text(f"({' | '.join(texts)})")
        text = self._text(fields["content"], f"{place}.content", depth)
        if kind != "repeat":
            return _Text(f"({text}){ {'optional': '?', 'plus': '+', 'star': '*'}[kind] }")
        least, most = fields["min"], fields["max"]
        if not all(isinstance(number, int) and not isinstance(number, bool) for number in (least, most)):
            raise _refused(place, "needs integers in 'min' and 'max'")
        if not 0 <= least <= MAX_REPEAT or not (most == -1 or max(1, least) <= most <= MAX_REPEAT):
            raise _refused(place, f"needs 'min' and 'max' in order, and at most {MAX_REPEAT}; a 'max' of -1 is any number")
        return _Text(f"({text}){{{least},{'' if most == -1 else most}}}")

    def _text(self, one: Any, place: str, depth: int) -> str:
        """A format that is regular, as one expression."""
        parts = self.parts(one, place, depth + 1)
        texts = [part.lark for part in parts if isinstance(part, _Text)]
        if len(texts) < len(parts):
            raise _refused(place, "must be made of texts and regexes here. Write JSON and free text in a tag of its own")
        return " ".join(texts)

    def _tag(self, one: Any, place: str, depth: int) -> _Tag:
        fields = self._fields(one, place, depth)
        if one["type"] != "tag":
            raise _refused(place, "must be a tag")
        end = fields["end"]
        ends = end if isinstance(end, list) else [end]
        texts = tuple(self._string(text, f"{place}.end") for text in self._list(ends, f"{place}.end"))
        for text, other in permutations(texts, 2):
            if other.startswith(text):
                raise _refused(
                    f"{place}.end", f"has {text[:64]!r}, with which another begins, so that which is meant can't be told"
                )
        begin = self._string(fields["begin"], f"{place}.begin")
        return _Tag(begin, self.parts(fields["content"], f"{place}.content", depth + 1), texts, place)

    def _tags(self, fields: Mapping[str, Any], place: str, depth: int) -> list[_Tag]:
        listed = self._list(fields["tags"], f"{place}.tags")
        tags = [self._tag(one, f"{place}.tags[{nth}]", depth + 1) for nth, one in enumerate(listed)]
        for name in ("at_least_one", "stop_after_first"):
            if not isinstance(fields[name], bool):
                raise _refused(f"{place}.{name}", "must be true or false")
        for one, other in permutations(tags, 2):
            if other.begin.startswith(one.begin):
                raise _refused(f"{other.place}.begin", f"begins with that of {one.place}, so that which is meant can't be told")
        return tags

    def _list(self, value: Any, place: str) -> list[Any]:
        if not isinstance(value, list) or not 1 <= len(value) <= MAX_TAGS:
            raise _refused(place, f"must be a list with 1 to {MAX_TAGS} entries")
        return value

    def _string(self, value: Any, place: str) -> str:
        if not isinstance(value, str) or not value:
            raise _refused(place, "must be a text that is not empty")
        return value

    # writing

    def _constants(self, texts: Sequence[str], place: str) -> _Text:
        spelled = [self.spell(text) for text in texts]
        if len(texts) > 1 and any("<[" in one for one in spelled):
            raise _refused(place, "has several texts, and a special token of the model in one of them")
        return _Text(spelled[0] if len(texts) == 1 else f"({' | '.join(spelled)})", tuple(texts))

    def _regex(self, value: Any, place: str) -> str:
        from llguidance import regex_to_lark

        self.num_regex_chars += len(self._string(value, place))
        if self.num_regex_chars > self.max_regex_chars:
            raise _refused(place, f"comes to more than {self.max_regex_chars} characters of regexes with those before it")
        return f"/{regex_to_lark(value, '')}/"

    def row(self, parts: Sequence[_Part], *, is_last: bool, is_lazy: bool = False) -> str:
        """Parts one after another. `is_last`: nothing follows. `is_lazy`: regexes end at the first place where they may."""
        written: list[str] = []
        texts: list[_Text] = []
        nth = 0
        while nth < len(parts):
            part, follows = parts[nth], parts[nth + 1 :]
            nth += 1
            if isinstance(part, _Text):
                texts.append(part)
                continue
            if any(not text.constants for text in texts):
                raise _refused(part.place, "stands behind a regex, whose end can't be told then")
            written += [text.lark for text in texts]
            texts = []
            match part:
                case _Json(schema, place):
                    written.append(self._json(schema, place, follows, is_last=is_last))
                case _Free(place):
                    ends = self._behind(follows, place, is_last=is_last)
                    written.append(self._free(ends))
                    nth += bool(ends)  # they are in the terminal
                case _Rule(name, place):
                    if follows or not is_last:
                        raise _refused(place, "may go on, so nothing can stand behind it")
                    written.append(name)
        return " ".join([*written, self._of_texts(texts, is_lazy=is_lazy)])

    def _of_texts(self, texts: Sequence[_Text], *, is_lazy: bool) -> str:
        """Regular parts as one terminal; constants as they are, as they may have special tokens."""
        if all(text.constants for text in texts):
            return " ".join(text.lark for text in texts)
        if any("<[" in text.lark for text in texts):
            raise _refused("", "has a special token of the model beside a regex")
        name = f"text{len(self.lines)}"
        self.lines += [
            f"{name}{'[lazy]' * is_lazy}: {name.upper()}",
            f"{name.upper()}: {' '.join(text.lark for text in texts)}",
        ]
        return name

    def _json(self, schema: Any, place: str, follows: Sequence[_Part], *, is_last: bool) -> str:
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise _refused(place, "must be a JSON schema, an object")
        if follows or not is_last:
            behind = self._behind(follows, place, is_last=False)
            if any(text[0] in _OF_NUMBERS for text in behind):
                raise _refused(place, "is followed by a text that could be more of a number: let another character begin it")
        name = f"json{len(self.lines)}"
        try:
            self.lines.append(f"{name}: %json {json_schema.json_of(schema, self.count)}")
        except Rejected as rejected:
            raise _refused(place, f"is refused. {rejected.detail.removesuffix('.')}") from rejected
        return name

    def _behind(self, follows: Sequence[_Part], place: str, *, is_last: bool) -> tuple[str, ...]:
        """The constants that stand behind a part; none if that is the last."""
        if not follows and is_last:
            return ()
        constants = follows[0].constants if follows and isinstance(follows[0], _Text) else ()
        if not constants:
            raise _refused(place, "needs a constant text behind it, or the end of the answer")
        return constants

    def _free(self, ends: Sequence[str]) -> str:
        """Any text, and the first of what ends it."""
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

    def _whole(self, tag: _Tag, num_read: int, *, is_lazy: bool = True) -> str:
        """A tag without the first characters of its begin."""
        begin = [self._constants((tag.begin[num_read:],), tag.place)] if num_read < len(tag.begin) else []
        return self.row([*begin, *tag.content, self._constants(tag.ends, tag.place)], is_last=False, is_lazy=is_lazy)

    def _triggered(self, fields: Mapping[str, Any], place: str, depth: int) -> _Rule:
        tags = self._tags(fields, place, depth)
        listed = self._list(fields["triggers"], f"{place}.triggers")
        triggers = [self._string(one, f"{place}.triggers[{nth}]") for nth, one in enumerate(listed)]
        for one, other in permutations(triggers, 2):
            if one in other:
                raise _refused(
                    f"{place}.triggers", f"has {one[:64]!r} inside another one, so that which is meant can't be told"
                )
        for tag in tags:
            if not any(tag.begin.startswith(trigger) for trigger in triggers):
                raise _refused(f"{tag.place}.begin", "begins with none of the triggers")
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
                raise _refused(f"{place}.triggers[{nth}]", "begins none of the tags")
            spelled, head = self.spell(trigger), f"{name}_head{nth}"
            if "<[" in spelled and not (spelled.startswith("<[") and " " not in spelled):
                raise _refused(f"{place}.triggers[{nth}]", "has a special token of the model beside other text")
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
        return _Rule(name, place)

    def _separated(self, fields: Mapping[str, Any], place: str, depth: int) -> _Rule:
        tags = self._tags(fields, place, depth)
        separator = self.spell(self._string(fields["separator"], f"{place}.separator"))
        name = f"tags{len(self.lines)}"
        at = len(self.lines)
        self.lines.append("")
        one = f"({' | '.join(self._whole(tag, 0) for tag in tags)})"
        more = "" if fields["stop_after_first"] else f" ({separator} {one})*"
        self.lines[at] = f"{name}: {one}{more}" if fields["at_least_one"] else f"{name}: ({one}{more})?"
        return _Rule(name, place)


def _refused(place: str, what: str) -> Rejected:
    return Rejected(RejectReason.INVALID, f"The structural_tag{f', at {place}' if place else ''}, {what}.")
