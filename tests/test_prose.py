"""The rules of AGENTS.md for prose that a program can check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_README_WORDS = 1000
"""200 words a minute."""
HEADLESS = re.compile(r"(Who|Whom|Whose|Whoever|What|Whatever|Of)\b")


def rooms() -> dict[str, list[Path]]:
    """The Python files of src, tests and benchmarks by the folder, or lone file, that somebody owns."""
    found: dict[str, list[Path]] = {}
    for top, depth in (("src/penstock", 3), ("tests", 2), ("benchmarks", 1)):
        for path in sorted((ROOT / top).rglob("*.py")):
            found.setdefault("/".join(path.relative_to(ROOT).parts[:depth]), []).append(path)
    return found


ROOMS = rooms()


def test_the_readme_is_for_somebody_with_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= MAX_README_WORDS


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Every string that stands alone as a statement, with its line: docstrings, and the strings below fields."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def headless(text: str) -> list[str]:
    """The sentences of a docstring that begin with "Who", "What", "Of" or the like, and are no question."""
    paragraphs = re.split(r"\n\s*\n|\n\s*[-*] ", text)
    joined = (" ".join(paragraph.split()).lstrip("-* ") for paragraph in paragraphs)
    sentences = (sentence for paragraph in joined for sentence in re.split(r"(?<=[.!?])\s+", paragraph))
    return [sentence for sentence in sentences if HEADLESS.match(sentence) and not sentence.endswith("?")]


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_sentences_of_docstrings_name_their_subject(room: str) -> None:
    """A sentence says "A request that waits", never "Who waits": the reader need not guess the noun."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in ROOMS[room]
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        for sentence in headless(text)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "Who is next.",
        "The queue. Whose turn it is stands here.",
        "One line.\n\nOf the second paragraph.",
        "A list:\n\n- What is in it.\n",
    ],
)
def test_headless_sentences_are_found(text: str) -> None:
    assert headless(text)


@pytest.mark.parametrize(
    "text", ["The request that is next.", "Why was it slow? What waited?", "Off by one.", "Says who waits."]
)
def test_other_sentences_are_not(text: str) -> None:
    assert not headless(text)


def test_strings_below_fields_are_read() -> None:
    source = 'class A:\n    x: int\n    """What x is."""\n\n    def f(self):\n        """Of f."""\n'
    assert [text for _, text in docstrings(source)] == ["What x is.", "Of f."]
