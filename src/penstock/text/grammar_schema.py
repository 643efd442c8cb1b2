"""What must not be in a JSON schema that an answer is to follow. Called by `grammar_lark`, before the schema is compiled.

llguidance refuses most of what it does not support; here is what it passes over or gets wrong, what would take it too long,
and what it refuses although it asks for nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from penstock.text.grammar_errors import refused_schema
from penstock.text.grammar_numbers import check_multiples, check_numbers

MAX_SCHEMAS = 10_000
"""Once each $ref with something beside it has become what it names, and all inside that anew for each of them. llguidance
makes them so before it looks at any limit: 15 us and 5 KB each, so that 3 KB of schema can take all memory there is."""

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
    for node, _ in _nodes(schema):
        _check_node(node)
        if node is not schema and (isinstance(node.get("$id"), str) or isinstance(node.get("id"), str)):
            raise refused_schema("does not support $id inside it, only around all of it. Leave it out.")
    does_merge = False
    for num_schemas, (node, merges) in enumerate(_nodes(schema, does_put_together=True), 1):
        does_merge |= merges
        if num_schemas > MAX_SCHEMAS:
            what = f"recurs, or grows to more than {MAX_SCHEMAS} schemas, where a $ref has other keywords beside it"
            raise refused_schema(f"{what}, or a oneOf a discriminator. Leave the $ref alone, and use anyOf instead of oneOf.")
        if merges and "$ref" in node and not isinstance(_named(schema, node["$ref"]), dict | bool):
            raise refused_schema("takes a $ref with other keywords beside it if it is a place, such as #/$defs/x. Give that.")
    check_multiples(schema, are_put_together=does_merge)


def _check_node(node: dict[str, Any]) -> None:
    if unsupported := sorted(_UNSUPPORTED.intersection(node)):
        raise refused_schema(f"does not support {', '.join(unsupported)}. Leave it out, or say the same otherwise.")
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(node.get(name), bool):
            raise refused_schema(f"takes {name} as a number, not as true or false. Give the bound itself.")


def _nodes(schema: dict[str, Any], *, does_put_together: bool = False) -> Iterator[tuple[dict[str, Any], bool]]:
    """Every schema inside a schema, and itself, and whether it is put together with others; not what stands in const, enum,
    default or examples. What a $ref names comes once. With `does_put_together` it comes anew for each that is put together
    with something else, and what nothing names does not come.
    """
    named: set[str] = set()
    waiting: list[tuple[Any, bool]] = [(schema, False)]
    while waiting:
        node, is_part = waiting.pop()
        if not isinstance(node, dict):
            continue
        _take_out_neutral(node)
        merges = does_put_together and (is_part or _num_parts(node) > 1)
        yield node, merges
        ref = node.get("$ref")
        if isinstance(ref, str) and (merges or ref not in named):
            named.add(ref)
            waiting.append((_named(schema, ref), merges))
        waiting += [(node[name], False) for name in _OF_SCHEMA if name in node]
        for name in _OF_LIST:
            if isinstance(node.get(name), list):
                waiting += [(part, merges and name in _OF_CHOICES) for part in node[name]]
        for name in _OF_NAMES[: 2 if does_put_together else None]:
            if isinstance(node.get(name), dict):
                waiting += [(part, False) for part in node[name].values()]


def _take_out_neutral(node: dict[str, Any]) -> None:
    for name in list(node):
        values = _NEUTRAL.get(name, ())
        if name in _SAYS_NOTHING or any(type(node[name]) is type(value) and node[name] == value for value in values):
            del node[name]


def _num_parts(node: dict[str, Any]) -> int:
    """That are put together: what it says itself, what a $ref names, each of an allOf, an anyOf, a oneOf."""
    all_of = node.get("allOf")
    num_own = 1 if node.keys() - _ANNOTATIONS else 0
    num_named = sum(name in node for name in ("$ref", "anyOf", "oneOf"))
    return num_own + num_named + (len(all_of) if isinstance(all_of, list) else 0)


def _named(schema: dict[str, Any], ref: Any) -> Any:
    """What a $ref inside the schema names; None if it names nothing there, or not by its place."""
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        return None
    node: Any = schema
    for part in ref.split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list):
            node = node[int(name)] if name.isdecimal() and int(name) < len(node) else None
        else:
            node = node.get(name) if isinstance(node, dict) else None
    return node
