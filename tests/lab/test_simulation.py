"""The simulation runs the real core: times are what the cost model says, outputs end where the oracle says, runs repeat."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.lab.cost_model import CostModel
from penstock.lab.simulation import Simulation
from penstock.lab.workload import Job
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.types.plan import Capacity, PaddingId, StepPlan, StepShape
from penstock.types.request import FinishReason

CAPACITY = Capacity(num_blocks=65, block_size=16, max_rows=4, max_step_tokens=64, max_model_len=512)
COST = CostModel()
MS = 1_000_000


def cost(*rows: tuple[int, int]) -> int:
    return COST.duration_ns(StepShape(rows, 1))


def test_one_request_takes_its_prefill_and_a_step_for_each_further_token() -> None:
    job = Job(arrival_ns=5 * MS, num_prompt_tokens=100, num_output_tokens=3)
    outcome = Simulation(capacity=CAPACITY, make_policies=make_policies).run([job])
    stats = outcome.ended[0]
    assert stats.first_scheduled_ns == 5 * MS
    assert stats.first_token_ns == 5 * MS + cost((64, 0)) + cost((36, 64))
    assert stats.ended_ns == outcome.duration_ns == stats.first_token_ns + cost((1, 100)) + cost((1, 101))
    assert (stats.finish_reason, stats.num_generated_tokens, outcome.num_steps) == (FinishReason.STOP, 3, 4)


def test_who_comes_during_a_step_is_planned_after_it() -> None:
    jobs = [Job(arrival_ns=at, num_prompt_tokens=32, num_output_tokens=2) for at in (0, 1)]
    first, second = Simulation(capacity=CAPACITY, make_policies=make_policies).run(jobs).ended
    assert second.first_scheduled_ns == first.first_token_ns == cost((32, 0))


def test_the_clients_limit_ends_an_output_as_well() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=50)]
    stats = Simulation(capacity=CAPACITY, make_policies=make_policies, max_tokens=20).run(jobs).ended[0]
    assert (stats.finish_reason, stats.num_generated_tokens) == (FinishReason.LENGTH, 20)


def test_a_deadline_ends_a_request() -> None:
    job = Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=300, deadline_ns=20 * MS)
    stats = Simulation(capacity=CAPACITY, make_policies=make_policies).run([job]).ended[0]
    assert stats.finish_reason is FinishReason.ABORT
    assert stats.ended_ns >= 20 * MS


def test_with_a_depth_of_two_the_step_of_who_came_meanwhile_is_the_one_after_the_next() -> None:
    jobs = [Job(arrival_ns=at, num_prompt_tokens=32, num_output_tokens=3) for at in (0, 1)]
    outcome = Simulation(capacity=CAPACITY, make_policies=make_policies, depth=2).run(jobs)
    first, second = outcome.ended
    assert second.first_scheduled_ns == first.first_token_ns == cost((32, 0))
    assert second.first_token_ns == cost((32, 0)) + cost((1, 32)) + cost((1, 33), (32, 0))
    assert first.ended_ns == second.first_token_ns
    # After its last token, which is not known beforehand, each has a row for nothing.
    last_ns = second.first_token_ns + cost((1, 34), (1, 32)) + cost((1, 33))
    assert (second.ended_ns, outcome.duration_ns) == (last_ns, last_ns + cost((1, 34)))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("order", ["fcfs", "sjf", "fair"])
def test_a_preempted_output_has_its_length_and_runs_repeat(order: str, depth: int) -> None:
    """Sixteen requests that need six times the memory."""
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=60, num_output_tokens=20 + 25 * idx) for idx in range(16)]
    jobs = [replace(job, tenant=str(idx % 3)) for idx, job in enumerate(jobs)]
    simulation = Simulation(
        capacity=replace(CAPACITY, num_blocks=33, max_rows=8),
        make_policies=lambda: make_policies(order=order, reserve=Watermark(0.0, 0)),
        depth=depth,
    )
    runs: list[list[StepPlan]] = [[], []]
    outcomes = [simulation.run(jobs, on_plan=plans.append) for plans in runs]
    assert sum(stats.num_preemptions for stats in outcomes[0].ended) > 0
    assert [stats.num_generated_tokens for stats in outcomes[0].ended] == [job.num_output_tokens for job in jobs]
    assert runs[0] == runs[1]


def test_predictions_of_the_caller_are_used() -> None:
    jobs = [Job(arrival_ns=0, num_prompt_tokens=9, num_output_tokens=5) for _ in range(3)]
    simulation = Simulation(
        capacity=replace(CAPACITY, max_rows=1), make_policies=lambda: make_policies(order="sjf", predictor="none")
    )
    ended = simulation.run(jobs, predictions={0: 400, 1: 40, 2: 4}).ended
    assert sorted(range(3), key=lambda idx: ended[idx].ended_ns) == [2, 1, 0]


@pytest.mark.parametrize("preset", ["static", "dynamic"])
def test_batches_are_padded(preset: str) -> None:
    jobs = [Job(arrival_ns=idx * MS, num_prompt_tokens=50 + idx, num_output_tokens=5 + idx) for idx in range(20)]
    plans: list[StepPlan] = []
    simulation = Simulation(capacity=replace(CAPACITY, max_rows=16), make_policies=lambda: make_policies(preset))
    ended = simulation.run(jobs, on_plan=plans.append).ended
    assert [(stats.finish_reason, stats.num_generated_tokens) for stats in ended] == [
        (FinishReason.STOP, job.num_output_tokens) for job in jobs
    ]
    assert any(isinstance(row.request_id, PaddingId) and row.samples for plan in plans for row in plan.rows)
