"""What must not be in a JSON schema that an answer is to follow. Called by `grammar_lark`, before the schema is compiled.

llguidance refuses most of what it does not support; here is what it passes over or gets wrong, what would take it too long,
and what it refuses although it asks for nothing. The checks take time in proportion to the source and to `MAX_SCHEMAS`: they
count before they build.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from penstock.text.grammar_errors import refused_schema
from penstock.text.grammar_numbers import check_multiples, check_numbers

MAX_SCHEMAS = 2_000
"""Counted as llguidance makes them: anew in each place, and for each choice of the others that one is put together with. It
does that before it looks at any limit, so that 3 KB of schema can take a minute, or all memory there is."""
_PATTERN_SCHEMAS = 5
"""What a string with a pattern or a format counts, as it is compiled by itself to see whether it is empty."""
_NO_STRINGS = ("integer", "number", "boolean", "null", "array", "object")
MAX_PATTERNS_TOGETHER = 6
"""That one string has to match. Each may double time and memory: 20 take 4 s and 250 MB, and no limit counts them."""
MAX_NAME_PATTERNS = 32
"""Different ones of `patternProperties`. llguidance compares each with each: 100 take 0.1 s, 1,000 take minutes."""
_MAX_INDEX_DIGITS = 9
"""Of an item that a $ref names. No list is as long, and Python reads no number of thousands of digits."""

_OF_SCHEMA = ("items", "additionalItems", "additionalProperties")
_OF_LIST = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas", "propertyNames"),
        *("contains", "minContains", "maxContains", "uniqueItems", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef", "x-guidance"),
    }
)
"""Some of them llguidance passes over if `$schema` names a draft that does not have them."""
_OF_CHOICES = ("allOf", "anyOf", "oneOf")
_ANNOTATIONS = frozenset(
    {
        *("title", "description", "default", "examples", "readOnly", "writeOnly", "$comment"),
        *("$schema", "$id", "$anchor", "contentMediaType", "contentEncoding", "$defs", "definitions", "$ref", *_OF_CHOICES),
    }
)
"""What may stand beside a $ref and leaves it alone: nothing is asked for, or what is has a part of its own."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}
"""Values that ask for nothing: some generators write them, and llguidance refuses them."""
_SAYS_NOTHING = frozenset({"deprecated", "nullable", "example", "externalDocs", "xml"})
"""They ask for nothing either; llguidance would put them together with a $ref beside them, which it can't where that recurs."""


def prepare_schema(schema: dict[str, Any]) -> None:
    """Takes what asks for nothing out of it. Raises `Rejected`."""
    check_numbers(schema)
    name_patterns: set[str] = set()
    for node in _nodes(schema):
        _check_node(node)
        name_patterns |= _dict(node, "patternProperties").keys()
        if node is not schema and (isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)):
            raise refused_schema("does not support $id inside it, only around all of it. Leave it out.")
    if len(name_patterns) > MAX_NAME_PATTERNS:
        what = f"has {len(name_patterns)} different patterns in patternProperties, and at most {MAX_NAME_PATTERNS} are taken"
        raise refused_schema(f"{what}. Put some together as one pattern.")
    count = _Count()
    does_merge = False
    for node, merges, num_patterns in _made(schema, count):
        does_merge |= merges
        if _has_pattern(node):
            count.add(_PATTERN_SCHEMAS - 1)
            if num_patterns >= MAX_PATTERNS_TOGETHER:
                what = f"puts more than {MAX_PATTERNS_TOGETHER} patterns and formats together for one string"
                raise refused_schema(f"{what}. Say them as one pattern.")
    check_multiples(schema, are_put_together=does_merge)


class _Count:
    """Of the schemas that llguidance makes: those that `_made` has yielded, and those that it is still to yield."""

    def __init__(self) -> None:
        self._num_schemas = 0

    def add(self, num_schemas: int) -> None:
        """To be called before that many are built. Raises `Rejected`."""
        self._num_schemas += num_schemas
        if self._num_schemas > MAX_SCHEMAS:
            what = f"recurs, or grows to more than {MAX_SCHEMAS} schemas, where a $ref has other keywords beside it"
            why = f"an allOf has several anyOf, or it is as large itself (a pattern or a format counts as {_PATTERN_SCHEMAS})"
            raise refused_schema(f"{what}, or {why}. Leave the $ref alone, use anyOf alone, and ask for less at once.")


def _check_node(node: dict[str, Any]) -> None:
    if unsupported := sorted(_UNSUPPORTED.intersection(node)):
        raise refused_schema(f"does not support {', '.join(unsupported)}. Leave it out, or say the same otherwise.")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            raise refused_schema(f"takes {name} as a number, not as true or false. Give the bound itself.")


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, and itself, once; not what stands in const, enum, default or examples."""
    named: set[str] = set()
    seen_ids: set[int] = set()
    """A place has many spellings, such as #/a and #/%61, so that the names alone do not tell what came before."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen_ids:
            continue
        seen_ids.add(id(node))
        _take_out_neutral(node)
        yield node
        ref = node.get("$ref")
        if isinstance(ref, str) and ref not in named:
            named.add(ref)
            waiting.append(_named(schema, ref))
        waiting += [node[name] for name in _OF_SCHEMA if name in node]
        for name in _OF_LIST:
            waiting += _list(node, name)
        for name in _OF_NAMES:
            waiting += _dict(node, name).values()


def _has_pattern(node: dict[str, Any]) -> bool:
    """Of strings: beside another type alone they ask for nothing, such as the format int32."""
    return ("pattern" in node or "format" in node) and node.get("type") not in _NO_STRINGS


@dataclass(frozen=True, slots=True)
class _Way:
    """One choice of what holds in a place."""

    waiting: list[Any]
    """Schemas that hold there and are not yet made; at least one."""
    num_said: int = 0
    """Schemas that were made there and say something."""
    num_patterns: int = 0
    """Those of them that have a pattern or a format."""
    with_places: tuple[dict[str, Any], ...] = ()
    """Those of them that have schemas inside. Each way looks at these again, and makes what is inside anew."""


def _made(schema: dict[str, Any], count: _Count) -> Iterator[tuple[dict[str, Any], bool, int]]:
    """Every schema that llguidance makes, for each place and each choice anew; whether it is put together with others, and
    how many of those that came before it have a pattern or a format.

    What a $ref names comes once if the $ref is alone in its place. Counts each when it begins to wait: all that wait are made,
    so that what is too large, or recurs without end, is refused before it is built. Raises `Rejected`.
    """
    find = functools.cache(functools.partial(_named, schema))
    named: set[str] = set()
    count.add(1)
    places: list[list[Any]] = [[schema]]
    while places:
        ways = [_Way(places.pop())]
        while ways:
            way = ways.pop()
            first, *others = way.waiting
            node: dict[str, Any] = first if isinstance(first, dict) else {}
            merges = way.num_said + len(others) + _num_parts(node) > 1
            yield node, merges, way.num_patterns
            all_of = _list(node, "allOf")
            count.add(len(all_of))
            others = [*all_of, *others]
            ref = node.get("$ref")
            if merges and "$ref" in node:
                target = find(ref) if isinstance(ref, str) else None
                if not isinstance(target, dict | bool):
                    what = "takes a $ref with other keywords beside it if it is a place, such as #/$defs/x"
                    raise refused_schema(f"{what}. Give that.")
                count.add(1)
                others.append(target)
            elif isinstance(ref, str) and ref not in named:
                named.add(ref)
                count.add(1)
                places.append([find(ref)])
            num_said = way.num_said + _says_something(node)
            num_patterns = way.num_patterns + _has_pattern(node)
            with_places = (*way.with_places, node) if _num_places(node) else way.with_places
            choices = [options for name in ("anyOf", "oneOf") if (options := _list(node, name))]
            if choices:
                count.add(len(choices) - 1)
                others += [{"anyOf": options} for options in choices[1:]]
                count.add(len(choices[0]) * (1 + len(others)) - len(others))
                ways += [_Way([option, *others], num_said, num_patterns, with_places) for option in choices[0]]
            elif others:
                ways.append(_Way(others, num_said, num_patterns, with_places))
            else:
                places += _inside(with_places, count)


def _inside(together: Sequence[dict[str, Any]], count: _Count) -> list[list[Any]]:
    """The places in schemas that are put together, each with what they say of it."""
    count.add(sum(map(_num_places, together)))
    places: dict[Any, list[Any]] = {}
    for node in together:
        for key, part in _parts(node).items():
            places.setdefault(key, []).append(part)
    for node in together if len(together) > 1 else ():
        # What it says of properties and items that only others name.
        own = _parts(node)
        properties = [*_dict(node, "patternProperties").values(), node.get("additionalProperties")]
        for kind, options in (("property", properties), ("item", [node.get("items"), node.get("additionalItems")])):
            rest = [option for option in options if isinstance(option, dict) and option]
            if rest:
                keys = [key for key in places.keys() - own.keys() if key[0] == kind]
                count.add(len(keys))
                for key in keys:
                    places[key].append({"anyOf": rest})
    return list(places.values())


def _parts(node: dict[str, Any]) -> dict[tuple[str, Any], Any]:
    """The schemas inside one, by their places."""
    parts: dict[tuple[str, Any], Any] = {("rest", name): node[name] for name in _OF_SCHEMA if isinstance(node.get(name), dict)}
    for name in ("properties", "patternProperties"):
        parts |= {("property", (name, key)): part for key, part in _dict(node, name).items()}
    for name in ("prefixItems", "items"):
        parts |= {("item", nth): part for nth, part in enumerate(_list(node, name))}
    return parts


def _num_places(node: dict[str, Any]) -> int:
    """How many `_parts` there are, without a look at each."""
    num_names = len(_dict(node, "properties")) + len(_dict(node, "patternProperties"))
    num_items = max(len(_list(node, "prefixItems")), len(_list(node, "items")))
    return sum(isinstance(node.get(name), dict) for name in _OF_SCHEMA) + num_names + num_items


def _list(node: dict[str, Any], name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []


def _dict(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return found if isinstance(found, dict) else {}


def _take_out_neutral(node: dict[str, Any]) -> None:
    for name in list(node):
        values = _NEUTRAL.get(name, ())
        if name in _SAYS_NOTHING or any(type(node[name]) is type(value) and node[name] == value for value in values):
            del node[name]


def _num_parts(node: dict[str, Any]) -> int:
    """That are put together: what it says itself, what a $ref names, each of an allOf, an anyOf, a oneOf."""
    all_of = node.get("allOf")
    num_named = sum(name in node for name in ("$ref", "anyOf", "oneOf"))
    return _says_something(node) + num_named + (len(all_of) if isinstance(all_of, list) else 0)


def _says_something(node: dict[str, Any]) -> bool:
    """Beside annotations and what has parts of its own. Ends at the first such keyword: one schema may come many times."""
    return any(name not in _ANNOTATIONS for name in node)


def _named(schema: dict[str, Any], ref: str) -> Any:
    """What a $ref inside the schema names; None if it names nothing there, or not by its place. Takes time with its length."""
    if ref != "#" and not ref.startswith("#/"):
        return None
    node: Any = schema
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            is_index = name.isdecimal() and len(name) <= _MAX_INDEX_DIGITS and int(name) < len(node)
            node = node[int(name)] if is_index else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
