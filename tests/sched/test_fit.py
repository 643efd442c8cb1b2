"""Requests that can never fit, and the numbers that the user is told."""

from __future__ import annotations

import pytest

from penstock.sched.fit import max_total_tokens, refusal
from penstock.testing import make_request
from penstock.types.errors import RejectReason
from penstock.types.plan import Capacity

CAPACITY = Capacity(num_blocks=6, block_size=4, max_rows=4, max_step_tokens=16, max_model_len=30)
"""Room for 20 positions, so for 21 tokens."""


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(1, 1), (20, 1), (11, 10), (1, 20)])
def test_what_fits_alone_is_not_refused(num_prompt: int, max_tokens: int) -> None:
    assert refusal(make_request("r", num_prompt, max_tokens=max_tokens), CAPACITY) is None


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(21, 1), (20, 2), (1, 21), (29, 100)])
def test_what_outgrows_the_pool_is_refused_with_the_numbers(num_prompt: int, max_tokens: int) -> None:
    rejected = refusal(make_request("r", num_prompt, max_tokens=max_tokens), CAPACITY)
    assert rejected is not None
    assert rejected.reason is RejectReason.NEVER_FITS
    assert f"prompt of {num_prompt} token{'' if num_prompt == 1 else 's'} with" in rejected.detail
    assert f"max_tokens {max_tokens}" in rejected.detail
    assert f"to {min(num_prompt + max_tokens, 30)} tokens" in rejected.detail
    assert "room for 21" in rejected.detail


@pytest.mark.parametrize("num_prompt", [30, 31, 1000])
def test_a_prompt_without_room_for_a_reply_is_refused_with_the_numbers(num_prompt: int) -> None:
    rejected = refusal(make_request("r", num_prompt, max_tokens=1), CAPACITY)
    assert rejected is not None
    assert rejected.reason is RejectReason.CONTEXT_LENGTH
    assert str(num_prompt) in rejected.detail
    assert "may have 30 (max_model_len)" in rejected.detail


def test_an_empty_prompt_is_refused() -> None:
    rejected = refusal(make_request("r", 0), CAPACITY)
    assert rejected is not None
    assert rejected.reason is RejectReason.INVALID
    assert "no tokens" in rejected.detail


def test_the_limit_is_the_smaller_of_max_tokens_and_max_model_len() -> None:
    assert max_total_tokens(make_request("r", 10, max_tokens=5), CAPACITY) == 15
    assert max_total_tokens(make_request("r", 10, max_tokens=500), CAPACITY) == 30
