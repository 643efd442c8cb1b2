"""Arguments of calls that are written as tagged parameters, such as `<parameter=city>Rome</parameter>`, and not as JSON.

Tags contain strings as they are and other values as JSON, so reading them requires the types that a tool's schema allows.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, AnyStr, NoReturn

from penstock.text import json_schema

ANY_TYPE = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
"""Types of JSON schemas."""
_MAX_DEPTH = 32
_NAMES: Mapping[type, str] = {
    list: "array",
    bool: "boolean",
    int: "integer",
    type(None): "null",
    float: "number",
    dict: "object",
    str: "string",
}
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
_IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
Types = Mapping[str, frozenset[str]]
"""A parameter's name -> its types."""


@dataclass(frozen=True)
class Tags:
    """The text of one parameter, with placeholders KEY and VALUE. White space outside the value matches any amount."""

    text: str

    @cached_property
    def before(self) -> str:
        return self.text.partition("KEY")[0]

    @cached_property
    def between(self) -> str:
        """The text between key and value, without the line break before the value."""
        return self.text.partition("KEY")[2].partition("VALUE")[0].rstrip("\n")

    @cached_property
    def close(self) -> str:
        """The mark that ends a value."""
        return self.text.partition("VALUE")[2].strip()

    @cached_property
    def has_lines(self) -> bool:
        """A line break before a value, and one after it, are not part of it."""
        return "VALUE\n" in self.text

    def written(self, arguments: Mapping[str, Any]) -> str:
        before, _, rest = self.text.partition("KEY")
        between, _, after = rest.partition("VALUE")
        texts = {key: value if isinstance(value, str) else json_text(value) for key, value in arguments.items()}
        return "".join(f"{before}{key}{between}{text}{after}" for key, text in texts.items())


def types_of(schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema allows: "number" comes with "integer". `root` has the definitions to which it refers.

    `known` caches their types for this root: definitions that refer to others twice would take exponential time.
    """
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return ANY_TYPE
    allowed = ANY_TYPE
    told = schema.get("type")
    if isinstance(told, str | list):
        allowed &= _with_integers({told} if isinstance(told, str) else {name for name in told if isinstance(name, str)})
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        allowed &= _with_integers({_NAMES.get(type(value), "") for value in values})
    if isinstance(ref := schema.get("$ref"), str):
        if ref not in known:
            known[ref] = ANY_TYPE  # for recursive definitions
            known[ref] = types_of(json_schema.referred(root, ref), root, known, depth + 1)
        allowed &= known[ref]
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            allowed &= frozenset().union(*(types_of(option, root, known, depth + 1) for option in options))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        allowed &= types_of(part, root, known, depth + 1)
    return allowed


def _with_integers(types: set[str]) -> set[str]:
    return types | {"integer"} if "number" in types else types


def parameter_types(schema: Mapping[str, Any] | None) -> Types:
    """Return the types of the parameters that the schema of a tool's arguments names."""
    properties = (schema or {}).get("properties")
    if schema is None or not isinstance(properties, dict):
        return {}
    known: dict[str, frozenset[str]] = {}
    return {name: types_of(part, schema, known) for name, part in properties.items()}


def as_json(text: str, types: frozenset[str]) -> str:
    """Return a value's JSON text: a string, unless the text is JSON of another type that is allowed."""
    if types != {"string"}:
        bare = _OF_PYTHON.get(text.strip(), text.strip())
        try:
            found = _NAMES[type(json.loads(bare, parse_constant=_refuse))]
        except (ValueError, RecursionError):
            found = ""
        if found and ("string" not in types or (found != "string" and found in types)):
            return bare
    return json_text(text)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def json_text(value: Any) -> str:
    """Return a value as JSON for a prompt or an answer: on one line, not limited to ASCII."""
    return json.dumps(value, ensure_ascii=False)


class ParameterReader:
    """Converts tagged parameters, whose text arrives in pieces, to a JSON object. Strings are emitted as they arrive."""

    def __init__(self, tags: Tags, end: str, types: Types) -> None:
        """`end`: the mark after the last parameter."""
        self._tags = tags
        self._end = end
        self._types = types
        self._num_keys = 0
        self._of_value = ANY_TYPE
        self._num_searched = 0
        """Characters of a JSON value that need not be read again."""
        self._is_in_string = False
        """Those characters end inside a string."""
        self._is_in_value = self._is_at_start = False
        self.is_closed = False
        self.is_wrong = False
        """Neither a parameter nor the end came next."""

    def begins(self, text: str) -> bool | None:
        """Return whether a parameter or the end begins the text, or None if more text is needed."""
        found = [match_literal(text.lstrip(), mark) for mark in (self._tags.before, self._end)]
        return True if any(num is not None and num >= 0 for num in found) else None if None in found else False

    def push(self, text: str) -> tuple[int, str]:
        """Return how many characters of the text were read, and the piece of JSON that they make.

        Pass the rest again, with more text appended.
        """
        at, pieces = 0, list[str]()
        while not (self.is_closed or self.is_wrong):
            num, piece = self._read_value(text[at:]) if self._is_in_value else self._read_key(text[at:])
            at += num
            pieces.append(piece)
            if not num:
                break
        return at, "".join(pieces)

    def _read_key(self, text: str) -> tuple[int, str]:
        blank = len(text) - len(text.lstrip())
        ended = match_literal(text[blank:], self._end)
        if ended is not None and ended >= 0:
            self.is_closed = True
            return blank + ended, "}" if self._num_keys else "{}"
        begun = match_literal(text[blank:], self._tags.before)
        if begun is None or begun < 0:
            self.is_wrong = begun is not None and ended is not None
            return 0, ""
        first = blank + begun
        last = text.find(self._tags.between.split()[0], first)
        num = None if last < 0 else match_literal(text[last:], self._tags.between)
        if num is None or num < 0:
            self.is_wrong = num is not None
            return 0, ""
        key = text[first:last]
        self._num_keys += 1
        self._is_in_value = self._is_at_start = True
        self._num_searched, self._is_in_string = 0, False
        self._of_value = self._types.get(key, ANY_TYPE)
        quote = '"' if self._of_value == {"string"} else ""
        return last + num, f"{', ' if self._num_keys > 1 else '{'}{json_text(key)}: {quote}"

    def _read_value(self, text: str) -> tuple[int, str]:
        is_string, close, has_lines = self._of_value == {"string"}, self._tags.close, self._tags.has_lines
        first = int(has_lines and self._is_at_start and text.startswith("\n"))
        end = self._find(text, close)
        if end >= 0:
            self._is_in_value = False
            value = text[first:end].removesuffix("\n") if has_lines else text[:end]
            return end + len(close), f"{json_text(value)[1:]}" if is_string else as_json(value, self._of_value)
        if not is_string or not text:
            return 0, ""
        last = len(text) - held_back(text, (f"\n{close}" if has_lines else close, close))
        if last <= first:
            return 0, ""
        self._is_at_start = False
        return last, json_text(text[first:last])[1:-1]

    def _find(self, text: str, close: str) -> int:
        """Return where a value ends, or -1. Texts end at the first mark, and JSON at the first outside of its strings."""
        if self._of_value == {"string"}:  # its text is not passed again
            return text.find(close)
        num_seen = len(text) - len(close) + 1  # a mark that is not found begins behind these
        if "string" in self._of_value:
            end = text.find(close, self._num_searched)
            self._num_searched = max(self._num_searched, num_seen)
            return end
        while True:
            if self._is_in_string:
                self._num_searched = _IN_STRING.match(text, self._num_searched).end()  # type: ignore[union-attr]
                if not text.startswith('"', self._num_searched):
                    return -1
                self._num_searched += 1
            quote = text.find('"', self._num_searched)
            end = text.find(close, self._num_searched, len(text) if quote < 0 else quote)
            self._is_in_string = quote >= 0 > end
            if not self._is_in_string:
                self._num_searched = max(self._num_searched, num_seen)
                return end
            self._num_searched = quote + 1


def match_literal(text: str, literal: str) -> int | None:
    """Return how many characters at the start of the text match the literal, whose white space matches any or none.

    Return None if more text is needed, -1 if the text does not match.
    """
    at = 0
    for char in literal:
        if char.isspace():
            at = len(text) - len(text[at:].lstrip())  # a loop in Python takes long for a model that writes only spaces
        elif at == len(text):
            return None
        elif text[at] == char:
            at += 1
        else:
            return -1
    return at


def held_back(text: AnyStr, marks: Sequence[AnyStr]) -> int:
    """Return how many characters at the end of the text may begin a mark: 3 for "a<th" if a mark is "<think>"."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((num for num in range(longest, 0, -1) if any(mark.startswith(text[-num:]) for mark in marks)), 0)
