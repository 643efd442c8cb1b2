"""The comparison of batching strategies reads lengths rightly, and the page shows what the tool draws."""

from __future__ import annotations

from pathlib import Path

import batch_picture
import pytest
from batching import arrivals, bounds

from penstock.lab.workload import Job

PAGE = Path(__file__).parents[2] / "docs" / "batching.md"


def jobs(*lengths: tuple[int, int]) -> list[Job]:
    return [Job(arrival_ns=0, num_prompt_tokens=prompt, num_output_tokens=reply) for prompt, reply in lengths]


def test_bounds_are_rectangles_over_what_was_asked_for() -> None:
    limits = bounds(jobs((10, 5), (30, 9), (20, 2)), 2, {"prompt_ms": 1.0, "decode_ms": 1.0})
    assert limits["prompts"] == pytest.approx((2 * 30 + 20) / 60)
    assert limits["decodes"] == pytest.approx((2 * 8 + 1) / (4 + 8 + 1))
    assert limits["least"] == limits["decodes"]
    assert limits["expected"] == pytest.approx((80 + 17) / (60 + 13))


def test_equal_lengths_leave_nothing_to_gain() -> None:
    limits = bounds(jobs(*[(10, 5)] * 8), 4, {"prompt_ms": 0.2, "decode_ms": 0.4})
    assert limits == pytest.approx({"prompts": 1.0, "decodes": 1.0, "least": 1.0, "expected": 1.0})


def test_without_a_rate_all_come_at_once() -> None:
    assert arrivals(3, 0.0, 1) == [0.0] * 3
    times = arrivals(1000, 4.0, 1)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(250, rel=0.2)


def test_the_page_shows_the_pictures_as_they_are_drawn() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for title, gate in batch_picture.GATES.items():
        plans = batch_picture.record(gate)
        picture = "\n".join([title, *batch_picture.draw(plans), batch_picture.summary(plans)])
        assert picture in page, f"run benchmarks/batch_picture.py again: docs/batching.md has another picture of {title!r}"
