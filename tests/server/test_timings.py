"""Timings: queue, prefill and decode cover the whole life of a request."""

from __future__ import annotations

import pytest

from penstock.engine.ports import OutputChunk
from penstock.serve.streams import server_timing, times_ms
from penstock.types.request import NO_WAITS

MS = 1_000_000


def timings(first_scheduled_ms: int | None, first_token_ms: int | None) -> tuple[float, float, float]:
    chunk = OutputChunk("r", "", (), (), at_ns=200 * MS)
    chunk.first_scheduled_ns = None if first_scheduled_ms is None else first_scheduled_ms * MS
    chunk.first_token_ns = None if first_token_ms is None else first_token_ms * MS
    return times_ms(100 * MS, chunk)


@pytest.mark.parametrize(
    ("first_scheduled_ms", "first_token_ms", "expected"),
    [(110, 150, (10, 40, 50)), (110, None, (10, 90, 0)), (None, None, (100, 0, 0))],
)
def test_the_parts_add_up_to_the_whole(first_scheduled_ms, first_token_ms, expected):
    assert timings(first_scheduled_ms, first_token_ms) == expected
    assert sum(expected) == 100


def test_the_header_names_each_part_in_milliseconds():
    parts_ms = timings(110, 150)
    assert server_timing(parts_ms, NO_WAITS) == "queue;dur=10.000, prefill;dur=40.000, decode;dur=50.000"
    assert server_timing(parts_ms[:2], NO_WAITS) == "queue;dur=10.000, prefill;dur=40.000"
