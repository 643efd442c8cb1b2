"""Numbers with their nouns."""

from __future__ import annotations

from penstock.types.errors import counted


def test_one_has_no_s_and_all_others_have() -> None:
    assert [counted(number, "token") for number in (0, 1, 2, 21, 1000)] == [
        "0 tokens",
        "1 token",
        "2 tokens",
        "21 tokens",
        "1000 tokens",
    ]


def test_what_takes_no_s_is_named_and_numbers_are_written_as_asked() -> None:
    assert counted(1, "matrix is", "matrices are") == "1 matrix is"
    assert counted(2, "matrix is", "matrices are") == "2 matrices are"
    assert counted(12345, "step", spec=",") == "12,345 steps"
