"""The C++ sampler does what the specification does."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.backends.native import _native
from penstock.backends.native.executor import make_row_sampling
from penstock.backends.reference.sampling import (
    NoCandidateError,
    add_bias,
    draw,
    narrow,
    penalize,
    restrict,
    sample,
    uniform,
)
from penstock.types.sampling import MAX_LOGPROBS, PARAMETERS, SamplingParams

EDGE = 1e-6
"""How near to a boundary two ways to round may fall on its two sides."""

VOCAB_SIZES = [1, 2, 16, 17, 63, 64, 65, 200, 1000, 20000]


VALUES: dict[str, list[float]] = {
    name: [one.neutral, one.neutral, 0.3, 1.0, one.spellings["openai"].high]
    for name, one in PARAMETERS.items()
    if one.neutral is not None and name != "repeat_last_n"
} | {
    "temperature": [0.0, 1e-300, 0.2, 0.7, 1.0, 3.0],
    "top_k": [0, 0, 1, 2, 40, 700, 30000],
    "top_p": [1.0, 1.0, 1e-9, 0.5, 0.95, 0.9999],
    "min_p": [0.0, 0.0, 0.01, 0.5, 1.0],
    "repetition_penalty": [1.0, 1.3, 0.5],
    "presence_penalty": [0.0, 0.7, -0.3],
    "frequency_penalty": [0.0, 0.2, -1.1],
    "min_tokens": [0, 0, 4],
}
"""Values that are drawn for each number of the table."""


@st.composite
def logit_arrays(draw: st.DrawFn) -> np.ndarray:
    """Peaked, flat, with ties, with banned and broken entries."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from(VOCAB_SIZES))
    logits = rng.normal(0, draw(st.sampled_from([0.01, 1.0, 4.0, 30.0])), size)
    logits = np.round(logits, draw(st.sampled_from([0, 1, 9]))).astype(np.float32)
    holes = rng.random(size) < draw(st.sampled_from([0.0, 0.0, 0.5, 1.0]))
    logits[holes] = draw(st.sampled_from([-np.inf, np.nan]))
    if draw(st.sampled_from([True, False, False, False])):
        logits[rng.integers(size)] = np.inf
    return logits


@st.composite
def cases(draw: st.DrawFn) -> tuple[np.ndarray, SamplingParams, list[int], int, bytes | None]:
    logits = draw(logit_arrays())
    ids = st.integers(0, len(logits) - 1)
    history = draw(st.lists(ids, min_size=1, max_size=12))
    some_ids = draw(st.lists(ids, min_size=1, max_size=6, unique=True).map(sorted))
    params = SamplingParams(
        **{name: draw(st.sampled_from(values)) for name, values in VALUES.items()},
        penalty_window=draw(st.sampled_from([None, None, 1, 3, 100])),
        seed=draw(st.integers(0, 2**64 - 1)),
        logprobs=draw(st.sampled_from([None, 0, 3, MAX_LOGPROBS])),
        logit_bias=tuple((i, draw(st.floats(-9, 9, width=32))) for i in some_ids) if draw(st.booleans()) else (),
        allowed_token_ids=tuple(draw(st.lists(ids, min_size=1, unique=True).map(sorted))) if draw(st.booleans()) else None,
        banned_token_sequences=((*history[-2:], some_ids[0]), (some_ids[-1],)) if draw(st.booleans()) else (),
        stop_token_ids=tuple(some_ids),
    )
    mask = draw(masks(len(logits))) if draw(st.booleans()) else None
    return logits, params, history, draw(st.integers(1, len(history))), mask


@st.composite
def masks(draw: st.DrawFn, vocab_size: int) -> bytes:
    """Few tokens, some, nearly all, in runs or not."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    run = draw(st.sampled_from([1, 1, 40]))
    bits = np.repeat(rng.random(vocab_size // run + 1) < draw(st.sampled_from([0.01, 0.5, 0.99])), run)[:vocab_size]
    bits[rng.integers(vocab_size)] = True
    return np.packbits(np.pad(bits, (0, -vocab_size % 32)), bitorder="little").tobytes()


def run_native(logits, params, history, num_prompt, mask=None, *, scratch=None):
    words = None if mask is None else np.frombuffer(mask, np.uint32).tolist()
    return _native.sample(logits, make_row_sampling(params), np.array(history, np.int32), num_prompt, scratch, words)


def possible_tokens(logits, params, history, num_prompt, mask=None) -> set[int]:
    """The tokens that the specification draws if its boundaries are moved by `EDGE`."""
    changed = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    changed = add_bias(restrict(changed, params, history, len(history) - num_prompt, mask=mask), params)
    changed = penalize(changed, params, history, num_prompt)
    if params.temperature == 0.0:
        return {int(np.argmax(changed))}
    result = set()
    for d in (-EDGE, 0.0, EDGE):
        moved = replace(params, top_p=params.top_p * (1 + d) if params.top_p < 1 else 1.0, min_p=params.min_p * (1 - abs(d)))
        u, candidates = uniform(params.seed, len(history)), narrow(changed, moved)
        result |= {draw(*candidates, min(max(u + e, 0.0), 1.0)) for e in (-EDGE, 0.0, EDGE)}
    return result


@settings(max_examples=400)
@given(case=cases())
def test_native_agrees_with_the_specification(case):
    logits, params, history, num_prompt, mask = case
    token, logprob, rank, top = run_native(*case)
    try:
        expected = sample(logits, params, history, num_prompt, mask=mask)
    except NoCandidateError:
        assert token == -1
        return
    assert token == expected.token_id or token in possible_tokens(*case)
    if expected.logprobs is not None and token == expected.token_id:
        assert rank == expected.logprobs.rank
        assert logprob == pytest.approx(expected.logprobs.logprob, rel=1e-6, abs=1e-6)
        assert [i for i, _ in top] == [i for i, _ in expected.logprobs.top]
        assert [x for _, x in top] == pytest.approx([x for _, x in expected.logprobs.top], rel=1e-6, abs=1e-6)


@given(several=st.lists(cases(), min_size=2, max_size=6))
def test_working_memory_carries_nothing_over(several):
    shared = _native.SamplerScratch()
    assert [run_native(*case, scratch=shared) for case in several] == [run_native(*case) for case in several]


def test_tokens_are_counted_anew_each_time():
    shared = _native.SamplerScratch()
    case = (np.array([1.0, 0.5, 0.0], np.float32), SamplingParams(temperature=0.0, frequency_penalty=0.3), [2, 0, 0], 1)
    assert [run_native(*case, scratch=shared)[0] for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**64 - 1])
@pytest.mark.parametrize("position", [0, 1, 131071, 2**33])
def test_uniform_numbers_are_equal_to_the_last_bit(seed, position):
    assert _native.uniform(seed, position) == uniform(seed, position)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_greedy_takes_the_first_of_equals_wherever_they_lie(vocab_size):
    for first in {0, vocab_size // 2, vocab_size - 1}:
        logits = np.zeros(vocab_size, np.float32)
        logits[first:] = 1.0
        assert run_native(logits, SamplingParams(temperature=0.0), [0], 1)[0] == first


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_over_a_flat_distribution_keeps_thousands(top_p):
    """More candidates than the first look takes in."""
    logits = np.random.default_rng(0).normal(0, 0.1, 20000).astype(np.float32)
    for seed in range(20):
        params = SamplingParams(top_p=top_p, seed=seed)
        assert run_native(logits, params, [0], 1)[0] in possible_tokens(logits, params, [0], 1)


def test_ids_outside_the_vocabulary_do_no_harm():
    params = SamplingParams(
        logit_bias=((999, 5.0),),
        allowed_token_ids=(1, 999),
        banned_token_sequences=((999,),),
        stop_token_ids=(-5, 999),
        min_tokens=3,
        repetition_penalty=2.0,
        frequency_penalty=1.0,
    )
    assert run_native(np.zeros(4, np.float32), params, [999, -7, 2, 999], 2)[0] == 1


@pytest.mark.parametrize("penalty", [1e-40, 3e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_extreme_penalty_leaves_a_draw(penalty, temperature):
    """The logits of tokens that were seen would become infinite, and no difference between them a number."""
    logits = np.linspace(-3, 3, 50, dtype=np.float32)
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=5)
    assert run_native(logits, params, [3, 40, 41], 2)[0] == sample(logits, params, [3, 40, 41], 2).token_id


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_k": 3}, {"top_p": 0.9}, {"top_k": 3, "top_p": 0.5}])
def test_an_infinite_logit_is_no_answer(changes):
    """Products with damaged weights may overflow."""
    logits = np.zeros(200, np.float32)
    logits[70] = np.inf
    with pytest.raises(NoCandidateError):
        sample(logits, SamplingParams(logprobs=2, **changes), [0], 1)
    assert run_native(logits, SamplingParams(logprobs=2, **changes), [0], 1)[0] == -1


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_k": 3}])
def test_log_probabilities_beside_an_infinite_logit_that_may_not_be_drawn(changes):
    """The draw is fine, and relative to the model's own logits nothing has a probability."""
    params = SamplingParams(allowed_token_ids=(1, 2), logprobs=2, **changes)
    logits = np.array([np.inf, 1, 2], np.float32)
    expected = sample(logits, params, [0], 1)
    assert run_native(logits, params, [0], 1) == (expected.token_id, -np.inf, 1, [])
    assert (expected.logprobs.logprob, expected.logprobs.rank, expected.logprobs.top) == (-np.inf, 1, ())


def test_a_row_of_nothing_is_told():
    assert run_native(np.full(100, np.nan, np.float32), SamplingParams(temperature=0.0, logprobs=2), [0], 1)[0] == -1
