"""Fits a cost model to steps that were measured. Called by benchmarks; measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.lab.cost_model import CostModel, Counts
from penstock.types.plan import StepShape

_NUM_PARTS = 5


def _units(counts: Counts) -> tuple[int, ...]:
    """Numbers that the first five costs of a model are multiplied with."""
    return 1, counts.num_decodes, counts.num_prefill_tokens, counts.num_decode_reads, counts.num_prefill_reads


@dataclass(frozen=True, slots=True)
class Fit:
    cost: CostModel
    errors: tuple[float, ...]
    """(model - measured) / measured, of each step."""

    @property
    def mean_error(self) -> float:
        """Mean of the absolute values."""
        return sum(map(abs, self.errors)) / len(self.errors)


def fit(steps: Sequence[tuple[StepShape, int]]) -> Fit:
    """Least squares of relative errors over (shape, nanoseconds); no part costs less than nothing.

    Raises ValueError for fewer steps than a cost model has parts, and for one that took no time.
    """
    model = CostModel()
    if len(steps) < _NUM_PARTS:
        raise ValueError(f"{len(steps)} steps can't tell {_NUM_PARTS} parts apart")
    if min(duration_ns for _, duration_ns in steps) <= 0:
        raise ValueError("a step that took no time has no relative error")
    measured = np.array([duration_ns for _, duration_ns in steps], dtype=float)  # [num_steps]
    units = np.array([_units(model.counts(shape)) for shape, _ in steps], dtype=float)
    matrix = units / measured[:, None]  # [num_steps, num_parts]
    costs = np.zeros(_NUM_PARTS)
    kept = list(range(_NUM_PARTS))
    while kept:
        solution = np.linalg.lstsq(matrix[:, kept], np.ones(len(steps)), rcond=None)[0]
        if solution.min() >= 0:
            costs[kept] = solution
            break
        del kept[int(solution.argmin())]
    return Fit(CostModel(*map(float, costs)), tuple(map(float, matrix @ costs - 1)))
