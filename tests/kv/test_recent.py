"""Evicted prefixes are remembered for long enough, in bounded memory."""

from __future__ import annotations

from penstock.kv.prefix_cache import Recent


def test_the_last_keys_written_are_known() -> None:
    recent: Recent[int, int] = Recent(16)
    for key in range(100):
        recent.put(key, -key)
        assert list(recent.items()) == [(last, -last) for last in range(max(0, key - 15), key + 1)]


def test_a_key_written_again_is_new() -> None:
    recent: Recent[str, int] = Recent(2)
    for key, value in (("known", 1), ("other", 0), ("known", 2), ("more", 0)):
        recent.put(key, value)
    assert (recent.get("known"), recent.get("other")) == (2, None)
