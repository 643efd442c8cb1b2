"""A request gets the same answer, and nothing is lost, whatever the tier below the pool does or fails to do."""

from __future__ import annotations

import random
from dataclasses import fields
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from penstock.clock import VirtualClock
from penstock.engine.transfers import Transfers
from penstock.sched.policies.presets import make_policies
from penstock.sched.policies.reserves import Watermark
from penstock.storage.block_file import BlockFile
from penstock.storage.host_memory import HostMemory
from penstock.testing import Driver, HashExecutor, Outcome, expected_tokens, make_core, make_request, run_to_completion
from penstock.types.events import Add
from penstock.types.plan import Capacity, StepPlan, Ticket
from penstock.types.request import Request
from support.memory_store import Faults
from support.strategies import MODEL, Engine, LowerTier, Workload, check_answers, engines, workloads


def run(
    engine: Engine, workload: Workload, *, in_host_memory: bool = False
) -> tuple[Driver, list[Request], dict[str, Outcome]]:
    core, executor = engine.make()
    clock = VirtualClock()
    store = None
    if in_host_memory:
        assert engine.lower is not None
        store = HostMemory(engine.lower.num_slots, content_bytes=executor.block_bytes)
    transfers, worker = engine.make_transfers(core, executor, clock, store)
    requests = workload.requests()
    drivers: list[Driver] = []

    def check(driver: Driver) -> None:
        drivers[:] = [driver]
        driver.core.check()

    outcomes = run_to_completion(
        core,
        executor,
        later=workload.script(requests),
        clock=clock,
        transfers=transfers,
        worker=worker,
        after_turn=check,
        max_turns=20_000,
    )
    return drivers[0], requests, outcomes


@settings(max_examples=3 * settings.default.max_examples // 2)
@given(engine=engines(has_lower_tier=True), workload=workloads())
def test_every_answer_is_that_of_the_oracle(engine: Engine, workload: Workload) -> None:
    driver, requests, outcomes = run(engine, workload)
    check_answers(engine, workload, requests, outcomes)
    check_nothing_is_left(driver)


@given(engine=engines(has_lower_tier=True), workload=workloads())
def test_so_it_is_above_host_memory(engine: Engine, workload: Workload) -> None:
    driver, requests, outcomes = run(engine, workload, in_host_memory=True)
    check_answers(engine, workload, requests, outcomes)
    check_nothing_is_left(driver)
    assert driver.transfers is not None
    assert not driver.transfers.stats.failures


def check_nothing_is_left(driver: Driver) -> None:
    """All blocks are free, and when the worker is done all staging memory is, too."""
    kv, transfers, worker = driver.core.scheduler.kv, driver.transfers, driver.worker
    assert transfers is not None
    assert worker is not None
    while worker.num_jobs:
        worker.run()
        transfers.arrive()
        transfers.depart()
    transfers.arrive()
    assert transfers.num_moving_blocks == 0
    assert kv.pool.num_available == kv.num_total_blocks
    assert not kv.tables
    driver.core.check()


CAPACITY = Capacity(num_blocks=21, block_size=4, max_rows=8, max_step_tokens=32, max_model_len=80)
EAGER = Watermark(share=0.0, growth_tokens=0)
LARGE = LowerTier(num_slots=500, num_staged_blocks=100)


STORES = ["memory", "host", "disk"]
"""In which nothing breaks but what is told to; the machine's own memory; a file."""


def oversubscribed(
    lower: LowerTier | None,
    *,
    caching: bool,
    depth: int,
    order: str = "fcfs",
    store: str = "memory",
    directory: Path | None = None,
) -> tuple[Driver, list[Request], int]:
    """Twelve requests, of three classes, of which four fit, and how many positions were computed."""
    engine = Engine(CAPACITY, make_policies(order=order, reserve=EAGER), caching, lower, depth, seed=depth)
    requests = [
        make_request(f"r{idx}", range(idx, 14 + 3 * (idx % 5)), arrival_ns=idx, max_tokens=30, priority=-idx % 3)
        for idx in range(12)
    ]
    core, executor = engine.make()
    clock = VirtualClock()
    own = None
    if store == "host":
        own = HostMemory(500, content_bytes=executor.block_bytes)
    elif store == "disk":
        assert directory is not None
        own = BlockFile(directory / "kv", max_bytes=4 << 20, content_bytes=executor.block_bytes, fingerprint=bytes(32))
    transfers, worker = engine.make_transfers(core, executor, clock, own)
    drivers: list[Driver] = []
    # The lowest class comes first, so that others pause it.
    script = {(2 - request.priority) * 3: [] for request in requests}
    for request in requests:
        script[(2 - request.priority) * 3].append(Add(request))
    outcomes = run_to_completion(
        core, executor, later=script, clock=clock, transfers=transfers, worker=worker, after_turn=drivers.append
    )
    for request in requests:
        expected = expected_tokens(request.prompt_token_ids, request.sampling, model=MODEL, max_model_len=80)
        assert tuple(outcomes[request.request_id].token_ids) == expected.token_ids
    if own is not None:
        own.close()
    return drivers[0], requests, executor.num_computed_tokens


def num_needed(requests: list[Request]) -> int:
    return sum(request.num_tokens - 1 for request in requests)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("store", STORES)
def test_the_preempted_compute_less_than_a_block_again(store: str, depth: int, tmp_path: Path) -> None:
    for caching in (True, False):
        _, requests, without = oversubscribed(None, caching=caching, depth=depth)
        assert without > 1.1 * num_needed(requests), "the test needs preemptions that cost something"
        _, requests, num_computed = oversubscribed(LARGE, caching=caching, depth=depth, store=store, directory=tmp_path)
        num_preemptions = sum(request.num_preemptions for request in requests)
        assert num_preemptions > 0
        num_shared = sum(request.num_cached_tokens for request in requests)
        assert num_computed - (num_needed(requests) - num_shared) <= num_preemptions * (CAPACITY.block_size - 1)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_no_fault_makes_a_wrong_token(seed: int, caching: bool, depth: int) -> None:
    draw = random.Random(seed)
    faults = Faults(**{name.name: draw.choice([0.0, 0.05, 0.3]) for name in fields(Faults)})
    lower = LowerTier(
        num_slots=draw.choice([5, 40, 500]),
        num_staged_blocks=draw.choice([8, 100]),
        promptness=draw.choice([0.3, 0.9]),
        faults=faults,
        seed=seed,
    )
    order = draw.choice(["fcfs", "priority"])
    driver, requests, _ = oversubscribed(lower, caching=caching, depth=depth, order=order)
    check_nothing_is_left(driver)
    assert sum(request.num_preemptions for request in requests) > 0
    assert driver.transfers is not None
    assert driver.transfers.stats.num_spilled_blocks > 0


def test_what_a_request_computed_for_itself_is_forgotten_with_it() -> None:
    driver, _, _ = oversubscribed(LARGE, caching=False, depth=2)
    check_nothing_is_left(driver)
    kv = driver.core.scheduler.kv
    assert kv.tier is not None
    assert len(kv.tier.slots) == kv.pool.num_cached == len(kv.prefix.index) == 0


@pytest.mark.parametrize("order", ["fcfs", "priority"])
@pytest.mark.parametrize("store", STORES)
def test_steps_are_planned_ahead_while_contents_move(
    store: str, order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but those for which somebody is preempted, and blocks are saved and brought back beside them."""
    num_ahead: list[int] = []
    num_moved = {"read_blocks": 0, "write_blocks": 0}

    def note_step(executor: HashExecutor, plan: StepPlan) -> Ticket:
        num_ahead.append(executor.num_in_flight)
        return submit(executor, plan)

    def note_move(name: str, executor: HashExecutor, *arguments: Any) -> None:
        num_moved[name] += executor.num_in_flight * len(arguments[0])
        moves[name](executor, *arguments)

    submit, moves = HashExecutor.submit, {name: getattr(HashExecutor, name) for name in num_moved}
    monkeypatch.setattr(HashExecutor, "submit", note_step)
    for name in num_moved:
        monkeypatch.setattr(HashExecutor, name, partialmethod(partial(note_move, name)))
    oversubscribed(LARGE, caching=True, depth=2, order=order, store=store, directory=tmp_path)
    assert min(num_moved.values()) > 0
    assert sum(num_ahead) > 0.6 * len(num_ahead)


def test_a_tier_that_only_fails_is_closed() -> None:
    faults = Faults(write_fails=1.0)
    driver, _, _ = oversubscribed(LowerTier(num_slots=500, num_staged_blocks=100, faults=faults), caching=True, depth=2)
    assert driver.transfers is not None
    assert not driver.transfers.stats.is_open
    assert driver.transfers.stats.failures.keys() == {"full"}


def test_a_prefix_that_was_evicted_comes_back() -> None:
    executor = HashExecutor(CAPACITY, model=MODEL)
    engine = Engine(CAPACITY, make_policies(), enable_prefix_caching=True, lower=LARGE)
    core, _ = engine.make()
    clock = VirtualClock()
    transfers, worker = engine.make_transfers(core, executor, clock)
    assert transfers is not None
    assert isinstance(transfers, Transfers)
    for name, prompt in (("first", range(1, 30)), ("others", range(200, 270)), ("again", range(1, 30))):
        request = make_request(name, [token % 40 for token in prompt], max_tokens=2)
        run_to_completion(core, executor, Add(request), clock=clock, transfers=transfers, worker=worker)
    assert request.num_cached_tokens == 28
    assert transfers.stats.num_loaded_blocks > 0


@pytest.mark.parametrize("eviction", ["lru", "priority", "tenant-fair"])
def test_a_prefix_that_comes_back_does_not_evict_itself(eviction: str) -> None:
    """Its group is the first to lose blocks, and the pool is full of another's."""
    capacity = Capacity(num_blocks=31, block_size=4, max_rows=4, max_step_tokens=64, max_model_len=120)
    executor, clock = HashExecutor(capacity, model=MODEL), VirtualClock()
    core, _ = Engine(capacity, make_policies(order="priority", eviction=eviction), True, LARGE).make()
    transfers, worker = Engine(capacity, make_policies(), True, LARGE).make_transfers(core, executor, clock)
    session = [token % 39 + 1 for token in range(81)]
    others = [[(idx * 11 + token * token) % 37 + 1 for token in range(110)] for idx in range(3)]
    for idx, prompt in enumerate([session, *others, session]):
        priority, tenant = (0, "high") if prompt in others else (5, "low")
        request = make_request(f"r{idx}", prompt, max_tokens=2, priority=priority, tenant=tenant, arrival_ns=clock.now_ns())
        run_to_completion(core, executor, Add(request), clock=clock, transfers=transfers, worker=worker)
        assert worker is not None
        assert transfers is not None
        while worker.num_jobs:
            worker.run()
            transfers.arrive()
    core.check()
    assert request.num_cached_tokens == 80


def test_what_arrives_for_one_that_has_ended_is_kept_only_if_others_may_use_it() -> None:
    for caching, num_kept in ((True, 12), (False, 0)):
        engine = Engine(CAPACITY, make_policies(reserve=EAGER), caching, LARGE)
        core, executor = engine.make()
        clock = VirtualClock()
        transfers, worker = engine.make_transfers(core, executor, clock)
        assert transfers is not None
        assert worker is not None
        kv = core.scheduler.kv
        assert kv.tier is not None
        request = make_request("gone", [token % 40 for token in range(50)])
        kv.lookup_prefix(request)
        hashes = kv.tables["gone"].hashes
        for block_hash in hashes:
            slot = kv.tier.slots.begin_write(block_hash)
            assert slot is not None
            transfers._store.write(slot, block_hash, memoryview(bytes(executor.block_bytes)))
            kv.tier.spilled(block_hash, is_sound=True)
        assert kv.swapping.fetch(request, kv.lookup_prefix(request), max_blocks=20, compute_ns_per_token=0, now_ns=0)
        transfers.depart()
        kv.free("gone")
        while worker.num_jobs:
            worker.run()
            transfers.arrive()
        assert kv.pool.num_cached == num_kept
        core.check()


def test_without_a_tier_nothing_is_named_that_is_not_shared() -> None:
    core = make_core(CAPACITY, enable_prefix_caching=False)
    run_to_completion(core, HashExecutor(CAPACITY), Add(make_request()))
    assert core.scheduler.kv.pool.num_cached == 0
