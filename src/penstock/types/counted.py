"""A number with its noun, for sentences that people read. Called by whoever words a message; knows no message itself."""

from __future__ import annotations


def counted(number: int, noun: str, plural: str = "", *, spec: str = "") -> str:
    """`1 token`, `2 tokens`. `plural`: if it is not the noun with an s. `spec` formats the number, as in an f-string."""
    return f"{number:{spec}} {noun if number == 1 else plural or f'{noun}s'}"
