"""The log of a disk tier that opens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.deploy.tiers import build_tier


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ([], []),
        ([b"a"], ["1 KV block of an earlier server was found"]),
        ([b"a", b"b"], ["2 KV blocks of an earlier server were found"]),
    ],
)
def test_what_an_earlier_time_left_is_counted_in_the_log(
    names: list[bytes], words: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock")
    store: Any = SimpleNamespace(num_slots=4, entries=lambda: list(enumerate(names)))
    assert build_tier(store) is not None
    assert caplog.messages == words
