"""Stop strings, against an oracle that looks at whole texts only."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.stop_strings import StopStrings, StopTree

letters = st.text(alphabet="ab", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def oracle(text: str, stops: list[str], num_unarmed: int = 0) -> tuple[str, str | None]:
    """The smallest armed end wins, the longest string among those that end there."""
    for end in range(num_unarmed + 1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def run(pieces: list[str], stops: list[str], num_unarmed_pieces: int = 0) -> tuple[str, str | None]:
    matcher, shown = StopStrings(StopTree(stops)), ""
    for idx, piece in enumerate(pieces):
        new, stop = matcher.push(piece, is_armed=idx >= num_unarmed_pieces)
        shown += new
        if stop is not None:
            return shown, stop
    return shown + matcher.flush(), None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=6))
def test_any_chunking_gives_the_answer_of_the_whole_text(text, stops, cuts):
    assert run(cut(text, cuts), stops) == oracle(text, stops)


@given(letters, stop_lists, st.lists(st.integers(0, 100), max_size=6), st.integers(0, 4))
def test_unarmed_pieces_hide_only_the_matches_that_end_in_them(text, stops, cuts, num_unarmed_pieces):
    pieces = cut(text, cuts)
    num_unarmed = len("".join(pieces[:num_unarmed_pieces]))
    assert run(pieces, stops, num_unarmed_pieces) == oracle(text, stops, num_unarmed)


@given(letters, stop_lists)
def test_only_what_can_still_become_a_stop_string_is_held(text, stops):
    matcher, shown = StopStrings(StopTree(stops)), ""
    for idx, char in enumerate(text):
        new, stop = matcher.push(char)
        if stop is not None:
            return
        shown += new
        seen = text[: idx + 1]
        starts = [k for k in range(len(seen)) if any(s.startswith(seen[k:]) and s != seen[k:] for s in stops)]
        assert shown == seen[: min(starts, default=len(seen))]


def test_the_first_to_be_complete_wins():
    assert run(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")


def test_the_longest_wins_among_those_that_end_together():
    assert run(["xabc"], ["c", "abc", "bc"]) == ("x", "abc")


def test_a_stop_string_may_begin_in_unarmed_text():
    assert run(["sto", "p!"], ["stop"], num_unarmed_pieces=1) == ("", "stop")


def test_text_after_the_match_is_dropped():
    matcher = StopStrings(StopTree(["\n\n"]))
    assert matcher.push("one\n\ntwo") == ("one", "\n\n")
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_an_error():
    with pytest.raises(ValueError, match="empty"):
        StopTree(["a", ""])
