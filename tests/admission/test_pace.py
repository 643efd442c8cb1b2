"""The pace that is learned from the steps: how fast prompts are computed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.admission.estimates import Pace
from penstock.types.stats import StepCounts, StepStats, WaitReason

MILLISECOND = 1_000_000


def step(pace: Pace, num_rows: int, num_tokens: int, **counted: Any) -> None:
    """A step of 50 ms, while prompts wait for tokens."""
    counts = StepCounts(num_rows=num_rows, num_tokens=num_tokens, **({"waits_for": WaitReason.TOKENS} | counted))
    pace.on_step(StepStats(0, 0, 50 * MILLISECOND, 8, 1, 100, 50, 0, counts))


def test_prompts_take_the_time_of_the_steps_that_were_full_of_them():
    pace = Pace(128)
    step(pace, num_rows=8, num_tokens=108)
    assert pace.prefill_ns(200) == 100 * MILLISECOND


def test_padding_is_no_prompt():
    pace = Pace(128)
    step(pace, num_rows=2, num_tokens=8, num_padding_tokens=6)  # decodes, and rows that have ended
    assert pace.prefill_ns(200) == 0
    step(pace, num_rows=8, num_tokens=128, num_padding_tokens=20)  # the padding before a prompt costs its time, too
    assert pace.prefill_ns(200) == 100 * MILLISECOND


def test_guesses_are_no_prompts():
    pace = Pace(128)
    step(pace, num_rows=8, num_tokens=128, guesses={"a": (15, 4), "b": (5, 0)})
    assert pace.prefill_ns(200) == 100 * MILLISECOND
    step(pace, num_rows=8, num_tokens=68, guesses={"a": (15, 4)}, waits_for=WaitReason.NOTHING)  # not full without them
    assert pace.prefill_ns(200) == 100 * MILLISECOND


def test_guesses_and_forced_tokens_shorten_the_time_between_tokens():
    pace = Pace(128)
    step(pace, num_rows=8, num_tokens=8, num_decodes=8)
    assert pace.token_ns == 50 * MILLISECOND
    more = {"guesses": {"a": (15, 12), "b": (5, 0)}, "forced": {"b": 4}}
    for _ in range(200):
        step(pace, num_rows=8, num_tokens=28, num_decodes=28, **more)
    assert pace.token_ns == pytest.approx(50 * MILLISECOND / 3, rel=0.01)
    assert pace.step_ns == 50 * MILLISECOND


def test_steps_that_compute_forced_tokens_without_sampling_count():
    pace = Pace(128)
    for _ in range(100):
        step(pace, num_rows=1, num_tokens=1, num_decodes=1, forced={"a": 45})
        for _ in range(2):
            step(pace, num_rows=1, num_tokens=16, num_decodes=16)
    assert pace.token_ns == pytest.approx(50 * MILLISECOND / 16, rel=0.1), "48 tokens in 3 steps"


def test_a_step_with_background_rows_does_not_tell_how_fast_prompts_are_computed():
    pace = Pace(128)
    step(pace, num_rows=8, num_tokens=128, num_background_tokens=20)
    assert pace.prefill_ns(200) == 0
    assert pace.step_ns == 50 * MILLISECOND
