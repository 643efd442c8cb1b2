"""The page on batching shows what the tool draws."""

from __future__ import annotations

from pathlib import Path

import batch_picture

PAGE = Path(__file__).parents[2] / "docs" / "batching.md"


def test_the_page_shows_the_pictures_as_they_are_drawn() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for title, gate in batch_picture.GATES.items():
        plans = batch_picture.record(gate)
        picture = "\n".join([title, *batch_picture.draw(plans), batch_picture.summary(plans)])
        assert picture in page, f"run benchmarks/batch_picture.py again: docs/batching.md has another picture of {title!r}"
