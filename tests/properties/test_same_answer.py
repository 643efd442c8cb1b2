"""A request's answer is the same, whatever the memory, the budget, the batch, the cache and the company."""

from __future__ import annotations

from hypothesis import given, settings

from penstock.clock import VirtualClock
from penstock.engine.core import EngineCore
from penstock.testing import Driver, HashExecutor, Outcome, run_to_completion
from penstock.types.request import Request
from support.strategies import Engine, Workload, check_answers, engines, workloads


def run(engine: Engine, workload: Workload) -> tuple[EngineCore, HashExecutor, list[Request], dict[str, Outcome]]:
    core, executor = engine.make()
    requests = workload.requests()
    outcomes = run_to_completion(core, executor, later=workload.script(requests), after_turn=check)
    return core, executor, requests, outcomes


def check(driver: Driver) -> None:
    driver.core.check()


@settings(max_examples=3 * settings.default.max_examples)
@given(engine=engines(), workload=workloads())
def test_every_answer_is_that_of_the_oracle_and_all_blocks_are_free_at_the_end(engine: Engine, workload: Workload) -> None:
    core, executor, requests, outcomes = run(engine, workload)
    check_answers(engine, workload, requests, outcomes)
    kv = core.scheduler.kv
    assert not core.has_work
    assert kv.pool.num_available == kv.num_total_blocks
    assert not kv.tables
    assert core.begin(0) is None
    # What ended in the last step is told to the executor with the next plan; nothing else may be left there.
    last = executor.num_known_requests
    assert last <= engine.capacity.max_rows


@given(engine=engines(), workload=workloads())
def test_every_answer_is_that_of_the_oracle_where_slow_masks_make_requests_sit_out(engine: Engine, workload: Workload) -> None:
    clock = VirtualClock()
    requests = workload.requests(clock)
    outcomes = run_to_completion(*engine.make(), later=workload.script(requests), clock=clock, after_turn=check)
    check_answers(engine, workload, requests, outcomes)


@given(engine=engines(), workload=workloads(has_early_ends=False))
def test_the_same_input_gives_the_same_plans(engine: Engine, workload: Workload) -> None:
    histories = []
    for _ in range(2):
        drivers: list[Driver] = []
        run_to_completion(*engine.make(), later=workload.script(workload.requests()), after_turn=drivers.append)
        histories.append(drivers[0].plans)
    assert histories[0] == histories[1]
