"""Sorted by their keys, requests that begin alike come one after another."""

from __future__ import annotations

import json
from itertools import groupby
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.jobs.order import prefix_key

CHAT = "/v1/chat/completions"
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
fields = st.sampled_from(
    ("model", "tools", "messages", "prompt", "input", "cache_salt", "instructions", "system", "stream", "n")
)


def chat(*contents: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    return {"messages": [{"role": roles[min(k, 1 + k % 2)], "content": text} for k, text in enumerate(contents)]}


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), min_size=2, max_size=30))
def test_at_every_level_equal_prefixes_stand_together(paths: list[tuple[int, ...]]) -> None:
    bodies = {path: chat(*(f"{part} " * 100 for part in path)) for path in paths}
    ordered = sorted(bodies, key=lambda path: prefix_key(CHAT, bodies[path]))
    for depth in range(1, 5):
        beginnings = [path[:depth] for path, _ in groupby(path[:depth] for path in ordered if len(path) >= depth)]
        assert len(beginnings) == len(set(beginnings))


@given(st.text(), st.dictionaries(fields, anything, max_size=4))
def test_any_json_has_a_key(url: str, body: dict[str, Any]) -> None:
    assert prefix_key(url, json.loads(json.dumps(body))) == prefix_key(url, body)


def test_what_json_can_not_express_has_a_key_too() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert prefix_key(CHAT, {"messages": deep}) == prefix_key(CHAT, {"prompt": "\ud800"}) == b""


def test_a_key_is_short_even_if_the_prompt_is_long() -> None:
    assert len(prefix_key(CHAT, chat("x" * 1000))) < 80
    assert len(prefix_key(CHAT, chat("x" * 1_000_000))) < 540
    assert len(prefix_key(CHAT, chat("x" * 32_000_000))) < 760


def test_prompts_share_as_much_of_their_keys_as_of_their_text() -> None:
    one, other = (prefix_key("", {"prompt": "a" * 10_000 + end}) for end in ("b" * 2000, "c" * 2000))
    shared = next(k for k in range(0, len(one), 4) if one[k : k + 4] != other[k : k + 4])
    assert shared / len(one) > 0.85
    assert not {one[k : k + 4] for k in range(shared, len(one), 4)} & {other[k : k + 4] for k in range(0, len(other), 4)}


def test_what_is_not_part_of_the_prompt_does_not_count() -> None:
    body = chat("hello")
    assert prefix_key(CHAT, body) == prefix_key(CHAT, {"temperature": 1, "max_tokens": 5, **body})
    assert prefix_key(CHAT, body) != prefix_key(CHAT, {**body, "cache_salt": "one"})


def test_system_prompts_of_anthropic_stand_together() -> None:
    def body(nth: int) -> dict[str, Any]:
        return {"system": f"{nth % 3}" * 600, "messages": [{"role": "user", "content": f"{nth}"}]}

    ordered = sorted(range(30), key=lambda nth: prefix_key("/v1/messages", body(nth)))
    assert len([*groupby(nth % 3 for nth in ordered)]) == 3


def test_tools_come_before_the_messages() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "d" * 200}}]
    one, other = ({"messages": chat(text)["messages"], "tools": tools} for text in ("first", "second"))
    assert prefix_key(CHAT, one)[:12] == prefix_key(CHAT, other)[:12]
    assert prefix_key(CHAT, one)[:12] != prefix_key(CHAT, chat("first"))[:12]


def test_token_ids_are_shared_as_texts_are() -> None:
    one, other = (prefix_key("/v1/completions", {"prompt": [*range(100), last]}) for last in (5, 6))
    assert one[:-4] == other[:-4]
    assert one != other
