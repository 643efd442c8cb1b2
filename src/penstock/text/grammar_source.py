"""The grammars that clients ask for, checked and written in the one language that llguidance is given: its variant of Lark.
Called by `text.grammar`.

llguidance refuses most of what it does not support. Here is the rest, mostly of JSON schemas: what it passes over or gets
wrong, what would take it too long, and what it refuses although it asks for nothing. The checks take time in proportion to the
source and to `MAX_SCHEMAS`: they count before they build. Whether a grammar is right as a whole, llguidance says when it
compiles it.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

from penstock.text import gbnf
from penstock.text.schema_places import Place, place_of, told
from penstock.types.errors import GrammarFailure, Rejected, RejectReason

MAX_CAUSE_CHARS = 300

START = "\nstart: "
"""Before a grammar that was not written in Lark, in the Lark that is made of it."""
_OUR_PLACE = "at 2(8): "
"""The place of what stands behind `START`."""
_TOO_LARGE = (
    "Unable to determine|too many (states|expressions|items)|Current row has|fuel|precomputation|panic|too large|too complex"
)
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        f"(?i){_TOO_LARGE}",
        "The grammar becomes too large to follow.",
        "Make it simpler: fewer alternatives and optional fields, shorter repetitions, no rule with two readings.",
    ),
    (r"^Unimplemented keys: (.*)", "The keywords {} are not supported.", "Leave them out, or say the same otherwise."),
    (r"^Unknown format: (.*)", "The format {} is not supported.", "Leave it out, or say it as a pattern."),
    (
        r"look-?around",
        "A regex has look-around or a word boundary, which are not supported.",
        r"Say it without (?=...), (?!...), (?<=...), (?<!...), \b and \B.",
    ),
    (r"unrecognized escape sequence", "A pattern or a regex has an escape that is not known.", r"Write \x03 for \cC."),
    (r"Regex is empty", "No string can have all of a pattern, format and length at once.", "Check what contradicts what."),
    (r"oneOf constraints", "Two schemas of a oneOf might hold at once.", "Use anyOf, or a const that tells them apart."),
    (r"NoExtension", "No answer can follow it.", "Check what contradicts what."),
    (r"doesn't satisfy the grammar", "A token was sampled that it forbids.", ""),
    (
        r"^patternProperty regexes (/.*/ and /.*/) are not disjoint",
        "Two of the patternProperties, {}, may match the same name.",
        "Give patterns that can't, such as ones that begin with ^ and another letter.",
    ),
    (
        r"^Resource '([^']*)' is not present",
        "A $ref or $schema, {}, leads out of the schema, and nothing is fetched.",
        "Put what it names under $defs, and refer to that.",
    ),
    (r"^Unsatisfiable schema: schema is false", "No value follows the schema false.", "Leave it out."),
    (r"^recursion limit exceeded", "It is nested too deeply.", "Use $ref and $defs for what lies further inside."),
)


def failure(message: str) -> GrammarFailure:
    """The failure that a message of `LLMatcher.get_error` describes."""
    cause = _cause(message)
    for pattern, text, remedy in _KNOWN:
        if found := re.search(pattern, cause):
            return GrammarFailure(text.format(*found.groups()), remedy=remedy)
    return GrammarFailure(f"{cause.rstrip('.')}.")


def refusal(name: str, error: GrammarFailure) -> Rejected:
    """`name` is what the client called it."""
    return Rejected(RejectReason.INVALID, f"The {name} can't be followed: {error}")


def refused_schema(what: str, place: Place = None) -> Rejected:
    """The refusal of a schema before it is compiled; `what` says what "a json_schema" does not do, and the remedy."""
    return Rejected(RejectReason.INVALID, f"A json_schema {what}{told([place])}")


def _cause(message: str) -> str:
    """Without what it quotes of the source as a whole, and without the names of llguidance's own steps."""
    text = message.split("\n<", 1)[0]
    lines = [line for line in text.split("\n") if not re.match(r"\s*\d+ \| |\s*\^+\s*$", line)]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    cause = errors[-1] if errors else " ".join(lines)[place.end() if place else 0 :]
    cause = re.sub(r'^(failed to compile JSON schema: |failed to parse "%json": )+', "", cause).strip()[:MAX_CAUSE_CHARS]
    if place is None or place[0] == _OUR_PLACE:
        return cause
    return f"{cause.rstrip('.')} (line {place[1]}, column {place[2]})"


MAX_MULTIPLES = 10_000
"""A prime number of five digits takes half a second and 50 MB to compile, one of eight a thousand times as much."""
MAX_INTEGER = 2**53
"""Beyond it llguidance counts in floating point, and past 64 bits it fails: two bounds far below zero end the process."""
LEAST_NUMBER = 1e-15
"""Smaller bounds become regexes of hundreds of brackets."""
MAX_COUNT = 2**32 - 1

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_LITERALS = ("const", "enum")


def check_numbers(schema: dict[str, Any]) -> None:
    """Each by itself, and exclusive bounds beside others. Raises `Rejected`."""
    for value, place, is_literal in _values(schema):
        if is_literal and isinstance(value, int) and abs(value) > MAX_INTEGER:
            what = f"takes integers up to 2^53 in const and enum, not {_shown(value)}"
            raise refused_schema(f"{what}. Ask for it as a string.", place)
    for node, place in _objects(schema):
        _check_object(node, place)
        if node.get("type") != "integer":
            _check_exclusive(node, place, "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1)
            _check_exclusive(node, place, "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1)


def check_multiples(schema: dict[str, Any], *, are_put_together: bool) -> None:
    """Check the cost of all `multipleOf`; those of schemas that are put together have a common one. Raises `Rejected`."""
    found = [_significant(node.get("multipleOf")) for node, _ in _objects(schema)]
    if max(sum(found), math.prod(set(found) - {0}) if are_put_together else 0) > MAX_MULTIPLES:
        what = f"is followed while all multipleOf, each without its point and the zeros at its end, add up to {MAX_MULTIPLES}"
        raise refused_schema(
            f"{what}, or their product does where allOf, anyOf, oneOf or $ref put some together. Ask for rounder numbers."
        )


def _check_object(node: dict[str, Any], place: Place) -> None:
    """Writes whole counts such as 2.0 as integers, which llguidance wants. Raises `Rejected`."""
    for name in _BOUNDS:
        value = _number(node.get(name))
        if value is None:
            continue
        if name == "multipleOf" and value <= 0:
            raise refused_schema(f"takes multipleOf above 0, not {_shown(value)}. Leave it out.", place)
        if abs(value) > MAX_INTEGER or 0 < abs(value) < LEAST_NUMBER:
            what = f"takes {name} of 0, or from {LEAST_NUMBER} to 2^53 on either side of it, not {_shown(value)}"
            raise refused_schema(f"{what}. Leave it out, or give one of fewer digits.", place)
    for name in _COUNTS:
        value = _number(node.get(name))
        if value is not None and value > MAX_COUNT:
            raise refused_schema(f"takes {name} of at most {MAX_COUNT}, not {_shown(value)}. Leave it out.", place)
        if isinstance(value, float) and value.is_integer():
            node[name] = int(value)


def _check_exclusive(node: dict[str, Any], place: Place, name: str, others: tuple[str, str], sign: int) -> None:
    """llguidance takes the bound itself for allowed if it is a whole number, and the other lies before the next one."""
    bound = _number(node.get(name))
    for other in others:
        end = _number(node.get(other))
        if bound is not None and end is not None and float(bound).is_integer() and 0 < sign * (end - bound) < 1:
            inclusive = name.replace("exclusiveM", "m")
            raise refused_schema(
                f"does not support {name} {bound} beside {other} {end}. Give {inclusive}, such as {bound + sign * 1e-6}.",
                place,
            )


def _objects(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Place]]:
    """All that may be a schema, wherever it stands: a $ref may point anywhere."""
    return ((node, place) for node, place, _ in _values(schema) if isinstance(node, dict))


def _values(value: Any) -> Iterator[tuple[Any, Place, bool]]:
    """Itself, and all that is inside, once, with its place; whether it stands in a const or an enum."""
    waiting: list[tuple[Any, Place, bool]] = [(value, None, False)]
    while waiting:
        node, place, is_literal = waiting.pop()
        yield node, place, is_literal
        if isinstance(node, dict):
            waiting += [(inside, (place, name), is_literal or name in _LITERALS) for name, inside in node.items()]
        elif isinstance(node, list):
            waiting += [(inside, (place, str(nth)), is_literal) for nth, inside in enumerate(node)]


def _significant(value: Any) -> int:
    """The digits of a number as a whole one, without zeros at the end: 12 for 0.0120."""
    number = _number(value)
    if number is None:
        return 0
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits[:10] or 0)


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shown(number: float) -> str:
    return str(number)[:40]


MAX_SCHEMAS = 2_000
"""Counted as llguidance makes them: anew in each place, and for each choice of the others that one is put together with. It
does that before it looks at any limit, so that 3 KB of schema can take a minute, or all memory there is."""
_PATTERN_SCHEMAS = 5
"""The count of a string with a pattern or a format, as it is compiled by itself to see whether it is empty."""
_NO_STRINGS = ("integer", "number", "boolean", "null", "array", "object")
MAX_PATTERNS_TOGETHER = 6
"""That one string has to match. Each may double time and memory: 20 take 4 s and 250 MB, and no limit counts them."""
MAX_NAME_PATTERNS = 32
"""Different ones of `patternProperties`. llguidance compares each with each: 100 take 0.1 s, 1,000 take minutes."""
_MAX_INDEX_DIGITS = 9
"""Digits of an item's index that a $ref names. No list is as long, and Python reads no number of thousands of digits."""

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
"""Keywords that may stand beside a $ref and leave it alone: nothing is asked for, or what is has a part of its own."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "exclusiveMinimum": (False,),
    "exclusiveMaximum": (False,),
}
"""Values that ask for nothing: some generators write them, and llguidance refuses them."""
_SAYS_NOTHING = frozenset({"deprecated", "nullable", "example", "externalDocs", "xml"})
"""They ask for nothing either; llguidance would put them together with a $ref beside them, which it can't where that recurs."""


def prepare_schema(schema: dict[str, Any], count: SchemaCount | None = None) -> None:
    """Takes what asks for nothing out of it. `count` has the schemas before it in the same grammar. Raises `Rejected`."""
    check_numbers(schema)
    name_patterns: set[str] = set()
    for node, place in _nodes(schema):
        _check_node(node, place)
        name_patterns |= _dict(node, "patternProperties").keys()
        if node is not schema and (isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)):
            raise refused_schema("does not support $id inside it, only around all of it. Leave it out.", place)
    if len(name_patterns) > MAX_NAME_PATTERNS:
        what = f"has {len(name_patterns)} different patterns in patternProperties, and at most {MAX_NAME_PATTERNS} are taken"
        raise refused_schema(f"{what}. Put some together as one pattern.")
    count = count or SchemaCount()
    does_merge = False
    for node, merges, num_patterns in _made(schema, count):
        does_merge |= merges
        if _has_pattern(node):
            count.add(_PATTERN_SCHEMAS - 1)
            if num_patterns >= MAX_PATTERNS_TOGETHER:
                what = f"puts more than {MAX_PATTERNS_TOGETHER} patterns and formats together for one string"
                raise refused_schema(f"{what}. Say them as one pattern.")
    check_multiples(schema, are_put_together=does_merge)


class SchemaCount:
    """Count of the schemas that llguidance makes: those that `_made` has yielded, and those that it is still to yield."""

    def __init__(self) -> None:
        self._num_schemas = 0

    def add(self, num_schemas: int) -> None:
        """To be called before that many are built. Raises `Rejected`."""
        self._num_schemas += num_schemas
        if self._num_schemas > MAX_SCHEMAS:
            what = f"recurs, or grows to more than {MAX_SCHEMAS} schemas, where a $ref has other keywords beside it"
            why = f"an allOf has several anyOf, or it is as large itself (a pattern or a format counts as {_PATTERN_SCHEMAS})"
            raise refused_schema(f"{what}, or {why}. Leave the $ref alone, use anyOf alone, and ask for less at once.")


def _check_node(node: dict[str, Any], place: Place) -> None:
    if unsupported := sorted(_UNSUPPORTED.intersection(node)):
        raise refused_schema(f"does not support {', '.join(unsupported)}. Leave it out, or say the same otherwise.", place)
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            raise refused_schema(f"takes {name} as a number, not as true or false. Give the bound itself.", place)


def _nodes(schema: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Place]]:
    """Every schema inside a schema, and itself, once, with its place; not what stands in const, enum, default or examples."""
    named: set[str] = set()
    seen_ids: set[int] = set()
    """A place has many spellings, such as #/a and #/%61, so that the names alone do not tell what came before."""
    waiting: list[tuple[Any, Place]] = [(schema, None)]
    while waiting:
        node, place = waiting.pop()
        if not isinstance(node, dict) or id(node) in seen_ids:
            continue
        seen_ids.add(id(node))
        _take_out_neutral(node)
        yield node, place
        _spell_format(node)
        ref = node.get("$ref")
        if isinstance(ref, str) and ref not in named:
            named.add(ref)
            waiting.append((_named(schema, ref), place_of(ref)))
        waiting += [(node[name], (place, name)) for name in _OF_SCHEMA if name in node]
        for name in _OF_LIST:
            waiting += [(inside, ((place, name), str(nth))) for nth, inside in enumerate(_list(node, name))]
        for name in _OF_NAMES:
            waiting += [(inside, ((place, name), key)) for key, inside in _dict(node, name).items()]


def _has_pattern(node: dict[str, Any]) -> bool:
    """Has it a pattern or a format, which count for strings alone? Beside another type alone they ask for nothing, such as the
    format int32."""
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


def _made(schema: dict[str, Any], count: SchemaCount) -> Iterator[tuple[dict[str, Any], bool, int]]:
    """Every schema that llguidance makes, for each place and each choice anew; whether it is put together with others, and
    how many of those that came before it have a pattern or a format.

    The target of a $ref comes once if the $ref is alone in its place. Counts each when it begins to wait: all that wait are
    made, so that what is too large, or recurs without end, is refused before it is built. Raises `Rejected`.
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


def _inside(together: Sequence[dict[str, Any]], count: SchemaCount) -> list[list[Any]]:
    """The places in schemas that are put together, each with what they say of it."""
    count.add(sum(map(_num_places, together)))
    places: dict[Any, list[Any]] = {}
    for node in together:
        for key, part in _parts(node).items():
            places.setdefault(key, []).append(part)
    if len(together) == 1:
        return list(places.values())
    for node in together:
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


_DAY = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FORMAT_PATTERNS = {"date": f"^{_DAY}$", "time": f"^{_TIME}$", "date-time": f"^{_DAY}[Tt]{_TIME}$"}
"""Those of RFC 3339, without leap seconds. llguidance would take 29 February in every year, and 60 seconds in every minute."""


def _spell_format(node: dict[str, Any]) -> None:
    pattern = _FORMAT_PATTERNS.get(node["format"]) if isinstance(node.get("format"), str) else None
    if pattern is None:
        return
    del node["format"]
    if "pattern" not in node:
        node["pattern"] = pattern
    elif isinstance(node.get("allOf", []), list):  # else llguidance refuses it
        node["allOf"] = [*node.get("allOf", []), {"pattern": pattern}]


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
    """The schema that a $ref names inside the whole; None if it names nothing there, or not by its place. Takes time with its
    length."""
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


WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,16}"
"""Between two tokens of JSON, at most once: what pretty printers write. Small models would write spaces without end."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\\.')
"""Strings, regexes and comments of Lark. A backslash elsewhere is an error that llguidance finds; it is here so that the quotes
after it, in a string without an end, do not begin one string each: that would take the square of the length."""
_UNSUPPORTED_LARK = (
    (re.compile(r"<[^<>\s]*>"), "names special tokens, which no answer may have"),
    (
        re.compile(r"\[[^\[\]]*\b(?:temperature|max_tokens|stop)\b"),
        "sets temperature, max_tokens or stop for a rule, which is not supported",
    ),
    (re.compile(r"%json\b"), "has a JSON schema inside, which is not supported"),
)

_OF_SETS = re.compile(r"&|~(?!\s*[0-9])")
"""Intersections and complements; a number after ~ is one of repetitions."""
MAX_SET_OPERATORS = 8
"""Each further one may double or triple time and memory: 14 take 0.05 s, 18 take 1 s, and no limit counts them."""

_JSON_OPTIONS = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_pattern": WHITESPACE,
    "coerce_one_of": False,
    "lenient": False,
}


def of_schema(source: str) -> str:
    """From the text of a JSON schema. Raises `Rejected`."""
    schema = _parsed(source, "json_schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise _rejected('The json_schema must be a JSON object. Give a schema such as {"type": "object"}.')
    prepare_schema(schema)
    return f"{START}%json {_json(schema)}\n"


def json_of(schema: dict[str, Any], count: SchemaCount) -> str:
    """A schema as it stands behind `%json` in Lark. Raises `Rejected`."""
    prepare_schema(schema, count)
    return _json(schema)


def of_json_object(source: str) -> str:
    """Any JSON object; `source` is empty. Raises `Rejected`."""
    if source:
        raise _rejected("A json_object takes no description. Use json_schema to describe it.")
    return f"{START}%json {_json({'type': 'object'})}\n"


def of_regex(source: str) -> str:
    """From a regex that the whole answer matches."""
    from llguidance import regex_to_lark

    return f"{START}/{regex_to_lark(source, '')}/\n"


def of_choices(source: str) -> str:
    """From a JSON array of strings, one of which is the answer. Raises `Rejected`."""
    choices = _parsed(source, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise _rejected("The choice must be a list of at least one string, none of them empty.")
    return of_regex("|".join(re.escape(choice) for choice in dict.fromkeys(choices)))


def of_grammar(source: str) -> str:
    """From Lark, or from GBNF where rules are written with `::=`. Raises `Rejected`."""
    return of_gbnf(source) if gbnf.is_gbnf(source) else of_lark(source)


def how_read(source: str) -> str:
    """A sentence that says as what `of_grammar` reads a grammar, and how to say otherwise."""
    as_what, otherwise = ("GBNF, as a rule has ::=", "lark") if gbnf.is_gbnf(source) else ("Lark, as no rule has ::=", "gbnf")
    return f"It was read as {as_what}; if it is the other, say 'grammar_syntax': '{otherwise}'."


def of_gbnf(source: str) -> str:
    """From GBNF. Raises `Rejected`."""
    return gbnf.to_lark(source)


def of_lark(source: str) -> str:
    """From Lark, as llguidance reads it. Raises `Rejected`."""
    rules = _LITERAL.sub("", source)
    for pattern, what in _UNSUPPORTED_LARK:
        if pattern.search(rules):
            raise _rejected(f"The grammar {what}. Leave that out.")
    if (num_operators := len(_OF_SETS.findall(rules))) > MAX_SET_OPERATORS:
        what = f"has {num_operators} operators & and ~, and at most {MAX_SET_OPERATORS} are taken"
        raise _rejected(f"The grammar {what}. Say the same with alternatives.")
    return source


def _json(schema: dict[str, Any]) -> str:
    return json.dumps(schema | {"x-guidance": _JSON_OPTIONS})


def _parsed(source: str, name: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _rejected(f"The {name} is not JSON: {error}.") from error


def _rejected(detail: str) -> Rejected:
    return Rejected(RejectReason.INVALID, detail)
