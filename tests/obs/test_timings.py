"""Timings: queue, prefill and decode cover the whole life of a request."""

from __future__ import annotations

import pytest

from penstock.obs.timings import RequestTimings

MS = 1_000_000


def make_timings(first_scheduled_ms: int | None, first_token_ms: int | None) -> RequestTimings:
    return RequestTimings(
        arrival_ns=100 * MS,
        first_scheduled_ns=None if first_scheduled_ms is None else first_scheduled_ms * MS,
        first_token_ns=None if first_token_ms is None else first_token_ms * MS,
        ended_ns=200 * MS,
    )


@pytest.mark.parametrize(
    ("first_scheduled_ms", "first_token_ms", "expected"),
    [(110, 150, (10, 40, 50)), (110, None, (10, 90, 0)), (None, None, (100, 0, 0))],
)
def test_the_parts_add_up_to_the_whole(first_scheduled_ms, first_token_ms, expected):
    timings = make_timings(first_scheduled_ms, first_token_ms)
    assert (timings.queue_ms, timings.prefill_ms, timings.decode_ms) == expected
    assert sum(expected) == 100


def test_the_header_names_each_part_in_milliseconds():
    assert make_timings(110, 150).server_timing() == "queue;dur=10.000, prefill;dur=40.000, decode;dur=50.000"
