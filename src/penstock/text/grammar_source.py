"""Translates the grammars of clients into llguidance's notation (Lark), and llguidance's error messages into ours.

llguidance checks grammars when it compiles them. This module refuses the parts that llguidance would ignore.
"""

from __future__ import annotations

import json
import re
from typing import Any

from penstock.text import gbnf, json_schema
from penstock.types.errors import GrammarFailure, Rejected, wrong

START = "\nstart: "
"""The beginning of Lark that Penstock writes, as opposed to Lark of the client."""
_OUR_PLACE = "at 2(8): "
"""The position that llguidance reports for an error right after `START`."""
_TOO_LARGE = (
    "Unable to determine|too many (states|expressions|items)|Current row has|fuel|precomputation|panic|too large|too complex"
)
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        f"(?i){_TOO_LARGE}",
        "The grammar becomes too large to follow.",
        "Make it simpler: fewer alternatives and optional fields, shorter repetitions, no ambiguous rules.",
    ),
    (r"^Unimplemented keys: (.*)", "The keywords {} are not supported.", "Leave them out, or express it differently."),
    (r"^Unknown format: (.*)", "The format {} is not supported.", "Leave it out, or write it as a pattern."),
    (
        r"look-?around",
        "A regex has look-around or a word boundary, which are not supported.",
        r"Say it without (?=...), (?!...), (?<=...), (?<!...), \b and \B.",
    ),
    (
        r"unrecognized escape sequence(.*)",
        "A pattern or a regex has an escape that is not known{}.",
        r"Write $ for \Z, and \x03 for \cC.",
    ),
    (
        r"Regex is empty",
        "No string can have all of a pattern, format and length at once.",
        "Check which parts contradict each other.",
    ),
    (r"oneOf constraints", "Two schemas of a oneOf might hold at once.", "Use anyOf, or a const that tells them apart."),
    (r"NoExtension", "No answer can follow it.", "Check which parts contradict each other."),
    (r"doesn't satisfy the grammar", "A token was sampled that it forbids.", ""),
    (
        r"^patternProperty regexes (/.*/ and /.*/) are not disjoint",
        "Two of the patternProperties, {}, may match the same name.",
        "Give patterns that can't, such as ones that begin with ^ and another letter.",
    ),
    (
        r"^Resource '([^']*)' is not present",
        "The $schema {} is not known, and nothing is fetched.",
        "Leave it out.",
    ),
    (r"^Unsatisfiable schema: schema is false", "No value follows the schema false.", "Leave it out."),
    (
        r"^Unsatisfiable schema: (?:anyOf|oneOf) is empty",
        "A type, enum, anyOf or oneOf is empty.",
        "Name a value, or leave it out.",
    ),
    (r"^Unsatisfiable schema: (.*)", "No value follows it: {}.", "Check which parts contradict each other."),
    (
        r"^Invalid type: ?(.*)",
        "The type {!r} is not known.",
        "Use string, number, integer, boolean, null, object or array.",
    ),
    (r"^schema must be an object", "A schema in it is not an object.", 'Write {"type": "string"}, not "string".'),
    (r"^recursion limit exceeded", "It is nested too deeply.", "Use $ref and $defs for what lies further inside."),
)


def failure(message: str) -> GrammarFailure:
    """Return llguidance's error message (`LLMatcher.get_error`) in our words, with a remedy."""
    text = message.split("\n<", 1)[0]  # without the quoted grammar
    lines = [line for line in text.split("\n") if not re.match(r"\s*\d+ \| |\s*\^+\s*$|\s*while processing json-schema:", line)]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    cause = errors[-1] if errors else " ".join(lines)[place.end() if place else 0 :]
    cause = re.sub(r'^(failed to compile JSON schema: |failed to parse "%json": )+', "", cause).strip()[:300]
    if escape := re.search(r"\n    (.*)\n    ( *)\^+\nerror: unrecognized escape", text):
        cause += f": {escape[1][len(escape[2]) :][:2]}"
    for known, words, remedy in _KNOWN:
        if found := re.search(known, cause):
            told, hint = words.format(*found.groups()), remedy
            break
    else:
        if pattern := re.search(r"JSON schema: regex parse error:\n    (.*)\n", text):
            cause = f"The pattern /{json_schema.shown_pattern(pattern[1])}/ is wrong: {cause}"
        where = "" if place is None or place[0] == _OUR_PLACE else f" (line {place[1]}, column {place[2]})"
        told, hint = f"{cause.rstrip('.')}{where}.", ""
    return GrammarFailure(told, remedy=f"{hint}{json_schema.place_told(text, told)}".strip())


def refusal(name: str, error: GrammarFailure) -> Rejected:
    """Return the error for a grammar that can't be followed. `name`: the kind of grammar, in the client's words."""
    return wrong(f"The {name} can't be followed: {error}")


_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|\\.')
"""Strings, regexes and comments of Lark. A backslash elsewhere is an error that llguidance finds. Skipping it keeps the search
linear: in an unterminated string, each escaped quote would start another search."""
_UNSUPPORTED_LARK = (
    (re.compile(r"<[^<>\s]*>"), "names special tokens, which no answer may have"),
    (
        re.compile(r"\[[^\[\]]*\b(?:temperature|max_tokens|stop)\b"),
        "sets temperature, max_tokens or stop for a rule, which is not supported",
    ),
    (re.compile(r"%json\b"), "has a JSON schema inside, which is not supported"),
)

_OF_SETS = re.compile(r"&|~(?!\s*[0-9])")
"""Intersections and complements. Before a number, ~ is a repetition."""
MAX_SET_OPERATORS = 8
"""Each further operator may triple time and memory: 14 take 0.05 s, 18 take 1 s. llguidance has no limit for them."""


def of_schema(source: str) -> str:
    """Return Lark for a JSON schema, given as JSON text. Raises `Rejected`."""
    schema = _parsed(source, "json_schema")
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise wrong('The json_schema must be a JSON object. Give a schema such as {"type": "object"}.')
    return f"{START}%json {json_schema.json_of(schema, json_schema.SchemaCount())}\n"


def of_regex(source: str) -> str:
    """Return Lark for a regex that the whole answer matches."""
    from llguidance import regex_to_lark

    return f"{START}/{regex_to_lark(source, '')}/\n"


def of_choices(source: str) -> str:
    """Return Lark for an answer that is one of the strings in a JSON array. Raises `Rejected`."""
    choices = _parsed(source, "choice")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise wrong("The choice must be a list of at least one string, none of them empty.")
    return of_regex("|".join(re.escape(choice) for choice in dict.fromkeys(choices)))


def of_grammar(source: str) -> str:
    """Return Lark for a client's grammar: GBNF if its rules are written with `::=`, else Lark. Raises `Rejected`."""
    return gbnf.to_lark(source) if gbnf.is_gbnf(source) else of_lark(source)


def how_read(source: str) -> str:
    """Return a sentence for errors: whether `of_grammar` took the grammar for GBNF or Lark, and how to ask for the other."""
    if gbnf.is_gbnf(source):
        return " It was read as GBNF because a rule has ::=. If it is Lark, set 'grammar_syntax' to 'lark'."
    return " It was read as Lark because no rule has ::=. If it is GBNF, set 'grammar_syntax' to 'gbnf'."


def of_lark(source: str) -> str:
    """Return a client's Lark unchanged. Raises `Rejected` if it uses unsupported features or too many set operators."""
    rules = _LITERAL.sub("", source)
    for pattern, what in _UNSUPPORTED_LARK:
        if pattern.search(rules):
            raise wrong(f"The grammar {what}. Leave that out.")
    if (num_operators := len(_OF_SETS.findall(rules))) > MAX_SET_OPERATORS:
        what = f"has {num_operators} operators & and ~, and at most {MAX_SET_OPERATORS} are taken"
        raise wrong(f"The grammar {what}. Say the same with alternatives.")
    return source


def _parsed(source: str, name: str) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise wrong(f"The {name} is not JSON: {error}.") from error
