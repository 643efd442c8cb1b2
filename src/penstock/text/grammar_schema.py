"""What must not be in a JSON schema that an answer is to follow. Called by `grammar_lark`, before the schema is compiled.

llguidance refuses most of what it does not support; here is what it passes over, and what would take it too long.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from penstock.types.errors import Rejected, RejectReason

MAX_MULTIPLES = 10_000
"""A prime number of five digits takes half a second and 50 MB to compile, one of eight a thousand times as much."""
MAX_INTEGER = 2**53
"""Beyond it llguidance counts in floating point, and past 64 bits it fails: two bounds far below zero end the process."""
LEAST_NUMBER = 1e-15
"""Smaller bounds become regexes of hundreds of brackets."""
MAX_COUNT = 2**32 - 1

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")

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


def check_schema(schema: dict[str, Any]) -> None:
    """Raises `Rejected`. Takes out what asks for nothing, and is not known to llguidance."""
    for node in _nodes(schema):
        if node.get("uniqueItems") is False:
            del node["uniqueItems"]  # which asks for nothing
        if unsupported := sorted(_UNSUPPORTED.intersection(node)):
            raise _rejected(f"does not support {', '.join(unsupported)}. Leave it out, or say the same otherwise.")
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.get(name), bool):
                raise _rejected(f"takes {name} as a number, not as true or false. Give the bound itself.")
    for node in _objects(schema):
        _check_numbers(node)
    if sum(_significant(node.get("multipleOf")) for node in _objects(schema)) > MAX_MULTIPLES:
        what = "is followed where the multipleOf in it, each without its point and the zeros at its end, add up to"
        raise _rejected(f"{what} at most {MAX_MULTIPLES}. Ask for rounder numbers.")


def _check_numbers(node: dict[str, Any]) -> None:
    """Whether what bounds an answer can be followed to the digit."""
    for name in _BOUNDS:
        value = _number(node.get(name))
        if value is None:
            continue
        if name == "multipleOf" and value <= 0:
            raise _rejected(f"takes multipleOf above 0, not {_shown(value)}.")
        if abs(value) > MAX_INTEGER or 0 < abs(value) < LEAST_NUMBER:
            what = f"takes {name} of 0, or from {LEAST_NUMBER} to 2^53 on either side of it, not {_shown(value)}"
            raise _rejected(f"{what}. Leave it out, or give one of fewer digits.")
    for name in _COUNTS:
        value = _number(node.get(name))
        if value is not None and value > MAX_COUNT:
            raise _rejected(f"takes {name} of at most {MAX_COUNT}, not {_shown(value)}. Leave it out.")
    for name in ("const", "enum"):
        for leaf in _leaves(node.get(name)):
            if isinstance(leaf, int) and abs(leaf) > MAX_INTEGER:
                raise _rejected(f"takes integers up to 2^53 in {name}, not {_shown(leaf)}. Ask for it as a string.")


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every schema inside a schema, and itself; not what stands in const, enum, default or examples."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        waiting += [node[name] for name in _OF_SCHEMA if name in node]
        for name in _OF_LIST:
            if isinstance(node.get(name), list):
                waiting += node[name]
        for name in _OF_NAMES:
            if isinstance(node.get(name), dict):
                waiting += node[name].values()


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that may be a schema, wherever it stands: a $ref may point anywhere."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            yield node
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _leaves(value: Any) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
        else:
            yield node


def _number(value: Any) -> int | float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _shown(number: float) -> str:
    return str(number)[:40]


def _significant(number: Any) -> int:
    """The digits of a number as a whole one, without zeros at the end: 12 for 0.0120."""
    if _number(number) is None:
        return 0
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits[:10] or 0)


def _rejected(what: str) -> Rejected:
    return Rejected(RejectReason.INVALID, f"A json_schema {what}")
