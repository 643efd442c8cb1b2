"""Chooses the steps to measure for a fit, by a greedy D-optimal design (Fedorov, Theory of Optimal Experiments, 1972).

The first steps reach the server's limits: the most tokens, the most rows, the longest context. Further candidates are drawn at
random, uniformly in the logarithms of rows, tokens and contexts. Each next step is the candidate that a fit to the chosen steps
would predict with the largest relative variance.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np

from penstock.lab.cost_model import CostModel
from penstock.lab.fitting import units_of
from penstock.lab.step_counts import counts_of
from penstock.lab.steps import fits
from penstock.types.plan import Capacity, StepShape

NUM_SHAPES, NUM_CANDIDATES = 90, 3000
MOST_CHUNKS = 4
COMMON_SHARE = 0.25
"""How likely the rows of one token of a drawn step have a prefix in common."""


def design(capacity: Capacity, *, seed: int = 1) -> list[StepShape]:
    """Return the shapes of the steps to measure, up to the limits of the capacity."""
    rng = Random(seed)  # noqa: S311  # repeatable on purpose
    largest = [shape for shape in _largest(capacity) if fits(shape, capacity)]
    drawn = (_draw(capacity, rng) for _ in range(NUM_CANDIDATES))
    candidates = [*dict.fromkeys((*largest, *(shape for shape in drawn if shape.rows and fits(shape, capacity))))]
    rough = CostModel()  # only proportions matter
    counts = [counts_of(shape) for shape in candidates]
    matrix = np.stack(list(units_of(counts)[1].values()), axis=1) / np.array([rough.counted_ns(one) for one in counts])[:, None]
    matrix /= np.linalg.norm(matrix, axis=0) + 1e-300
    covariance = 1e6 * np.eye(matrix.shape[1])
    chosen: list[int] = []
    for num_chosen in range(min(NUM_SHAPES, len(candidates))):
        variances = np.einsum("ij,jk,ik->i", matrix, covariance, matrix)
        variances[chosen] = -1
        chosen.append(num_chosen if num_chosen < len(largest) else int(variances.argmax()))
        along = covariance @ matrix[chosen[-1]]
        covariance -= np.outer(along, along) / (1 + matrix[chosen[-1]] @ along)
    return [candidates[idx] for idx in chosen]


def _largest(capacity: Capacity) -> Iterator[StepShape]:
    """Yield shapes with the most tokens, the most rows and the longest context."""
    most_context, most_rows = capacity.max_model_len - 2, min(capacity.max_rows, capacity.max_step_tokens)
    yield StepShape(((min(capacity.max_step_tokens, most_context), 0),), 1)
    yield StepShape(((1, 1),) * most_rows, most_rows)
    yield StepShape(((1, most_context),), 1)


def _draw(capacity: Capacity, rng: Random) -> StepShape:
    """Draw a shape. It may be larger than the capacity, or have no row."""
    most_context = capacity.max_model_len - 2
    num_chunks = rng.choice((0, 1, rng.randint(1, MOST_CHUNKS)))
    num_decodes = 0 if num_chunks and rng.random() < 0.3 else _log_uniform(rng, capacity.max_rows - num_chunks)
    longest = _log_uniform(rng, most_context)
    are_even = rng.random() < 0.5
    decodes = [(1, longest if are_even else _log_uniform(rng, longest)) for _ in range(num_decodes)]
    num_tokens = _log_uniform(rng, capacity.max_step_tokens - num_decodes)
    chunks = [(num_tokens // num_chunks, rng.choice((0, _log_uniform(rng, most_context)))) for _ in range(num_chunks)]
    chunks = [chunk for chunk in chunks if chunk[0] > 1]
    num_samples = num_decodes + rng.randint(0, len(chunks))
    num_common = 0
    if num_decodes > 1 and rng.random() < COMMON_SHARE:
        most = min(context_len for _, context_len in decodes)
        num_common = _log_uniform(rng, most // capacity.block_size) * capacity.block_size
    return StepShape((*decodes, *chunks), num_samples, (num_decodes - 1) * num_common)


def _log_uniform(rng: Random, most: int) -> int:
    """Return a random number from 1 to `most`, uniform in its logarithm; 0 if `most` is below 1."""
    return round(most ** rng.random()) if most > 0 else 0
