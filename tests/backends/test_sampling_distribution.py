"""Drawn tokens follow the distribution that was asked for, in both samplers: chi-square with fixed seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from penstock.backends.native import _native
from penstock.backends.native.executor import make_row_sampling
from penstock.backends.reference.sampling import sample
from penstock.types.sampling import SamplingParams

NUM_DRAWS = 4000
VOCAB_SIZE = 40
Draw = Callable[[np.ndarray, SamplingParams, int], int]


def draw_reference(logits: np.ndarray, params: SamplingParams, num_tokens: int) -> int:
    return sample(logits, params, [0] * num_tokens, 1).token_id


def draw_native(logits: np.ndarray, params: SamplingParams, num_tokens: int) -> int:
    return _native.sample(logits, make_row_sampling(params), np.zeros(num_tokens, np.int32), 1)[0]


def expected_probabilities(logits: np.ndarray, params: SamplingParams) -> dict[int, float]:
    """By definition, with plain Python numbers."""
    pairs = sorted(((math.exp(x / params.temperature), -i) for i, x in enumerate(logits.tolist())), reverse=True)
    if params.top_k:
        pairs = pairs[: params.top_k]
    total = sum(weight for weight, _ in pairs)
    kept, reached = [], 0.0
    for weight, negative_id in pairs:
        if reached >= params.top_p * total:
            break
        kept.append((weight, -negative_id))
        reached += weight
    kept = [(weight, token_id) for weight, token_id in kept if weight >= params.min_p * kept[0][0]]
    return {token_id: weight / sum(w for w, _ in kept) for weight, token_id in kept}


def chi_square_limit(degrees: int) -> float:
    """The value that chance exceeds once in 10,000 times. Source: Wilson and Hilferty, 1931."""
    return degrees * (1 - 2 / (9 * degrees) + 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


PARAMS: list[dict[str, float]] = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.2},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
]


@pytest.mark.parametrize("draw", [draw_reference, draw_native])
@pytest.mark.parametrize(
    ("varies", "params"),
    # Parameters change what is drawn from, the position only the number that draws.
    [*(("seed", params) for params in PARAMS), *(("position", params) for params in (PARAMS[0], PARAMS[-1]))],
)
def test_draws_follow_the_distribution(draw: Draw, params: dict[str, float], varies: str):
    logits = np.random.default_rng(5).normal(0, 1.2, VOCAB_SIZE).astype(np.float32)
    if varies == "seed":
        tokens = (draw(logits, SamplingParams(seed=i, **params), 9) for i in range(NUM_DRAWS))
    else:
        of_one_seed = SamplingParams(seed=77, **params)
        tokens = (draw(logits, of_one_seed, 1 + i) for i in range(NUM_DRAWS))
    counts = Counter(tokens)
    expected = expected_probabilities(logits, SamplingParams(**params))
    assert set(counts) <= set(expected)
    chi_square = sum((counts[i] - NUM_DRAWS * p) ** 2 / (NUM_DRAWS * p) for i, p in expected.items())
    assert chi_square < chi_square_limit(len(expected) - 1)
