"""Agreement: answers are compared without what does not matter, and the first of the most frequent ones is kept."""

from __future__ import annotations

import re

import pytest

from penstock.routes.agreement import majority, normalised


@pytest.mark.parametrize(
    ("text", "part", "expected"),
    [
        ("  Forty \n two. ", None, "forty two"),
        ('"Yes!"', None, "yes"),
        ("**5**.", None, "5"),
        ("**'5.'**.", None, "5"),
        ("-5", None, "-5"),
        (".5", None, ".5"),
        ("6 * 7 = 42, so 42", r"= *(\d+)", "42"),
        ("2 = 2; 6 * 7 = 42", r"= *(\d+)", "42"),
        ("no sum", r"= *(\d+)", "no sum"),
        ("so: 42", r"\d+", "42"),
        ("a", r"a(b)?", ""),
        ("", None, ""),
    ],
)
def test_answers_are_compared_by_their_part_without_case_spaces_and_ends(text: str, part: str | None, expected: str) -> None:
    assert normalised(text, None if part is None else re.compile(part)) == expected


@pytest.mark.parametrize(
    ("texts", "index", "count"),
    [(["a"], 0, 1), (["b", "a", "a"], 1, 2), (["a", "b", "b", "a"], 0, 2), (["a", "b", "c", "d"], 0, 1)],
)
def test_the_first_of_the_most_frequent_answers_is_kept(texts: list[str], index: int, count: int) -> None:
    assert majority(texts) == (index, count)
