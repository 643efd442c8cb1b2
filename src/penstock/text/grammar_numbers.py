"""Which numbers may bound an answer to a JSON schema: those that are followed to the digit, and in time. Called by
`grammar_schema`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from penstock.text.grammar_errors import refused_schema

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
    for value, is_literal in _values(schema):
        if is_literal and isinstance(value, int) and abs(value) > MAX_INTEGER:
            raise refused_schema(f"takes integers up to 2^53 in const and enum, not {_shown(value)}. Ask for it as a string.")
    for node in _objects(schema):
        _check_object(node)
        if node.get("type") != "integer":
            _check_exclusive(node, "exclusiveMinimum", ("maximum", "exclusiveMaximum"), 1)
            _check_exclusive(node, "exclusiveMaximum", ("minimum", "exclusiveMinimum"), -1)


def check_multiples(schema: dict[str, Any], *, are_put_together: bool) -> None:
    """What all `multipleOf` cost; those of schemas that are put together have a common one. Raises `Rejected`."""
    found = [_significant(node.get("multipleOf")) for node in _objects(schema)]
    if max(sum(found), math.prod(set(found) - {0}) if are_put_together else 0) > MAX_MULTIPLES:
        what = f"is followed while all multipleOf, each without its point and the zeros at its end, add up to {MAX_MULTIPLES}"
        raise refused_schema(
            f"{what}, or their product does where allOf, anyOf, oneOf or $ref put some together. Ask for rounder numbers."
        )


def _check_object(node: dict[str, Any]) -> None:
    for name in _BOUNDS:
        value = _number(node.get(name))
        if value is None:
            continue
        if name == "multipleOf" and value <= 0:
            raise refused_schema(f"takes multipleOf above 0, not {_shown(value)}. Leave it out.")
        if abs(value) > MAX_INTEGER or 0 < abs(value) < LEAST_NUMBER:
            what = f"takes {name} of 0, or from {LEAST_NUMBER} to 2^53 on either side of it, not {_shown(value)}"
            raise refused_schema(f"{what}. Leave it out, or give one of fewer digits.")
    for name in _COUNTS:
        value = _number(node.get(name))
        if value is not None and value > MAX_COUNT:
            raise refused_schema(f"takes {name} of at most {MAX_COUNT}, not {_shown(value)}. Leave it out.")


def _check_exclusive(node: dict[str, Any], name: str, others: tuple[str, str], sign: int) -> None:
    """llguidance takes the bound itself for allowed if it is a whole number, and the other lies before the next one."""
    bound = _number(node.get(name))
    for other in others:
        end = _number(node.get(other))
        if bound is not None and end is not None and float(bound).is_integer() and 0 < sign * (end - bound) < 1:
            inclusive = name.replace("exclusiveM", "m")
            raise refused_schema(
                f"does not support {name} {bound} beside {other} {end}. Give {inclusive}, such as {bound + sign * 1e-6}."
            )


def _objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All that may be a schema, wherever it stands: a $ref may point anywhere."""
    return (node for node, _ in _values(schema) if isinstance(node, dict))


def _values(value: Any) -> Iterator[tuple[Any, bool]]:
    """Itself, and all that is inside, once; whether it stands in a const or an enum."""
    waiting = [(value, False)]
    while waiting:
        node, is_literal = waiting.pop()
        yield node, is_literal
        if isinstance(node, dict):
            waiting += [(inside, is_literal or name in _LITERALS) for name, inside in node.items()]
        elif isinstance(node, list):
            waiting += [(inside, is_literal) for inside in node]


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
