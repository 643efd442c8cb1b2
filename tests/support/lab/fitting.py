"""Helpers that `lab/test_fitting.py` shares with other tests."""

from __future__ import annotations

import random

from penstock.lab.cost_model import CostModel
from penstock.lab.steps import MeasuredStep
from penstock.types.plan import StepShape

COST = CostModel(
    step_ns=1e6,
    decode_row_ns=5e4,
    prefill_token_ns=0.0,
    decode_read_ns=100.0,
    prefill_read_ns=10.0,
    sample_ns=3e4,
    token_brackets=((16, 2e5), (600, 1e5)),
    host_step_ns=2e5,
    host_row_ns=1e4,
    host_prefill_ns=4e5,
)
"""Some steps of it take 1 ms, others 100."""


def shapes(count: int, seed: int = 0) -> list[StepShape]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        rows = [(rng.choice([1, 1, 1, 1, 64, 200]), rng.randrange(2000)) for _ in range(rng.choice((1, 2, 5, 10, 20, 40)))]
        num_decodes = sum(query_len == 1 for query_len, _ in rows)
        found.append(StepShape(tuple(rows), num_decodes + rng.randrange(len(rows) - num_decodes + 1)))
    return found


def steps(count: int = 300, noise: float = 0.02, seed: int = 1) -> list[MeasuredStep]:
    rng = random.Random(seed)
    return [
        MeasuredStep(
            shape,
            round(COST.duration_ns(shape) * rng.uniform(1 - noise, 1 + noise)),
            host_ns=round(COST.host_ns(len(shape.rows), has_prefill=max(shape.rows)[0] > 1) * rng.uniform(0.9, 1.1)),
            group=idx % 20,
        )
        for idx, shape in enumerate(shapes(count))
    ]
