"""A request that another engine began goes on with the same tokens: what a cluster does when a replica is lost."""

from __future__ import annotations

import pytest

from penstock.testing import HashExecutor, make_core, make_request
from penstock.testing.builders import DEFAULT_CAPACITY
from penstock.testing.driver import run_to_completion
from penstock.types.events import Add
from penstock.types.request import FinishReason, Request
from support.hash_matcher import HashMatcher

VOCAB_SIZE = 1000


def make(cut: list[int], *, follows: bool) -> Request:
    matcher = HashMatcher(VOCAB_SIZE, num_forced=2) if follows else None
    if matcher is not None:
        matcher.accept(cut)
    return make_request(prompt=37, max_tokens=20, temperature=0.8, seed=7, matcher=matcher, output_token_ids=list(cut))


def answer(*cut: int, follows: bool) -> list[int]:
    """The tokens that come after `cut`."""
    request = make(list(cut), follows=follows)
    outcomes = run_to_completion(make_core(), HashExecutor(DEFAULT_CAPACITY), Add(request))
    assert outcomes["r0"].finish_reason is FinishReason.LENGTH
    assert request.output_token_ids == [*cut, *outcomes["r0"].token_ids]
    return outcomes["r0"].token_ids


@pytest.mark.parametrize("follows", [False, True])
def test_it_goes_on_with_the_same_tokens(follows: bool) -> None:
    whole = answer(follows=follows)
    assert len(whole) == 20
    for num_before in range(1, 20):
        assert answer(*whole[:num_before], follows=follows) == whole[num_before:]
