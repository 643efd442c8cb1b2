"""A request gets the answer of its own adapter, and nothing is lost, whatever becomes of adapters: late, failing, evicted."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import VirtualClock
from penstock.sched.adapters import LOAD_TIMEOUT_NS
from penstock.testing import Driver, HashExecutor, run_to_completion
from penstock.testing.driver import LateWorker
from penstock.types.request import FinishReason
from support.strategies import Engine, Workload, check_answers, engines, workloads


class BothWorkers(LateWorker):
    """The worker of the tier below the pool, and that of adapters."""

    def __init__(self, *workers: LateWorker) -> None:
        super().__init__()
        self._workers = workers

    @property
    def num_jobs(self) -> int:
        return sum(worker.num_jobs for worker in self._workers)

    def turn(self) -> None:
        for worker in self._workers:
            worker.turn()

    def run(self, count: int = 1) -> None:
        for worker in self._workers:
            worker.run(count)


@given(
    engine=st.one_of(engines(has_adapters=True), engines(has_adapters=True, has_lower_tier=True)),
    workload=workloads(has_adapters=True),
)
def test_every_answer_is_that_of_the_oracle(engine: Engine, workload: Workload) -> None:
    assert engine.lora is not None
    source, worker = engine.lora.make()
    core, executor = engine.make(source)
    clock = VirtualClock()
    transfers, lower_worker = engine.make_transfers(core, executor, clock)
    requests = workload.requests()

    def check(driver: Driver) -> None:
        driver.core.check()
        assert isinstance(driver.executor, HashExecutor)
        adapters = driver.core.scheduler.kv.adapters
        placed = {number: placed.block_ids for number, placed in driver.executor.adapters.items()}
        assert placed == {number: resident.block_ids for number, resident in adapters.residents.items()}
        assert adapters.num_pinned <= engine.lora.max_running if engine.lora else True

    outcomes = run_to_completion(
        core,
        executor,
        later=workload.script(requests),
        clock=clock,
        transfers=transfers,
        worker=worker if lower_worker is None else BothWorkers(worker, lower_worker),
        after_turn=check,
        max_turns=20_000,
    )
    check_answers(engine, workload, requests, outcomes)
    kv = core.scheduler.kv
    assert kv.pool.num_available == kv.num_total_blocks
    assert not kv.adapters.num_pinned
    assert not kv.fenced


@given(engine=engines(has_adapters=True), workload=workloads(has_adapters=True, has_early_ends=False))
def test_a_source_that_never_answers_ends_what_waits_for_it(engine: Engine, workload: Workload) -> None:
    """The others are served."""
    assert engine.lora is not None
    engine = replace(engine, lora=replace(engine.lora, promptness=0.0))
    assert engine.lora is not None
    source, _ = engine.lora.make()
    core, executor = engine.make(source)
    requests = workload.requests()
    clock = VirtualClock()
    outcomes = run_to_completion(core, executor, later=workload.script(requests), clock=clock)
    served = [request for request in requests if request.adapter is None]
    check_answers(engine, workload, served, {request.request_id: outcomes[request.request_id] for request in served})
    for request in requests:
        if request.adapter is not None:
            assert outcomes[request.request_id].finish_reason is FinishReason.REJECTED
            assert outcomes[request.request_id].last.at_ns >= LOAD_TIMEOUT_NS
