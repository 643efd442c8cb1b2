"""Checks JSON schemas before llguidance compiles them.

llguidance itself refuses most of what it does not support. This module refuses the rest: keywords and numbers that llguidance
ignores or gets wrong, and schemas that would take it minutes or all memory. It also removes keywords without effect that
llguidance refuses.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_DOWN, Context, Decimal
from typing import Any, NamedTuple, NoReturn, TypeAlias
from urllib.parse import quote, unquote

from penstock.types.errors import Rejected, wrong

WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,16}"
"""White space that pretty printers write between two JSON tokens. Without a limit, small models write spaces forever."""
_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
    "json_allow_general_unicode_escapes": True,
}
_WITHOUT_UNICODE = _OPTIONS | {"json_allowed_escapes": 'nrbtf\\"'}
_NEEDS_UNICODE = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
"""Characters without a shorter escape than `\\u`."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_NO_NEW_PATTERNS = ("patternProperties", "minProperties", "maxProperties")
"""Keywords with which llguidance would refuse a further pattern, once it combines their schemas."""

MAX_SCHEMAS = 2_000
"""Most schemas in a grammar. llguidance builds a schema again for every place and combination, and checks its own limits
afterwards: 3 KB of schema can take a minute, or all memory."""
MAX_PATTERNS_TOGETHER = 6
"""Patterns that one string must match. Each may double time and memory: 20 take 4 s and 250 MB."""
MAX_NAME_PATTERNS = 32
"""Different `patternProperties`. llguidance compares every pair: 100 take 0.1 s, 1,000 take minutes."""
MAX_MULTIPLES = 10_000
"""Limit of `multipleOf`. A five-digit prime takes 0.5 s and 50 MB to compile, an eight-digit prime a thousand times that."""
MAX_INTEGER = 2**53
"""Above this llguidance uses floating point. Beyond 64 bits, two negative bounds crash the process."""
LEAST_NUMBER = 1e-15
"""Smaller bounds become regexes with hundreds of brackets."""
MAX_LENGTHS = 36_000
"""Limit of the lengths of different strings, added up, for answers of more than `MAX_SHORT_TOKENS`."""
MAX_SHORT_TOKENS = 10_000
"""Shorter answers do not reach the states of longer strings: a token of text makes 10 to 35."""
STATES_PER_CHAR = 13
"""Most lexer states that a mask makes for each character up to a `minLength` or `maxLength`. Usual text makes 5 to 13.
Characters written as `\\u` make 16 to 20, but take 5 to 10 tokens each: the usual states last for 30,000 tokens of them."""
_PATTERN_SCHEMAS = 5
"""A string with a pattern or a format is compiled separately, and counts as this many schemas."""
_MAX_SHOWN_CHARS = 200
_MAX_SHOWN_PATTERN = 100

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_FITS = {"minimum": operator.ge, "maximum": operator.le, "exclusiveMinimum": operator.gt, "exclusiveMaximum": operator.lt}
_NEAR = Decimal("0.001")
"""Numbers nearer to an open end of a range, or to zero from below, have no zeros at their end."""
_EXACT = Context(prec=60)
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_NO_STRINGS = ("integer", "number", "boolean", "null", "array", "object")
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
"""Refused keywords. llguidance ignores some of them if `$schema` names a draft that lacks them."""
_WITHOUT_RULES = frozenset(
    {
        *("title", "description", "default", "examples", "readOnly", "writeOnly", "$comment"),
        *("$schema", "$id", "$anchor", "contentMediaType", "contentEncoding", "$defs", "definitions"),
        *("$ref", "allOf", "anyOf", "oneOf"),
    }
)
"""Keywords that do not restrict values themselves: annotations, and those whose schemas are counted separately."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}
"""Values without effect. Some generators write them, and llguidance refuses them."""
_IGNORED = frozenset({"deprecated", "nullable", "example", "externalDocs", "xml", "contentSchema"})
"""Keywords that are removed. Beside a recursive $ref, they make llguidance fail."""

_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMAT_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[Tt]{_TIME}$"}
"""RFC 3339 without leap seconds. llguidance itself accepts 29 February in every year, and 60 seconds in every minute."""

_HINTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"The format (\S+) is not", ("format",)),
    (r"of the patternProperties, /(.*)/ and /", ("patternProperties",)),
    (r"Two schemas of a oneOf", ("oneOf",)),
    (r"for '(\w+)', got", ()),
    (r"The pattern /(.*)/ is wrong", ("pattern", "patternProperties")),
    (r"The type '(.*)' is not", ("type",)),
    (r"look-around|an escape|[Rr]egex", ("pattern", "patternProperties")),
)
"""(regex for llguidance's message, keywords that can be its cause). The group is the keyword's value, or a name in it. Without
keywords, the group is the keyword itself."""

Place: TypeAlias = "tuple[Place, str] | None"
"""A place in a schema: the enclosing place, and a name or an index. None is the whole schema."""


class SchemaCount:
    """Counts the schemas that llguidance will build for one grammar, and limits them to `MAX_SCHEMAS`."""

    def __init__(self, num_schemas: int = 0) -> None:
        self.num_schemas = num_schemas
        self.num_spelled = 0
        """The same with the spellings that `json_of` adds. They have the same limit, and beyond it are left out."""
        self.num_copied_chars = 0
        """Characters of what was copied to the schemas of tagged parameters."""

    def add(self, num_schemas: int) -> None:
        """Count more schemas. Raises `Rejected` beyond `MAX_SCHEMAS`."""
        self.check(num_schemas)
        self.num_schemas += num_schemas

    def check(self, num_schemas: int) -> None:
        """Raise `Rejected` if adding `num_schemas` would exceed `MAX_SCHEMAS`."""
        if self.num_schemas + num_schemas > MAX_SCHEMAS:
            _refuse(
                f"is recursive or expands to more than {MAX_SCHEMAS} schemas. The usual causes are a $ref with other keywords "
                "beside it, an allOf of several anyOf, or the schema's own size (a pattern or a format counts as "
                f"{_PATTERN_SCHEMAS}). Put a $ref or an anyOf alone, or make the schema smaller."
            )


def json_of(schema: dict[str, Any], count: SchemaCount) -> str:
    """Return the schema as JSON text, which follows `%json` in Lark. `count` has the earlier schemas of the same grammar.

    Changes `schema`. Raises `Rejected`. Time and memory are bounded by the length of the schema and by `MAX_SCHEMAS`.
    """
    written = json.dumps(schema)
    plain = _json_of(schema, count, with_spellings=False)
    if not any(f'"{name}"' in written for name in _FITS):
        return plain
    spelled = SchemaCount(count.num_spelled)
    try:
        text = _json_of(json.loads(written), spelled, with_spellings=True)
    except Rejected:  # a schema is not refused for what `_spell_bounds` adds to it
        return plain
    count.num_spelled = spelled.num_schemas
    return text


def _json_of(schema: dict[str, Any], count: SchemaCount, *, with_spellings: bool) -> str:
    root_id = schema.get("$id", schema.get("id"))
    for name in ("$id", "id"):
        if isinstance(schema.get(name), str):
            del schema[name]  # every $ref is rewritten without it, so no other schema can claim it
    find = functools.cache(functools.partial(referred, schema))
    multiples: list[int] = []
    name_patterns: set[str] = set()
    nodes: list[tuple[dict[str, Any], Place]] = []
    for node, place in _nodes(schema, root_id.rstrip("#") if isinstance(root_id, str) else "", with_spellings):
        _check_keywords(node, place, is_root=node is schema)
        _check_numbers(node, place)
        multiples.append(_significant(node.get("multipleOf")))
        name_patterns |= _dict(node, "patternProperties").keys()
        nodes.append((node, place))
    if len(name_patterns) > MAX_NAME_PATTERNS:
        what = f"has {len(name_patterns)} different patterns in patternProperties; at most {MAX_NAME_PATTERNS} are allowed"
        _refuse(f"{what}. Combine some into one pattern.")
    does_merge = _count_all(schema, find, count, {id(node): place for node, place in nodes})
    if max(sum(multiples), math.prod(set(multiples) - {0}) if does_merge else 0) > MAX_MULTIPLES:
        what = f"takes multipleOf values that, without decimal points and trailing zeros, add up to at most {MAX_MULTIPLES}"
        _refuse(f"{what}, as must their product where allOf, anyOf, oneOf or $ref combine them. Use rounder numbers.")
    if _keep_names([node for node, _ in nodes]):
        return json.dumps(schema | {"x-guidance": _OPTIONS})
    for node, place in nodes:
        _check_constants(node, place)
    return json.dumps(schema | {"x-guidance": _WITHOUT_UNICODE})


def _keep_names(nodes: Sequence[dict[str, Any]]) -> bool:
    """Let no other field have a declared name in another spelling, such as `"\\u0061"`. Return whether that is possible.

    llguidance accepts escaped names for `additionalProperties`. For `patternProperties` it accepts only control characters
    escaped. So an object with `properties` that allows any others does it by `patternProperties`.
    """
    if any(str(node.get("$ref", "")).endswith("/additionalProperties") for node in nodes):
        return False  # what it points to is changed below
    opened: list[dict[str, Any]] = []
    for node in nodes:
        names, others = _dict(node, "properties"), node.get("additionalProperties", True)
        has_patterns = "patternProperties" in node
        is_open = others is not False and bool(names or has_patterns)
        allows_any = others is True or others == {}
        if (is_open and not allows_any) or ((is_open or has_patterns) and any(map(_CONTROL.search, names))):
            return False
        if is_open:
            opened.append(node)
    if opened and any(name in node for node in nodes for name in _NO_NEW_PATTERNS):
        return False
    for node in opened:
        # Directly after `properties`: llguidance applies what follows an anyOf apart. Masks take 25 times as long with "".
        items = [item for item in node.items() if item[0] != "additionalProperties"]
        node.clear()
        for name, value in items:
            node[name] = value
            if name == "properties":
                node |= {"patternProperties": {"^": True}, "additionalProperties": False}
    return True


def _check_constants(node: dict[str, Any], place: Place) -> None:
    for keyword in ("const", "enum"):
        for value, inside in _walk(node.get(keyword), (place, keyword)):
            if isinstance(value, str) and _NEEDS_UNICODE.search(value):
                what = "takes no control characters in const and enum where names of fields could then be escaped, too"
                _refuse(f"{what}. Leave them out, or set additionalProperties to false.", inside)


def lengths_in(value: Any) -> list[int]:
    """Return the larger of `minLength` and `maxLength` of each different string in JSON schemas."""
    bounds: set[tuple[int, ...]] = set()
    for node, _ in _walk(value):
        if isinstance(node, dict):
            numbers = [_number(node.get(name)) or 0 for name in _COUNTS[:2]]
            bounds.add(tuple(int(number) for number in numbers if 0 < number < 2**32))
    return [max(pair) for pair in bounds if pair]


def place_in(source: str, message: str) -> str:
    """Return a sentence with the places in a schema that llguidance's error `message` may be about, or an empty text.

    `source` is the JSON text of the schema. The places are JSON pointers (RFC 6901).
    """
    if "It stands at" in message:
        return ""
    for pattern, keywords in _HINTS:
        if hint := re.search(pattern, message):
            quoted = shown_pattern(hint[1]) if hint.re.groups else None
            if not keywords:
                keywords, quoted = (str(quoted),), None
            nodes = ((node, place) for node, place in _walk(json.loads(source)) if isinstance(node, dict))
            return _sentence(
                [
                    place
                    for node, place in nodes
                    if any(name in node and (quoted is None or quoted in _shown_values(node, name)) for name in keywords)
                ]
            )
    return ""


def place_told(message: str, told: str) -> str:
    """Return a sentence with the place in llguidance's `message`, unless `place_in` finds a closer one by our words, `told`."""
    within = re.search(r"\n *while processing json-schema:///(#\S*)", message)
    if within is None or any(re.search(pattern, told) for pattern, _ in _HINTS):
        return ""
    return _sentence([_place_of(_names(within[1]) or [])])


def shown_pattern(pattern: str) -> str:
    """Return a pattern as errors quote it. llguidance escapes slashes and line breaks in it."""
    shown = pattern.replace("\n", "\\n").replace("\\/", "/")
    return shown if len(shown) <= _MAX_SHOWN_PATTERN else f"{shown[:_MAX_SHOWN_PATTERN]}..."


def subschemas(node: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the schemas directly inside one, each with its path: ("items",), ("anyOf", "0"), ("properties", "age")."""
    yield from (((name,), node[name]) for name in _OF_SCHEMA if name in node)
    for name in _OF_LIST:
        yield from (((name, str(nth)), inside) for nth, inside in enumerate(_list(node, name)))
    for name in _OF_NAMES:
        yield from (((name, key), inside) for key, inside in _dict(node, name).items())


def _nodes(schema: dict[str, Any], root_id: str, with_spellings: bool) -> Iterator[tuple[dict[str, Any], Place]]:
    """Yield every schema inside `schema` once, after removing ignored keywords and neutral values.

    Rewrites each $ref as an unambiguous JSON pointer, so that llguidance finds the schema that was checked.
    """
    seen_ids: set[int] = set()
    waiting: list[tuple[Any, Place]] = [(schema, None)]
    while waiting:
        node, place = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen_ids:
            continue
        seen_ids.add(id(node))
        for name in list(node):
            if name in _IGNORED or any(type(node[name]) is type(one) and node[name] == one for one in _NEUTRAL.get(name, ())):
                del node[name]
        yield node, place
        _spell_format(node)
        if "$ref" in node:
            ref = node["$ref"]
            names = _names(ref.removeprefix(root_id)) if isinstance(ref, str) else None
            target = _at(schema, names) if names is not None else None
            if not isinstance(target, dict | bool):
                what = "supports a $ref only to an existing place inside itself, such as #/$defs/x"
                _refuse(
                    f"{what}, not to {str(ref)[:_MAX_SHOWN_CHARS]!r}. Put the schema under $defs: nothing is fetched.", place
                )
            node["$ref"] = fragment(names or [])
            waiting.append((target, _place_of(names or [])))
        waiting += [(inside, _place_of(path, place)) for path, inside in subschemas(node)]
        if with_spellings:
            _spell_bounds(node)  # its new schemas need no check


def _check_keywords(node: dict[str, Any], place: Place, *, is_root: bool) -> None:
    if unsupported := sorted(_UNSUPPORTED.intersection(node)):
        _refuse(f"does not support {', '.join(map(repr, unsupported))}. Leave it out, or say the same in another way.", place)
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            _refuse(f"takes {name} as a number, not as true or false. Give the bound itself.", place)
    if not is_root and _has_id(node):
        _refuse("does not support $id inside it, only around all of it. Leave it out.", place)


def _check_numbers(node: dict[str, Any], place: Place) -> None:
    """Check the numbers in a schema's keywords, and rewrite counts such as 2.0 as integers, which llguidance requires."""
    for keyword in ("const", "enum"):
        for value, inside in _walk(node.get(keyword), (place, keyword)):
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                what = f"takes integers up to 2^53 in const and enum, not {_shown(value)}"
                _refuse(f"{what}. Ask for it as a string.", inside)
    for name in _BOUNDS:
        value = _number(node.get(name))
        if name == "multipleOf" and value is not None and value <= 0:
            _refuse(f"takes multipleOf above 0, not {_shown(value)}. Leave it out.", place)
        if value is not None and (not abs(value) <= MAX_INTEGER or 0 < abs(value) < LEAST_NUMBER):  # NaN is refused, too
            what = f"takes {name} of 0, or from {LEAST_NUMBER} to 2^53 on either side of it, not {_shown(value)}"
            _refuse(f"{what}. Leave it out, or give one of fewer digits.", place)
    for name in _COUNTS:
        value = _number(node.get(name))
        if value is not None and value >= 2**32:
            _refuse(f"takes {name} below 2^32, not {_shown(value)}. Leave it out.", place)
        if isinstance(value, float) and value.is_integer():
            node[name] = int(value)


def _significant(value: Any) -> int:
    """Return the significant digits of a number as an integer: 12 for 0.0120."""
    number = _number(value)
    if number is None:
        return 0
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits[:10] or 0)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shown(number: float) -> str:
    return str(number)[:40]


def _spell_format(node: dict[str, Any]) -> None:
    pattern = _FORMAT_PATTERNS.get(node["format"]) if isinstance(node.get("format"), str) else None
    if pattern is None:
        return
    del node["format"]
    if "pattern" not in node:
        node["pattern"] = pattern
    elif isinstance(node.get("allOf", []), list):  # else llguidance refuses it
        node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]


def _spell_bounds(node: dict[str, Any]) -> None:
    """Allow spellings that llguidance forgets: 1.2 for a maximum of 1.25, 0.50 for an exclusive minimum of 0, and -0.50."""
    limits = {name: Decimal(str(node[name])) for name in _FITS if _number(node.get(name)) is not None}
    is_number = "number" in str(node.get("type", "number"))
    if not limits or not is_number or "anyOf" in node or "oneOf" in node or _num_parts(node):
        return
    step = Decimal(str(_number(node.get("multipleOf")) or 0))
    rules = {name: node[name] for name in ("type", "format", *_BOUNDS) if name in node}

    def fits(value: Decimal) -> bool:
        return all(_FITS[name](value, limit) for name, limit in limits.items())

    cut = {
        limit.quantize(Decimal(1).scaleb(-num_digits), ROUND_DOWN)
        for limit in limits.values()
        for num_digits in range(1, -int(limit.as_tuple().exponent))
    }
    shorter = [value for value in sorted(cut) if value % 1 and fits(value) and not (step and _EXACT.remainder(value, step))]
    inner = {"maximum": min(limits.get("exclusiveMaximum", Decimal(0)), Decimal(0)) - _NEAR}
    if (end := limits.get("exclusiveMinimum", Decimal(-1))) >= 0:
        inner["minimum"] = end + _NEAR
    more: list[Any] = [{"const": float(value)} for value in shorter]  # each counts, unlike the values of an enum
    more += [rules | {"type": "number", name: float(value)} for name, value in inner.items() if fits(value)]
    if more:
        for name in rules:
            del node[name]
        node["anyOf"] = [*more, rules]  # a refusal is about the last one: it has the numbers of the client


class _End(NamedTuple):
    """An end of a range of numbers. The greater of two ends on the same side is the stricter one."""

    bound: float
    """A minimum, or a negated maximum."""
    is_exclusive: bool = False
    place: Place = None


@dataclass(frozen=True, slots=True)
class _Way:
    """A combination of schemas that apply to the same value, such as one choice of each `anyOf`."""

    waiting: Sequence[Any]
    """At least one schema that is not counted yet."""
    num_with_rules: int = 0
    """Number of counted schemas with rules of their own."""
    num_patterns: int = 0
    """Number of counted schemas with a pattern or a format."""
    with_places: tuple[dict[str, Any], ...] = ()
    """Counted schemas that contain others, which are counted again for each combination."""
    ends: tuple[_End, _End] = (_End(-math.inf), _End(-math.inf))
    """The strictest ends in the counted schemas: below and above."""


def _count_all(schema: dict[str, Any], find: Callable[[str], Any], count: SchemaCount, places: Mapping[int, Place]) -> bool:
    """Count every schema that llguidance builds. Return whether it combines any, as for `allOf`. Raises `Rejected`.

    `places` maps the id of a schema to its place.

    The target of a $ref that stands alone counts once. Combinations are generated lazily, so the limit also bounds the work of
    counting.
    """
    does_merge = False
    named: set[str] = set()
    way: _Way | None = _Way([schema])
    stack: list[Iterator[_Way]] = []
    while way is not None or stack:
        if way is None:
            way = next(stack[-1], None)
            if way is None:
                stack.pop()
            continue
        first, *waiting = way.waiting
        node: dict[str, Any] = first if isinstance(first, dict) else {}
        # A pattern or a format applies to strings only: the format int32 of an integer has no effect.
        has_pattern = ("pattern" in node or "format" in node) and node.get("type") not in _NO_STRINGS
        count.add(_PATTERN_SCHEMAS if has_pattern else 1)
        if has_pattern and way.num_patterns >= MAX_PATTERNS_TOGETHER:
            what = f"puts more than {MAX_PATTERNS_TOGETHER} patterns and formats together for one string"
            _refuse(f"{what}. Combine them into one.")
        all_of = _list(node, "allOf")
        has_rules = any(name not in _WITHOUT_RULES for name in node)
        num_parts = has_rules + len(all_of) + sum(name in node for name in ("$ref", "anyOf", "oneOf"))
        merges = way.num_with_rules + len(waiting) + num_parts > 1
        does_merge |= merges
        waiting[:0] = all_of
        if "$ref" in node and merges:
            waiting.append(find(node["$ref"]))
        elif "$ref" in node and node["$ref"] not in named:
            named.add(node["$ref"])
            stack.append(iter([_Way([find(node["$ref"])])]))
        choices = [options for name in ("anyOf", "oneOf") if (options := _list(node, name))]
        waiting += [{"anyOf": options} for options in choices[1:]]
        with_places = (*way.with_places, node) if _num_parts(node) else way.with_places
        ends = _narrowed(way.ends, node, places.get(id(node)))
        way = _Way(waiting, way.num_with_rules + has_rules, way.num_patterns + has_pattern, with_places, ends)
        if choices:
            stack.append(_alternatives(way, choices[0]))
            way = None
        elif not waiting:
            _check_ends(ends)
            count.check(sum(map(_num_parts, with_places)))
            stack.append(_inside(with_places))
            way = None
    return does_merge


def _narrowed(ends: tuple[_End, _End], node: dict[str, Any], place: Place) -> tuple[_End, _End]:
    """Return the ends (below and above) of a range within a schema's bounds. It is empty if the schema has no fractions."""
    if "number" not in str(node.get("type", "number")):
        return _End(math.inf), _End(math.inf)
    found = list(ends)
    for nth, name in enumerate(_BOUNDS[:4]):
        value, is_upper = _number(node.get(name)), nth % 2
        if value is not None:
            end = _End(-value if is_upper else value, nth >= 2, place)
            found[is_upper] = max(found[is_upper], end, key=operator.itemgetter(0, 1))
    return found[0], found[1]


def _check_ends(ends: tuple[_End, _End]) -> None:
    """Refuse an exclusive bound that llguidance includes: a whole number, if the other one is farther from 0 by less than 1."""
    for sign, (end, other) in ((1, ends), (-1, ends[::-1])):
        bound, opposite = sign * end.bound, -sign * other.bound
        if end.is_exclusive and end.bound >= 0 and float(bound).is_integer() and 0 < sign * (opposite - bound) < 1:
            name, other_name = ("Minimum", "Maximum")[::sign]
            beside = f"exclusive{other_name}" if other.is_exclusive else other_name.lower()
            what = f"does not support exclusive{name} {bound} beside {beside} {opposite}"
            _refuse(f"{what}. Give {name.lower()}, such as {bound + sign * 1e-6}.", end.place)


def _alternatives(way: _Way, options: Sequence[Any]) -> Iterator[_Way]:
    for option in options:
        yield replace(way, waiting=(option, *way.waiting))


def _inside(together: Sequence[dict[str, Any]]) -> Iterator[_Way]:
    """Yield, for each place inside a value that all of `together` describe, the schemas that apply there."""
    all_parts = [_parts(node) for node in together]
    rests = [_rests(node) for node in together]
    for key in dict.fromkeys(key for parts in all_parts for key in parts):
        place = [
            parts[key] if key in parts else {"anyOf": rest[key[0]]}
            for parts, rest in zip(all_parts, rests, strict=True)
            if key in parts or rest.get(key[0])
        ]
        yield _Way(place)


def _parts(node: dict[str, Any]) -> dict[tuple[str, Any], Any]:
    """Return the schemas directly inside a schema: ("property", ...), ("item", index) or ("rest", keyword) -> schema."""
    parts: dict[tuple[str, Any], Any] = {("rest", name): node[name] for name in _OF_SCHEMA if isinstance(node.get(name), dict)}
    for name in ("properties", "patternProperties"):
        parts |= {("property", (name, key)): part for key, part in _dict(node, name).items()}
    for name in ("prefixItems", "items"):
        parts |= {("item", nth): part for nth, part in enumerate(_list(node, name))}
    return parts


def _num_parts(node: dict[str, Any]) -> int:
    num_names = len(_dict(node, "properties")) + len(_dict(node, "patternProperties"))
    num_items = max(len(_list(node, "prefixItems")), len(_list(node, "items")))
    return sum(isinstance(node.get(name), dict) for name in _OF_SCHEMA) + num_names + num_items


def _rests(node: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the schemas of properties and of items that have no schema of their own, such as `additionalProperties`."""
    properties = [*_dict(node, "patternProperties").values(), node.get("additionalProperties")]
    items = [node.get("items"), node.get("additionalItems")]
    return {
        "property": [one for one in properties if isinstance(one, dict) and one],
        "item": [one for one in items if isinstance(one, dict) and one],
    }


def referred(schema: Mapping[str, Any], ref: str) -> Any:
    """Return the part of a schema that a $ref in it names, or None. The $ref may begin with the schema's own $id."""
    own_id = schema.get("$id", schema.get("id"))
    names = _names(ref.removeprefix(own_id) if isinstance(own_id, str) else ref)
    return None if names is None else _at(schema, names)


def _at(schema: Mapping[str, Any], names: Sequence[str]) -> Any:
    node: Any = schema
    for name in names:
        if isinstance(node, list):
            is_index = name.isdecimal() and len(name) < 10 and int(name) < len(node)
            node = node[int(name)] if is_index else None
        else:
            node = node.get(name) if isinstance(node, dict) and (node is schema or not _has_id(node)) else None
    return node


def _names(ref: str) -> list[str] | None:
    """Return the parts of a JSON pointer in a $ref (`#/a/b`, RFC 6901, section 6), or None for another $ref."""
    if not ref.startswith("#") or not (pointer := unquote(ref[1:])).startswith("/"):
        return [] if ref == "#" else None
    return [name.replace("~1", "/").replace("~0", "~") for name in pointer[1:].split("/")]


def fragment(names: Sequence[str]) -> str:
    """Return the $ref to a place in a schema: `#/$defs/x` for ("$defs", "x")."""
    return "#" + "".join("/" + quote(name.replace("~", "~0").replace("/", "~1"), safe="$") for name in names)


def _has_id(node: dict[str, Any]) -> bool:
    """Return whether the schema has an id, which changes where a $ref inside it leads."""
    return isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)


def _list(node: dict[str, Any], name: str) -> list[Any]:
    found = node.get(name)
    return found if isinstance(found, list) else []


def _dict(node: dict[str, Any], name: str) -> dict[str, Any]:
    found = node.get(name)
    return found if isinstance(found, dict) else {}


def _shown_values(node: dict[str, Any], name: str) -> list[str]:
    values = (node[name], *_dict(node, name), *_list(node, name))
    return [shown_pattern(value) for value in values if isinstance(value, str)]


def _walk(value: Any, place: Place = None) -> Iterator[tuple[Any, Place]]:
    waiting = [(value, place)]
    while waiting:
        node, place = waiting.pop()
        yield node, place
        if isinstance(node, dict):
            waiting += [(inside, (place, name)) for name, inside in reversed(node.items())]
        elif isinstance(node, list):
            waiting += [(inside, (place, str(nth))) for nth, inside in reversed(list(enumerate(node)))]


def _place_of(names: Sequence[str], place: Place = None) -> Place:
    for name in names:
        place = (place, name)
    return place


def _sentence(places: Sequence[Place]) -> str:
    shown = [_pointer(place) for place in places[:3]]
    if shown in ([], ["#"]):
        return ""
    more = f" or {len(places) - len(shown)} more" if len(places) > len(shown) else ""
    return f" It stands at {' or '.join(shown)}{more}."


def _pointer(place: Place) -> str:
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(name.replace("~", "~0").replace("/", "~1"))
    text = "/".join(["#", *reversed(names)])
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def _refuse(what: str, place: Place = None) -> NoReturn:
    """Raise `Rejected`. `what` completes the sentence "A json_schema ..." and ends with the remedy."""
    raise wrong(f"A json_schema {what}{_sentence([place])}")
