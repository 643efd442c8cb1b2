"""The question in a request: the user's last message, or the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator

MAX_QUESTION_CHARS = 16_384
"""Only so many first characters of a question count: more than an encoder reads."""

TEXT_KEYS = ("text", "content", "prompt_string")
"""Fields with the text of a part, of a message, and of a prompt of llama.cpp's API."""


def texts_in(value: object) -> Iterator[str]:
    """Yield all texts of a body: also keys of objects, numbers, JSON within texts, and the parts of a message as one."""
    rest = [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            yield one
            if one[:1] in "{[" and (inner := _json(one)) is not None:  # such as the arguments of a call
                rest.append(inner)
        elif isinstance(one, dict):
            rest += [*one, *one.values()]
        elif isinstance(one, list):
            rest += one
            parts = [part["text"] for part in one if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if len(parts) > 1:
                yield "".join(parts)
        elif isinstance(one, int | float) and not isinstance(one, bool):
            yield str(one)


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def question_in(value: object, most: int | None = MAX_QUESTION_CHARS) -> str:
    """Return the text of a prompt, of a list of them, or of the last message of the user in a list of messages.

    `most`: only so many characters of it. None: all.
    """
    return " ".join(_texts(value)).strip()[:most]


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        if value.get("type") != "tool_result":  # which Anthropic's API has in a message of the user
            yield from _texts(next((value[key] for key in TEXT_KEYS if value.get(key)), None))
    elif isinstance(value, list):
        users = [entry for entry in value if isinstance(entry, dict) and entry.get("role") == "user"]
        asked = next((entry for entry in reversed(users) if any(_texts(entry))), None)
        for entry in ([] if users else value) if asked is None else [asked]:
            yield from _texts(entry)
