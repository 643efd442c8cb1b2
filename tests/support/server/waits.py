"""How long a server waits, for tests that can't wait as long."""

from __future__ import annotations

import pytest

from penstock.serve.http import acceptor, connection, watch
from penstock.serve.http.connection import HttpConnection
from penstock.serve.streams import EventStream

PLACES: dict[str, tuple[object, str]] = {
    "read_timeout_s": (HttpConnection, "read_timeout_s"),
    "write_timeout_s": (HttpConnection, "write_timeout_s"),
    "keep_alive_s": (HttpConnection, "keep_alive_s"),
    "stall_s": (connection, "STALL_S"),
    "look_every_s": (connection, "_LOOK_EVERY_S"),
    "grace_s": (acceptor, "GRACE_S"),
    "closing_s": (acceptor, "_CLOSING_S"),
    "retry_s": (acceptor, "_RETRY_S"),
    "stream_keepalive_s": (EventStream, "keepalive_s"),
    "watch_every_s": (watch, "EVERY_S"),
}


def set_waits(monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    """Set waits by their names in `PLACES`."""
    for name, value in seconds.items():
        place, attribute = PLACES[name]
        monkeypatch.setattr(place, attribute, value)
