"""Places in a JSON schema, as JSON pointers (RFC 6901), for error messages. Called by `text.grammar_source`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, TypeAlias
from urllib.parse import unquote

Place: TypeAlias = "tuple[Place, str] | None"
"""The place around it, and a name or an index in that; None: the whole. A pair costs the same at every depth."""

MAX_SHOWN_CHARS = 200
MAX_SHOWN_PLACES = 3


def _refers_to(node: dict[str, Any], url: str) -> bool:
    """Perhaps in a short form."""
    return any(
        str(node.get(name)).split("#")[0].endswith(url.rsplit("/", 1)[-1]) for name in ("$ref", "$schema") if name in node
    )


_Holds = Callable[[dict[str, Any], str], bool]
_HINTS: tuple[tuple[str, _Holds], ...] = (
    (r"The format (\S+) is not", lambda node, said: node.get("format") == said),
    (r'The keywords \["([^"]*)"', lambda node, said: said in node),
    (r"of the patternProperties, /(.*)/ and /", lambda node, said: said in _names(node.get("patternProperties"))),
    (r"Two schemas of a (oneOf)", lambda node, said: said in node),
    (r"for '(\w+)', got", lambda node, said: said in node),
    (r"(look-around|an escape|[Rr]egex)", lambda node, _said: "pattern" in node or "patternProperties" in node),
    (r"A \$ref or \$schema, (\S+), leads", _refers_to),
)
"""Patterns of messages, which name something, and the schemas that it may be about."""


def pointer(place: Place) -> str:
    """Such as `#/properties/a~1b`, and cut after `MAX_SHOWN_CHARS`."""
    names: list[str] = []
    while place is not None:
        place, name = place
        names.append(name.replace("~", "~0").replace("/", "~1"))
    text = "/".join(["#", *reversed(names)])
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


def place_of(ref: str) -> Place:
    """The place that a `$ref` inside the schema names."""
    place: Place = None
    for part in ref.split("/")[1:]:
        place = (place, unquote(part).replace("~1", "/").replace("~0", "~"))
    return place


def told(places: list[Place]) -> str:
    """A sentence to append to a message; empty for the whole schema, and where the place is not known."""
    shown = [pointer(place) for place in places[:MAX_SHOWN_PLACES]]
    if shown in ([], ["#"]):
        return ""
    more = f" or {len(places) - len(shown)} more" if len(places) > len(shown) else ""
    return f" It stands at {' or '.join(shown)}{more}."


def found(source: str, message: str) -> str:
    """As `told`, for a message of llguidance, which names no place: the places of what it does name."""
    if within := re.search(r"while processing json-schema:///(#\S*)", message):
        return told([place_of(within[1].rstrip(".;,"))])
    for pattern, holds in _HINTS:
        if hint := re.search(pattern, message):
            schema = json.loads(source)
            return told([place for place, node in _objects(schema) if holds(node, hint[1])])
    return ""


def _objects(schema: Any) -> list[tuple[Place, dict[str, Any]]]:
    """In the order in which they are written."""
    waiting: list[tuple[Place, Any]] = [(None, schema)]
    objects: list[tuple[Place, dict[str, Any]]] = []
    while waiting:
        place, node = waiting.pop()
        if isinstance(node, dict):
            objects.append((place, node))
            waiting += [((place, name), inside) for name, inside in reversed(node.items())]
        elif isinstance(node, list):
            waiting += [((place, str(nth)), inside) for nth, inside in reversed(list(enumerate(node)))]
    return objects


def _names(value: Any) -> Any:
    return value if isinstance(value, dict) else ()
