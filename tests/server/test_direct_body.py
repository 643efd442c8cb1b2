"""Pieces of a body past ASGI: framed, and dropped where nobody listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.serve.direct_body import DirectBody


def make_cycle(*, disconnected: bool, chunked_encoding: bool | None) -> Any:
    written: list[bytes] = []
    return SimpleNamespace(
        flow=SimpleNamespace(write_paused=False),
        disconnected=disconnected,
        chunked_encoding=chunked_encoding,
        transport=SimpleNamespace(write=written.append),
        written=written,
    )


def test_a_piece_is_one_chunk() -> None:
    cycle = make_cycle(disconnected=False, chunked_encoding=True)
    DirectBody(cycle).write(b"x" * 17)
    assert cycle.written == [b"11\r\n" + b"x" * 17 + b"\r\n"]


@pytest.mark.parametrize("chunked_encoding", [None, True], ids=["before the body began", "later"])
def test_a_client_that_left_gets_nothing(chunked_encoding: bool | None) -> None:
    """uvicorn ignores the start of a response to a client that is gone, so the body never begins."""
    cycle = make_cycle(disconnected=True, chunked_encoding=chunked_encoding)
    DirectBody(cycle).write(b"late")
    assert cycle.written == []


def test_a_body_that_has_not_begun_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="begun"):
        DirectBody(make_cycle(disconnected=False, chunked_encoding=None)).write(b"early")
