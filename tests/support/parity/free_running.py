"""Owns free-running generation through the executor port, and its comparison with golden paths. No torch, no scheduler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.ports import Executor
from penstock.types.plan import AdmitRow, RowPlan, StepPlan
from penstock.types.sampling import SamplingParams
from support.parity.compare import CLEAR_MARGIN, HasLogits
from support.parity.golden import GreedyCase, IntArray


def generate_greedily(executor: Executor, cases: Sequence[GreedyCase]) -> list[IntArray]:
    """Free-running text of all cases at once through the executor port, as many tokens as their paths have.

    Prompts are computed one after the other in chunks, then all rows decode together.
    """
    tables = _hand_out_blocks(executor, cases)
    step_id = 0
    outputs: list[list[int]] = [[] for _ in cases]
    for i, case in enumerate(cases):
        for plan in _prefill_plans(executor, case, tables[i], step_id):
            step_id += 1
            outputs[i] += executor.collect(executor.submit(plan)).token_ids.get(case.name, ())
    for step in range(len(cases[0].path_ids) - 1):
        rows = tuple(RowPlan(case.name, case.prompt_len + step, 1, (), samples=True) for case in cases)
        result = executor.collect(executor.submit(StepPlan(step_id + step, 0, (), rows, ())))
        for i, case in enumerate(cases):
            outputs[i] += result.token_ids[case.name]
    releases = tuple(case.name for case in cases)
    executor.collect(executor.submit(StepPlan(step_id + len(cases[0].path_ids), 0, (), (), releases)))
    return [np.array(output, np.int32) for output in outputs]


def _hand_out_blocks(executor: Executor, cases: Sequence[GreedyCase]) -> list[tuple[int, ...]]:
    tables: list[tuple[int, ...]] = []
    next_id = 1
    for case in cases:
        num_blocks = -(-len(case.text.token_ids) // executor.capacity.block_size)
        tables.append(tuple(range(next_id, next_id + num_blocks)))
        next_id += num_blocks
    return tables


def _prefill_plans(executor: Executor, case: GreedyCase, block_ids: tuple[int, ...], first_step_id: int) -> list[StepPlan]:
    greedy = SamplingParams(max_tokens=len(case.path_ids), temperature=0.0)
    admits = (AdmitRow(case.name, tuple(case.prompt_ids), case.prompt_len, block_ids, 0, greedy),)
    plans: list[StepPlan] = []
    for begin in range(0, case.prompt_len, executor.capacity.max_step_tokens):
        end = min(begin + executor.capacity.max_step_tokens, case.prompt_len)
        row = RowPlan(case.name, begin, end - begin, (), samples=end == case.prompt_len)
        plans.append(StepPlan(first_step_id + len(plans), 0, admits if begin == 0 else (), (row,), ()))
    return plans


def free_running_mismatch(case: GreedyCase, output_ids: IntArray) -> str | None:
    """In words, where an output leaves the reference's path before the first step that is not clear; None if nowhere."""
    unclear = np.flatnonzero(case.margins <= CLEAR_MARGIN)
    num_bound = int(unclear[0]) if len(unclear) else len(case.path_ids)
    differs = np.flatnonzero(output_ids[:num_bound] != case.path_ids[:num_bound])
    if not len(differs):
        return None
    step = int(differs[0])
    return f"{case.name} step {step}: {output_ids[step]} instead of {case.path_ids[step]}, margin {case.margins[step]:.3f}"


def own_path_mismatch(executor: HasLogits, case: GreedyCase, output_ids: IntArray) -> str | None:
    """In words, where a decoded token is not the argmax of the executor's own forward pass over its output; None if nowhere."""
    logits = executor.forward_logits(case.prompt_ids + output_ids[:-1].tolist())[case.prompt_len - 1 :]
    differs = np.flatnonzero(logits.argmax(axis=1) != output_ids)
    if not len(differs):
        return None
    step = int(differs[0])
    return f"{case.name} step {step}: decoded {output_ids[step]}, but a forward pass gives {logits[step].argmax()}"
