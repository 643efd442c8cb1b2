"""Cuts documents into passages that an encoder reads whole."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from penstock.search.documents import Block

MAX_CHARS = 800
"""Most characters of a passage: below 256 tokens of English prose, which small encoders read."""
MAX_HEADING_CHARS = 200
_STARTS = re.compile(r"(?<=[.!?])(?=\s)"), re.compile(r"(?=\n)"), re.compile(r"(?<=\S)(?=\s)")
"""Where sentences, lines and words begin, with the white space before them."""
_BREAK = re.compile(r"\A(?:\s*\n|\s+)")
"""White space before a unit that begins a piece, without the indentation of a line."""
_BETWEEN = "\n\n"
Fit = Callable[[Sequence[str]], Sequence[bool]]
"""Returns whether the encoder reads each text whole."""


@dataclass(frozen=True, slots=True)
class Passage:
    heading: str
    """The headings above the passage, such as `Install > On Linux`, or empty."""
    text: str


def as_read(heading: str, text: str) -> str:
    """Return a passage as encoders read it."""
    return f"{heading}\n{text}" if heading else text


def cut(blocks: Iterable[Block]) -> Iterator[Passage]:
    """Yield passages of whole blocks. Long blocks are cut between sentences, or lines, or words if those are long.

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


def halved(passages: Sequence[Passage], fit: Fit) -> Iterator[Passage]:
    """Yield passages, those that do not fit in halves, again and again until they fit. A longer heading is cut instead."""
    fits = fit([as_read(one.heading, one.text) for one in passages])
    for passage, is_whole in zip(passages, fits, strict=True):
        heading, text = passage.heading, passage.text
        if is_whole or len(heading) + len(text) <= 1:
            yield passage
        elif len(heading) >= len(text):
            yield from halved([Passage(heading[: len(heading) // 2], text)], fit)
        else:
            yield from halved([Passage(heading, piece) for piece in _pieces(text, (len(text) + 1) // 2)], fit)


def _pieces(text: str, max_chars: int = MAX_CHARS) -> Iterator[str]:
    """Yield pieces of at most `max_chars`. White space is kept, except for blanks and line breaks at a cut."""
    piece = ""
    for unit in _units(text, max_chars):
        if piece and len(piece) + len(unit) > max_chars:
            yield piece
            piece, unit = "", _BREAK.sub("", unit)
        piece += unit
    if piece:
        yield piece


def _units(text: str, max_chars: int, starts: tuple[re.Pattern[str], ...] = _STARTS) -> Iterator[str]:
    """Yield units of at most `max_chars`, each with the white space before it."""
    if len(text) <= max_chars:
        yield text
    elif starts:
        for part in starts[0].split(text):
            yield from _units(part, max_chars, starts[1:])
    else:
        for start in range(0, len(text), max_chars):
            yield text[start : start + max_chars]
