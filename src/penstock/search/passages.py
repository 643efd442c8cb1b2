"""Cuts documents into passages that an encoder reads whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.search.documents import Block

MAX_CHARS = 800
"""Most characters of a passage: below 256 tokens of English, which small encoders read."""
MAX_HEADING_CHARS = 200
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_BETWEEN = "\n\n"


@dataclass(frozen=True, slots=True)
class Passage:
    heading: str
    """The headings above the passage, such as `Install > On Linux`, or empty."""
    text: str


def as_read(heading: str, text: str) -> str:
    """Return a passage as encoders read it."""
    return f"{heading}\n{text}" if heading else text


def cut(blocks: Iterable[Block]) -> Iterator[Passage]:
    """Yield passages of whole blocks. Long blocks are cut after sentences, and long sentences after words.

    A heading without text is a passage, too.
    """
    headings: list[str] = []
    part: list[str] = []
    is_bare = False

    def flush() -> Iterator[Passage]:
        if part:
            yield Passage(" > ".join(filter(None, headings))[:MAX_HEADING_CHARS], _BETWEEN.join(part))
            part.clear()

    for block in [*blocks, Block("", 1)]:
        if block.level:
            yield from flush()
            if is_bare and block.level <= len(headings):
                yield Passage("", " > ".join(filter(None, headings))[:MAX_CHARS])
            del headings[block.level - 1 :]
            headings += [""] * (block.level - 1 - len(headings)) + [block.text]
            is_bare = True
            continue
        is_bare = False
        for piece in _pieces(block.text):
            if part and len(_BETWEEN.join([*part, piece])) > MAX_CHARS:
                yield from flush()
            part.append(piece)


def _pieces(text: str) -> Iterator[str]:
    """Yield pieces of at most `MAX_CHARS`."""
    if len(text) <= MAX_CHARS:
        yield text
        return
    piece = ""
    for sentence in _SENTENCE.split(text):
        for word in [sentence] if len(sentence) <= MAX_CHARS else _words(sentence):
            if piece and len(piece) + 1 + len(word) > MAX_CHARS:
                yield piece
                piece = ""
            piece = f"{piece} {word}" if piece else word
    if piece:
        yield piece


def _words(text: str) -> list[str]:
    return [word[start : start + MAX_CHARS] for word in text.split() for start in range(0, len(word), MAX_CHARS)]
