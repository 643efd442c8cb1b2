"""Evicted prefixes are remembered for long enough, in memory that soon stays as it is."""

from __future__ import annotations

import pytest

from penstock.kv.prefix_cache import Recent


@pytest.mark.parametrize("num_kept", [8, 16, 100])
def test_at_least_the_last_keys_are_known_and_at_most_an_eighth_more(num_kept: int) -> None:
    recent: Recent[int, int] = Recent(num_kept)
    sizes = []
    for key in range(5 * num_kept + 20):
        recent.put(key, -key)
        last = range(max(0, key + 1 - num_kept), key + 1)
        assert [recent.get(known) for known in last] == [-known for known in last]
        sizes.append(len(recent))
    assert recent.get(0) is None
    assert max(sizes) <= 9 * -(-num_kept // 8)
    late = sizes[2 * num_kept :]
    assert max(late) - min(late) <= num_kept / 8 + 1, "what it takes goes up and down"


def test_the_newest_value_of_a_key_counts_also_when_it_was_written_long_ago_first() -> None:
    recent: Recent[str, int] = Recent(16)
    recent.put("known", 1)
    for number in range(10):
        recent.put(f"other-{number}", 0)
    recent.put("known", 2)
    assert recent.get("known") == 2
    for number in range(15):
        recent.put(f"more-{number}", 0)
    assert recent.get("known") == 2
