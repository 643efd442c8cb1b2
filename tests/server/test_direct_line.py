"""Pieces of an answer that go past ASGI, and are dropped where nobody listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.serve.http.connection import DirectLine


class Cycle(SimpleNamespace):
    """It can be referred to weakly, unlike its base."""


def make_cycle(*, disconnected: bool = False, chunked_encoding: bool | None = None, write_paused: bool = False) -> Any:
    written: list[bytes] = []
    return Cycle(
        flow=SimpleNamespace(write_paused=write_paused),
        disconnected=disconnected,
        chunked_encoding=chunked_encoding,
        transport=SimpleNamespace(write=written.append),
        written=written,
    )


def test_a_piece_is_one_chunk() -> None:
    cycle = make_cycle(disconnected=False, chunked_encoding=True)
    DirectLine(cycle).write(b"x" * 17)
    assert cycle.written == [b"11\r\n" + b"x" * 17 + b"\r\n"]


@pytest.mark.parametrize("chunked_encoding", [None, True], ids=["before the body began", "later"])
def test_a_client_that_left_gets_nothing(chunked_encoding: bool | None) -> None:
    """uvicorn ignores the start of a response to a client that is gone, so the body never begins."""
    cycle = make_cycle(disconnected=True, chunked_encoding=chunked_encoding)
    DirectLine(cycle).write(b"late")
    assert cycle.written == []


def test_a_body_that_has_not_begun_is_a_mistake() -> None:
    cycle = make_cycle(disconnected=False, chunked_encoding=None)
    with pytest.raises(AssertionError, match="begun"):
        DirectLine(cycle).write(b"early")


def test_what_comes_after_the_end_of_the_request_is_dropped() -> None:
    cycle = make_cycle(disconnected=False, chunked_encoding=True)
    body, written = DirectLine(cycle), cycle.written
    del cycle
    body.write(b"late")
    assert written == []


@pytest.mark.parametrize("write_paused", [False, True])
def test_a_client_is_slow_while_writing_to_it_is_paused(write_paused: bool) -> None:
    assert DirectLine(_cycle := make_cycle(write_paused=write_paused)).is_slow is write_paused
