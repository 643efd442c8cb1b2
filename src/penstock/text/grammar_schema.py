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
    """Raises `Rejected`."""
    for node in _nodes(schema):
        if unsupported := sorted(_UNSUPPORTED.intersection(node)):
            raise _rejected(f"does not support {', '.join(unsupported)}. Leave it out, or say the same otherwise.")
        for name in ("exclusiveMinimum", "exclusiveMaximum"):
            if isinstance(node.get(name), bool):
                raise _rejected(f"takes {name} as a number, not as true or false. Give the bound itself.")
    if _multiples(schema) > MAX_MULTIPLES:
        what = f"follows multipleOf while its significant digits add up to at most {MAX_MULTIPLES}, over all of the schema"
        raise _rejected(f"{what}. Ask for rounder numbers.")


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


def _multiples(schema: dict[str, Any]) -> int:
    """What all of them cost, wherever they stand: a $ref may point anywhere."""
    total = 0
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            total += _significant(node.get("multipleOf"))
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node
    return total


def _significant(number: Any) -> int:
    """The digits of a number as a whole one, without zeros at the end: 12 for 0.0120."""
    if isinstance(number, bool) or not isinstance(number, int | float):
        return 0
    digits = "".join(map(str, Decimal(str(number)).as_tuple().digits)).rstrip("0")
    return int(digits[:10] or 0)


def _rejected(what: str) -> Rejected:
    return Rejected(RejectReason.INVALID, f"A json_schema {what}")
