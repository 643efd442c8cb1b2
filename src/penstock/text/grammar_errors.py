"""What llguidance says of a grammar, in words for whoever wrote it: cause and remedy. Called where one is compiled or followed.

Messages are cut to a bounded length, and never hold the answer.
"""

from __future__ import annotations

import re

from penstock.types.errors import GrammarFailure, Rejected, RejectReason

MAX_CAUSE_CHARS = 300

_OUR_PLACE = "at 2(8): "
"""Of whatever was not written in Lark, in the Lark that is made of it."""
_TOO_LARGE = (
    "Unable to determine|too many (states|expressions|items)|Current row has|fuel|precomputation|panic|too large|too complex"
)
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        f"(?i){_TOO_LARGE}",
        "The grammar becomes too large to follow.",
        "Make it simpler: fewer alternatives and optional fields, shorter repetitions, no rule with two readings.",
    ),
    (r"^Unimplemented keys: (.*)", "The keywords {} are not supported.", "Leave them out, or say the same otherwise."),
    (r"^Unknown format: (.*)", "The format {} is not supported.", "Leave it out, or say it as a pattern."),
    (
        r"look-?around",
        "A regex has look-around or a word boundary, which are not supported.",
        r"Say it without (?=...), (?!...), (?<=...), (?<!...), \b and \B.",
    ),
    (r"Regex is empty", "No string can have all of a pattern, format and length at once.", "Check what contradicts what."),
    (r"oneOf constraints", "Two schemas of a oneOf might hold at once.", "Use anyOf, or a const that tells them apart."),
    (r"NoExtension", "No answer can follow it.", "Check what contradicts what."),
    (r"doesn't satisfy the grammar", "A token was sampled that it forbids.", ""),
    (r"^recursion limit exceeded", "It is nested too deeply.", "Use $ref and $defs for what lies further inside."),
)


def failure(message: str) -> GrammarFailure:
    """Of what `LLMatcher.get_error` says."""
    cause = _cause(message)
    for pattern, text, remedy in _KNOWN:
        if found := re.search(pattern, cause):
            return GrammarFailure(text.format(*found.groups()), remedy=remedy)
    return GrammarFailure(f"{cause.rstrip('.')}.")


def refusal(name: str, error: GrammarFailure) -> Rejected:
    """`name` is what the client called it."""
    return Rejected(RejectReason.INVALID, f"The {name} can't be followed: {error}")


def refused_schema(what: str) -> Rejected:
    """Of a schema that is refused before it is compiled; what "a json_schema" does not do, and the remedy."""
    return Rejected(RejectReason.INVALID, f"A json_schema {what}")


def _cause(message: str) -> str:
    """Without what it quotes of the source as a whole, and without the names of llguidance's own steps."""
    text = message.split("\n<", 1)[0]
    lines = [line for line in text.split("\n") if not re.match(r"\s*\d+ \| |\s*\^+\s*$", line)]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    place = re.match(r"(?:at )?(\d+)\((\d+)\): ", lines[0])
    cause = errors[-1] if errors else " ".join(lines)[place.end() if place else 0 :]
    cause = re.sub(r'^(failed to compile JSON schema: |failed to parse "%json": )+', "", cause).strip()[:MAX_CAUSE_CHARS]
    if place is None or place[0] == _OUR_PLACE:
        return cause
    return f"{cause.rstrip('.')} (line {place[1]}, column {place[2]})"
