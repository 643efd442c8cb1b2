"""An answer past ASGI: head, pieces and end, dropped where nobody listens; and the word that the client has left."""

from __future__ import annotations

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.serve.http.connection import DirectLine

CHUNKED = b"transfer-encoding: chunked\r\n\r\n"


class Cycle(SimpleNamespace):
    """It can be referred to weakly, unlike its base."""


def make_cycle(*, disconnected: bool = False, chunked_encoding: bool | None = None, keep_alive: bool = True) -> Any:
    written: list[bytes] = []
    calls: list[str] = []
    return Cycle(
        flow=SimpleNamespace(write_paused=False, resume_reading=partial(calls.append, "read on")),
        default_headers=[(b"date", b"today")],
        disconnected=disconnected,
        chunked_encoding=chunked_encoding,
        keep_alive=keep_alive,
        response_started=False,
        response_complete=False,
        waiting_for_100_continue=True,
        message_event=asyncio.Event(),
        on_response=partial(calls.append, "answered"),
        transport=SimpleNamespace(write=written.append, close=partial(calls.append, "close")),
        written=written,
        calls=calls,
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


@pytest.mark.parametrize(
    ("keep_alive", "connection", "calls"),
    [(True, b"", ["answered"]), (False, b"connection: close\r\n", ["close", "answered"])],
    ids=["kept alive", "closed"],
)
def test_an_answer_is_a_head_with_the_first_piece_and_an_end(keep_alive, connection, calls) -> None:
    cycle = make_cycle(keep_alive=keep_alive)
    line = DirectLine(cycle)
    line.begin([(b"a", b"1"), (b"b", b"2")], b"first")
    line.end(b"last")
    assert cycle.written == [
        b"HTTP/1.1 200 OK\r\ndate: today\r\na: 1\r\nb: 2\r\n"
        + connection
        + b"transfer-encoding: chunked\r\n\r\n5\r\nfirst\r\n",
        b"4\r\nlast\r\n0\r\n\r\n",
    ]
    assert cycle.response_started
    assert cycle.response_complete
    assert cycle.message_event.is_set()
    assert not cycle.waiting_for_100_continue
    assert cycle.calls == calls


def test_pieces_of_an_answer_may_be_empty() -> None:
    cycle = make_cycle()
    line = DirectLine(cycle)
    line.begin((), b"")
    line.end(b"")
    assert cycle.written == [b"HTTP/1.1 200 OK\r\ndate: today\r\n" + CHUNKED, b"0\r\n\r\n"]


def test_an_answer_to_a_client_that_left_neither_begins_nor_ends() -> None:
    cycle = make_cycle(disconnected=True)
    line = DirectLine(cycle)
    line.begin((), b"first")
    line.end(b"last")
    assert cycle.written == cycle.calls == []
    assert not cycle.response_complete


def test_an_answer_begins_once_and_ends_once() -> None:
    line = DirectLine(cycle := make_cycle())
    line.begin((), b"")
    with pytest.raises(AssertionError, match="begun"):
        line.begin((), b"")
    line.end(b"")
    with pytest.raises(AssertionError, match="ended"):
        line.end(b"")
    assert cycle.calls == ["answered"]


def test_who_watches_is_told_that_the_client_has_left() -> None:
    told: list[str] = []
    line = DirectLine(cycle := make_cycle())
    line.watch(lambda: told.append("now"))
    assert cycle.calls == ["read on"]
    assert told == []
    line.tell_gone()
    assert told == ["now"]
    line.watch(None)
    line.tell_gone()
    assert told == ["now"]


def test_who_watches_too_late_is_told_at_once() -> None:
    told: list[str] = []
    line = DirectLine(_cycle := make_cycle(disconnected=True))
    line.watch(lambda: told.append("now"))
    assert told == ["now"]
