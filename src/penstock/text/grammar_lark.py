r"""What clients ask for in the one language that llguidance is given here: its variant of Lark. Called by `text.grammar`.

Checks what llguidance would pass over; whether a grammar is right as a whole, llguidance says when it compiles it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.text.grammar_schema import prepare_schema
from penstock.types.errors import Rejected, RejectReason

WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,16}"
"""Between two tokens of JSON, at most once: what pretty printers write. Small models would write spaces without end."""

_OPTIONS = '%llguidance {"no_forcing": true}\n'
"""The model chooses how text that is certain is cut into tokens, as it does everywhere else."""

_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\\.')
"""Strings, regexes and comments of Lark. A backslash elsewhere is an error that llguidance finds; it is here so that the quotes
after it, in a string without an end, do not begin one string each: that would take the square of the length."""
_UNSUPPORTED = (
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
    return _json(schema)


def of_json_object(source: str) -> str:
    """Any JSON object; `source` is empty. Raises `Rejected`."""
    if source:
        raise _rejected("A json_object takes no description. Use json_schema to describe it.")
    return _json({"type": "object"})


def of_regex(source: str) -> str:
    """From a regex that the whole answer matches."""
    from llguidance import regex_to_lark

    return f"{_OPTIONS}start: /{regex_to_lark(source, '')}/\n"


def of_choices(source: str) -> str:
    """From a JSON array of strings, one of which is the answer. Raises `Rejected`."""
    choices = _parsed(source, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise _rejected("The choice must be a list of at least one string, none of them empty.")
    return of_regex("|".join(re.escape(choice) for choice in dict.fromkeys(choices)))


def of_lark(source: str) -> str:
    """From Lark, as llguidance reads it. Raises `Rejected`."""
    rules = _LITERAL.sub("", source)
    for pattern, what in _UNSUPPORTED:
        if pattern.search(rules):
            raise _rejected(f"The grammar {what}. Leave that out.")
    if (num_operators := len(_OF_SETS.findall(rules))) > MAX_SET_OPERATORS:
        what = f"has {num_operators} operators & and ~, and at most {MAX_SET_OPERATORS} are taken"
        raise _rejected(f"The grammar {what}. Say the same with alternatives.")
    return f"{source}\n{_OPTIONS}"


def _json(schema: dict[str, Any]) -> str:
    return f"{_OPTIONS}start: %json {json.dumps(schema | {'x-guidance': _JSON_OPTIONS})}\n"


def _parsed(source: str, name: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise _rejected(f"The {name} is not JSON: {error}.") from error


def _rejected(detail: str) -> Rejected:
    return Rejected(RejectReason.INVALID, detail)
