"""The specification of sampling, step by step, against cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.backends.reference.sampling import (
    NoCandidateError,
    add_bias,
    by_likelihood,
    draw,
    narrow,
    penalize,
    philox4x32,
    restrict,
    sample,
    token_logprobs,
    uniform,
)
from penstock.types.sampling import PARAMETERS, SamplingParams

INF = float("inf")


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def of_probabilities(*values: float) -> np.ndarray:
    """Logits whose softmax is `values`."""
    return np.log(np.array(values)).astype(np.float32)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter, key, expected):
    """Known answers: `kat_vectors` of Random123, philox4x32 with 10 rounds."""
    assert philox4x32(counter, key) == expected


def test_uniform_is_made_of_the_first_two_words():
    words = 0x6627E8D5E169C58D
    assert uniform(0, 0) == ((words >> 11) + 0.5) / 2**53


def test_uniform_uses_all_bits_of_seed_and_position():
    arguments = [(0, 0), (1, 0), (2**32, 0), (2**63, 0), (0, 1), (0, 2**32)]
    assert len({uniform(*each) for each in arguments}) == len(arguments)


def test_greedy_takes_the_lowest_id_among_equals():
    assert sample(f32(1, 3, 3, 2), SamplingParams(temperature=0.0), [0], 1).token_id == 1


def test_logprobs_are_those_of_the_model_itself():
    params = SamplingParams(temperature=0.0, logprobs=2, logit_bias=((2, 100.0),), repetition_penalty=2.0)
    result = sample(of_probabilities(0.5, 0.3, 0.2), params, [0], 1)
    assert result.token_id == 2
    assert result.logprobs is not None
    assert result.logprobs.rank == 3
    assert math.isclose(result.logprobs.logprob, math.log(0.2), rel_tol=1e-6)
    assert [token_id for token_id, _ in result.logprobs.top] == [0, 1]
    assert [math.exp(x) for _, x in result.logprobs.top] == pytest.approx([0.5, 0.3])


def test_top_logprobs_break_ties_by_id_and_rank_ignores_equals():
    result = token_logprobs(f32(1, 2, 2, 2, 0), 3, 2)
    assert [token_id for token_id, _ in result.top] == [1, 2]
    assert result.rank == 1


def test_no_top_logprobs_without_being_asked():
    assert sample(f32(0, 1), SamplingParams(temperature=0.0), [0], 1).logprobs is None
    result = sample(f32(0, 1), SamplingParams(temperature=0.0, logprobs=0), [0], 1).logprobs
    assert result is not None
    assert result.top == ()


def test_only_allowed_ids_stay():
    assert restrict(f32(1, 2, 3), SamplingParams(allowed_token_ids=(0, 1)), [0], 0).tolist() == [1, 2, -INF]


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([4, 1, 2], [0, 0, 0, -INF, 0]),
        ([1, 2, 4], [0, 0, 0, 0, 0]),
        ([2], [0, 0, 0, 0, 0]),
    ],
)
def test_a_banned_sequence_bans_its_last_token_after_the_others(history, expected):
    params = SamplingParams(banned_token_sequences=((1, 2, 3),))
    assert restrict(f32(0, 0, 0, 0, 0), params, history, 0).tolist() == expected


def test_a_banned_sequence_of_one_token_is_banned_everywhere():
    assert restrict(f32(0, 0), SamplingParams(banned_token_sequences=((1,),)), [0], 0).tolist() == [0, -INF]


@pytest.mark.parametrize(("num_output", "expected"), [(1, [0, -INF, -INF]), (2, [0, 0, 0])])
def test_stop_tokens_wait_for_min_tokens(num_output, expected):
    params = SamplingParams(min_tokens=2, stop_token_ids=(1, 2))
    assert restrict(f32(0, 0, 0), params, [0] * 5, num_output).tolist() == expected


def test_bans_give_way_where_they_leave_nothing_but_allowed_ids_hold():
    params = SamplingParams(allowed_token_ids=(1,), min_tokens=5, stop_token_ids=(1,), temperature=0.0)
    assert restrict(f32(9, 0, 0), params, [0], 0).tolist() == [-INF, 0, -INF]
    assert sample(f32(9, 0, 0), params, [0], 1).token_id == 1


def test_bias_is_added():
    assert add_bias(f32(0, 1, 2), SamplingParams(logit_bias=((0, 5.0), (2, -1.5)))).tolist() == [5, 1, 0.5]


def test_repetition_penalty_shrinks_positive_and_grows_negative_logits_of_prompt_and_output():
    params = SamplingParams(repetition_penalty=2.0)
    assert penalize(f32(4, -4, 4, 4), params, [0, 1, 2], 2).tolist() == [2, -8, 2, 4]


def test_an_extreme_repetition_penalty_saturates():
    largest = np.finfo(np.float32).max
    assert penalize(f32(4, -4, 1), SamplingParams(repetition_penalty=1e-40), [0], 1).tolist() == [largest, -4, 1]
    assert penalize(f32(4, -4, 1), SamplingParams(repetition_penalty=3e38), [0, 1], 2)[1] == -largest


def test_frequency_and_presence_count_the_output_only():
    params = SamplingParams(frequency_penalty=0.5, presence_penalty=1.0)
    assert penalize(f32(4, 4, 4), params, [0, 1, 1, 2], 1).tolist() == [4, 2, 2.5]


@pytest.mark.parametrize(
    ("window", "expected"),
    [(None, [2, 0, 2, 4]), (4, [2, 0, 2, 4]), (3, [4, 0, 2, 4]), (2, [4, 0, 4, 4]), (1, [4, 0.5, 4, 4])],
)
def test_penalties_count_the_last_tokens_of_their_window(window, expected):
    params = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=1.0, penalty_window=window)
    prompt, output = [0, 2], [1, 1]
    assert penalize(f32(4, 4, 4, 4), params, prompt + output, len(prompt)).tolist() == expected


def test_repetition_comes_before_frequency_and_bias_before_both():
    params = SamplingParams(logit_bias=((0, 2.0),), repetition_penalty=2.0, frequency_penalty=1.0, temperature=0.0)
    changed = penalize(add_bias(f32(4, 0), params), params, [1, 0], 1)
    assert changed.tolist() == [2, 0]  # (4 + 2) / 2 - 1


def test_candidates_are_ordered_by_logit_and_then_by_id():
    assert by_likelihood(f32(1, 3, -INF, 3, 2)).tolist() == [1, 3, 4, 0]


def test_temperature_divides_the_logits():
    ids, weights = narrow(f32(0, 2), SamplingParams(temperature=2.0))
    assert ids.tolist() == [1, 0]
    assert weights.tolist() == pytest.approx([1.0, math.exp(-1.0)])


def test_a_tiny_temperature_leaves_the_largest():
    ids, weights = narrow(f32(0, 1, 1), SamplingParams(temperature=1e-320))
    assert dict(zip(ids.tolist(), weights.tolist(), strict=True)) == {1: 1.0, 2: 1.0, 0: 0.0}


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 9}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.9}, [0, 1, 2]),
        ({"top_k": 2, "top_p": 0.6}, [0]),  # of the two kept, the first has 0.625
        ({"min_p": 0.3}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"top_p": 0.9, "min_p": 0.3}, [0, 1]),
    ],
)
def test_candidates_are_narrowed(params, expected):
    logits = of_probabilities(0.5001, 0.2999, 0.14, 0.06)
    assert narrow(logits, SamplingParams(**params))[0].tolist() == expected


@pytest.mark.parametrize("name", [name for name in PARAMETERS if hasattr(SamplingParams(), name)])
def test_the_table_says_which_parameters_narrow(name):
    logits, one = np.linspace(-2, 2, 9, dtype=np.float32), PARAMETERS[name]
    ids, _ = narrow(logits, SamplingParams(**{name: one.kind(0.1) or 1}))
    assert one.narrows == (len(ids) < len(logits))


def test_top_k_breaks_ties_by_id():
    assert narrow(f32(1, 2, 2, 2), SamplingParams(top_k=2))[0].tolist() == [1, 2]


@pytest.mark.parametrize(("u", "expected"), [(0.01, 1), (0.29, 1), (0.31, 4), (0.79, 4), (0.81, 7), (0.999, 7)])
def test_the_draw_runs_in_order_of_id(u, expected):
    assert draw(np.array([4, 1, 7]), np.array([5.0, 3.0, 2.0]), u) == expected


def test_a_draw_that_rounding_pushes_past_the_end_takes_the_last():
    assert draw(np.array([2, 5]), np.array([1.0, 1.0]), 1.0) == 5


def test_seed_and_position_decide_the_draw_and_nothing_else():
    logits = np.zeros(1000, np.float32)

    def token(seed: int, history: list[int], num_prompt: int) -> int:
        return sample(logits, SamplingParams(seed=seed), history, num_prompt).token_id

    assert token(1, [5] * 7, 7) == token(1, [6] * 7, 2) == int(uniform(1, 7) * 1000)
    assert len({token(seed, [5] * 7, 7) for seed in range(20)}) > 15
    assert len({token(1, [5] * n, 1) for n in range(1, 21)}) > 15


def test_nan_is_never_chosen():
    assert sample(f32(np.nan, 1, np.nan), SamplingParams(temperature=0.0), [0], 1).token_id == 1
    assert sample(f32(np.nan, 1, np.nan), SamplingParams(), [0], 1).token_id == 1


def test_logits_without_a_number_are_an_error():
    with pytest.raises(NoCandidateError):
        sample(f32(np.nan, -INF), SamplingParams(), [0], 1)


def test_logits_are_left_alone():
    logits = f32(1, 2, 3)
    sample(logits, SamplingParams(logit_bias=((0, 9.0),), repetition_penalty=3.0, allowed_token_ids=(0, 1)), [1], 1)
    assert logits.tolist() == [1, 2, 3]
