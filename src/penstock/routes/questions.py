"""The question in a request: the user's last message, or the prompt."""

from __future__ import annotations

from collections.abc import Iterator

MAX_QUESTION_CHARS = 16_384
"""Characters of a question that count, the first ones: more than an encoder reads."""


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts of a body."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, list):
            rest += one


def question_in(value: object) -> str:
    """Return the text of a prompt, of a list of them, or of the last message of the user in a list of messages."""
    return " ".join(_texts(value)).strip()[:MAX_QUESTION_CHARS]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(value.get("text") or value.get("content"))
    elif isinstance(value, list):
        users = [entry for entry in value if isinstance(entry, dict) and entry.get("role") == "user"]
        for entry in users[-1:] or value:
            yield from _texts(entry)
