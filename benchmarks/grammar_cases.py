"""Grammars as people ask for them, each with answers that follow it. For `grammar_masks.py`; measures nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from penstock.text.grammar import Grammar, GrammarKind

_CONTACT: dict[str, Any] = {
    "title": "Contact",
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "full name"},
        "email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "email", "age", "tags"],
    "additionalProperties": False,
}
_CONTACT_ANSWER = {
    "name": "Zoë Grünwald-O'Hara",
    "email": "zoe.gruenwald@example.org",
    "age": 42,
    "tags": ["customer", "since 2019", "prefers letters"],
}

_ORDER: dict[str, Any] = {
    "$defs": {
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string", "minLength": 1, "maxLength": 80},
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                "country": {"enum": ["DE", "FR", "IT", "JP", "US", "GB", "PL", "NL"]},
            },
            "required": ["street", "zip", "country"],
            "additionalProperties": False,
        },
        "line": {
            "type": "object",
            "properties": {
                "sku": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4,8}$"},
                "quantity": {"type": "integer", "minimum": 1, "maximum": 999},
                "unit_price": {"type": "number", "minimum": 0},
                "discount": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
            "required": ["sku", "quantity", "unit_price"],
            "additionalProperties": False,
        },
    },
    "type": "object",
    "properties": {
        "id": {"type": "string", "format": "uuid"},
        "placed_at": {"type": "string", "format": "date-time"},
        "status": {"enum": ["new", "paid", "packed", "shipped", "delivered", "returned"]},
        "ship_to": {"$ref": "#/$defs/address"},
        "bill_to": {"$ref": "#/$defs/address"},
        "lines": {"type": "array", "items": {"$ref": "#/$defs/line"}, "minItems": 1, "maxItems": 50},
        "note": {"type": "string", "maxLength": 500},
    },
    "required": ["id", "placed_at", "status", "ship_to", "bill_to", "lines"],
    "additionalProperties": False,
}
_ORDER_ANSWER = {
    "id": "3f1c8a52-9b7e-4c0d-8a5e-6d2b1f90c7aa",
    "placed_at": "2026-03-09T14:07:31Z",
    "status": "packed",
    "ship_to": {"street": "Lange Straße 12", "zip": "04109", "country": "DE"},
    "bill_to": {"street": "12 rue de la Gare, étage 3", "zip": "75011", "country": "FR"},
    "lines": [
        {"sku": "ABC-00421", "quantity": 3, "unit_price": 19.9, "discount": None},
        {"sku": "XYZ-7781", "quantity": 120, "unit_price": 0.25, "discount": 0.1},
    ],
    "note": "Please ring twice; the bell is the small one, below the letter box on the left.",
}

_SHAPES: dict[str, Any] = {
    "type": "object",
    "properties": {
        "shapes": {
            "type": "array",
            "minItems": 2,
            "items": {
                "oneOf": [
                    {
                        "type": "object",
                        "properties": {"kind": {"const": "circle"}, "radius": {"type": "number", "exclusiveMinimum": 0}},
                        "required": ["kind", "radius"],
                        "additionalProperties": False,
                    },
                    {
                        "type": "object",
                        "properties": {
                            "kind": {"const": "polygon"},
                            "points": {
                                "type": "array",
                                "items": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
                                "minItems": 3,
                            },
                        },
                        "required": ["kind", "points"],
                        "additionalProperties": False,
                    },
                ]
            },
        }
    },
    "required": ["shapes"],
    "additionalProperties": False,
}
_SHAPES_ANSWER = {
    "shapes": [
        {"kind": "circle", "radius": 2.75},
        {"kind": "polygon", "points": [[0, 0], [1.5, -2], [3, 4e2]]},
        {"kind": "circle", "radius": 10},
    ]
}

_TREE: dict[str, Any] = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "label": {"type": "string"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["label"],
        }
    },
    "$ref": "#/$defs/node",
}
_TREE_ANSWER = {
    "label": "animals",
    "children": [
        {"label": "mammals", "children": [{"label": "whales"}, {"label": "bats", "legs": 2, "flies": True}]},
        {"label": "birds", "children": [{"label": "owls"}]},
    ],
}

_CALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tool": {
            "enum": [
                f"{verb}_{noun}" for verb in ("get", "set", "list", "delete") for noun in ("user", "file", "event", "mail")
            ]
        },
        "arguments": {"type": "object", "additionalProperties": {"type": ["string", "number", "boolean", "null"]}},
        "because": {"type": "string", "maxLength": 2000},
    },
    "required": ["tool", "arguments", "because"],
    "additionalProperties": False,
}
_CALL_ANSWER = {
    "tool": "list_event",
    "arguments": {"from": "2026-03-01", "limit": 20, "all": False, "owner": None},
    "because": 'The user asked what is planned for March, and only "list_event" can tell.\nNothing else was asked for. ' * 3,
}


def _wide(num_fields: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Many optional fields, of which the answer has every third."""
    kinds: list[dict[str, Any]] = [{"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"type": "number"}]
    values: list[Any] = ["some words in a field", 1234, True, 0.125]
    names = [f"field_{n}_of_the_form" for n in range(num_fields)]
    properties = {name: kinds[n % 4] for n, name in enumerate(names)}
    answer = {name: values[n % 4] for n, name in enumerate(names) if n % 3 == 0}
    return {"type": "object", "properties": properties, "additionalProperties": False}, answer


_LARK = r"""
start: sum
sum: product | sum /[ ]?[-+][ ]?/ product
product: atom | product /[ ]?[*\/][ ]?/ atom
atom: NUMBER | NAME | NAME "(" [sum (", " sum)*] ")" | "(" sum ")"
NUMBER: /[0-9]+(\.[0-9]+)?/
NAME: /[a-z][a-z_]{0,30}/
"""
_SQL = r"SELECT (\*|[a-z_]+(, [a-z_]+)*) FROM [a-z_]+( WHERE [a-z_]+ (=|<|>|LIKE) ('[^']*'|[0-9]+))?( LIMIT [0-9]+)?;"


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    grammar: Grammar
    answers: tuple[str, ...]


def _schema(name: str, schema: dict[str, Any], answer: Any) -> Case:
    """Its answer as a program would write it, and as people like to read it."""
    grammar = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
    compact, spaced = json.dumps(answer, separators=(",", ":")), json.dumps(answer, ensure_ascii=False)
    return Case(
        name,
        grammar,
        (
            compact if compact.isascii() and "\\u" not in compact else spaced,
            spaced,
            json.dumps(answer, indent=2, ensure_ascii=False),
        ),
    )


CASES = (
    _schema("contact", _CONTACT, _CONTACT_ANSWER),
    _schema("order", _ORDER, _ORDER_ANSWER),
    _schema("shapes", _SHAPES, _SHAPES_ANSWER),
    _schema("tree", _TREE, _TREE_ANSWER),
    _schema("tool call", _CALL, _CALL_ANSWER),
    _schema("60 optional fields", *_wide(60)),
    Case(
        "any object",
        Grammar(GrammarKind.JSON_OBJECT),
        (json.dumps(_ORDER_ANSWER, ensure_ascii=False, indent=2), json.dumps(_TREE_ANSWER)),
    ),
    Case(
        "choice",
        Grammar(GrammarKind.CHOICE, json.dumps(["positive", "negative", "neutral", "cannot tell"])),
        ("positive", "cannot tell"),
    ),
    Case("regex", Grammar(GrammarKind.REGEX, _SQL), ("SELECT name, city FROM people WHERE city LIKE 'San %' LIMIT 25;",)),
    Case(
        "grammar",
        Grammar(GrammarKind.LARK, _LARK),
        ("max(a_1, 2) * (rate + 0.25) / total - min(x, y, 7.125)".replace("_1", "_one"),),
    ),
)
