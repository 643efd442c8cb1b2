"""Which numbers may bound an answer to a JSON schema: those that are followed to the digit. Called by `grammar_schema`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.types.errors import Rejected, RejectReason

MAX_INTEGER = 2**53
"""Beyond it llguidance counts in floating point, and past 64 bits it fails: two bounds far below zero end the process."""
LEAST_NUMBER = 1e-15
"""Smaller bounds become regexes of hundreds of brackets."""
MAX_COUNT = 2**32 - 1

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_COUNTS = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")


def check_numbers(schema: dict[str, Any]) -> None:
    """Wherever they stand, as a $ref may point anywhere. Raises `Rejected`."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            _check_object(node)
            waiting += node.values()
        elif isinstance(node, list):
            waiting += node


def _check_object(node: dict[str, Any]) -> None:
    for name in _BOUNDS:
        value = _number(node.get(name))
        if value is None:
            continue
        if name == "multipleOf" and value <= 0:
            raise _rejected(f"takes multipleOf above 0, not {_shown(value)}. Leave it out.")
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


def _rejected(what: str) -> Rejected:
    return Rejected(RejectReason.INVALID, f"A json_schema {what}")
