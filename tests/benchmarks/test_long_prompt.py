"""Gaps of streams beside a long prompt, told from those before it."""

import long_prompt
import pytest

from penstock.lab.records import Record

MS = 1_000_000


def record(index, first_ms, gaps_ms=(), intended_ms=0):
    return Record(
        index=index,
        intended_ns=intended_ms * MS,
        sent_ns=intended_ms * MS,
        first_ns=None if first_ms is None else first_ms * MS,
        gaps_ns=[gap * MS for gap in gaps_ms],
    )


LONG = record(2, 900, intended_ms=500)


def test_gaps_before_all_have_begun_are_left_out_and_those_that_end_later_are_beside():
    early = record(0, 100, [50, 50, 100, 100, 200, 300])  # tokens at 150, 200, 300, 400, 600 and 900 ms
    late = record(1, 190, [200])
    figures = long_prompt.summary([early, late], LONG)
    assert (figures["p50_alone"], figures["p50_beside"]) == (100.0, 250.0)
    assert figures["ttft"] == 400.0
    assert figures["ratio"] == pytest.approx(299 / 199, abs=0.01)


@pytest.mark.parametrize("late", [record(1, None), record(1, 490, [200])])
def test_streams_that_have_hardly_begun_are_an_error(late):
    with pytest.raises(RuntimeError, match="raise --after"):
        long_prompt.summary([record(0, 100, [350, 100]), late], LONG)
